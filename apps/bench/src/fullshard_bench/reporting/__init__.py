"""What people read: tables, bars, Markdown, pictures, traces and comparisons."""

__all__: list[str] = []

"""Output for people: tables, bars, Markdown, pictures, traces and comparisons."""

__all__: list[str] = []

"""What the process offers: streams, observers, errors, watching other processes."""

__all__: list[str] = []

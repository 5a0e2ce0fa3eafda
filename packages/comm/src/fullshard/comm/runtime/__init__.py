"""Services of the process: streams, observers, errors, watching other processes."""

__all__: list[str] = []

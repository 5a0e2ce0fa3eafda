"""The reports of a run: numbers per step, a progress bar, pictures, the last lines."""

__all__: list[str] = []

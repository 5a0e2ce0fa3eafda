"""What a run says of itself: numbers per step, a progress bar, pictures, the last lines."""

__all__: list[str] = []

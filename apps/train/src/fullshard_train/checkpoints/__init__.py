"""What a run keeps of itself: what is in a checkpoint, where it lies, weights alone."""

__all__: list[str] = []

"""Rules between the names of a model and those of files; the parts of tensors they stand for."""

__all__: list[str] = []

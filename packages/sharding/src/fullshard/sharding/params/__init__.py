"""One parameter: how it is sharded, its tensors, and where modules and optimizers find it."""

__all__: list[str] = []

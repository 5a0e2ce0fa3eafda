"""A stream of a sharded model's full parameters during training."""

__all__: list[str] = []

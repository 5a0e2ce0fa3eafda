"""Plain shards, or copies elsewhere, which optimizers step in the place of parameters."""

__all__: list[str] = []

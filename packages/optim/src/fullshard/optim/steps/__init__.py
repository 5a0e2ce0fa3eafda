"""What optimizers step in the place of sharded parameters: plain shards, or copies elsewhere."""

__all__: list[str] = []

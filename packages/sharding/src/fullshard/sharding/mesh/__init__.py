"""Which ranks shard, which replicate, and which hold parameters between forward and backward."""

__all__: list[str] = []

"""The contestants, by name: fullshard, torch's `fully_shard`, DDP and the unsharded model."""

__all__: list[str] = []

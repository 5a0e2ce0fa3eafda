"""What users call: fully_shard, replicate and FSDPModule."""

__all__: list[str] = []

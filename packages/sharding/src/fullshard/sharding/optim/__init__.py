"""Optimizer steps on shards, offload, gradient norms, averages of parameters."""

__all__: list[str] = []

"""State dicts of FSDP1 instances: their kinds, hooks, and the methods around them."""

__all__: list[str] = []

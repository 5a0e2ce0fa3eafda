"""When groups communicate: one order for all ranks, launches that small groups share."""

__all__: list[str] = []

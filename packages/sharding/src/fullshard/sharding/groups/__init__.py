"""A parameter group: its state machine and what several groups do together."""

__all__: list[str] = []

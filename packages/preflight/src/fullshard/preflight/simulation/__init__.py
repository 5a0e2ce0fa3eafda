"""A simulated accelerator: streams, events and the order that they give to work."""

__all__: list[str] = []

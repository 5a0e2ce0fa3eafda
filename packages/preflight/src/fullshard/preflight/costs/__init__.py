"""The cost of a kernel and of a collective on a device, described or measured."""

__all__: list[str] = []

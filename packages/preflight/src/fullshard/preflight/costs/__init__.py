"""What a kernel and a collective cost on a device, described or measured."""

__all__: list[str] = []

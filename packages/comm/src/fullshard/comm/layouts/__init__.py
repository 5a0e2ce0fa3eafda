"""Where every shard lies in the buffers of a collective: pure arithmetic and views."""

__all__: list[str] = []

"""From shards to full parameters: unshard strategies, their memory, coalesced gathers."""

__all__: list[str] = []

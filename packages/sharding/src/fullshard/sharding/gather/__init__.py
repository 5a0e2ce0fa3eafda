"""From shards to full parameters: unshard strategies, their memory."""

__all__: list[str] = []

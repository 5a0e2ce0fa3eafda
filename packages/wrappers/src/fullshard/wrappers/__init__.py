"""Front doors for existing code. Owns no engine: every door opens on ``fullshard.sharding``."""

__all__: list[str] = []

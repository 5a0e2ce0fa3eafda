"""The commands `plan`, of meshes and choices that are not there, and `plan-time`, of steps here."""

__all__: list[str] = []

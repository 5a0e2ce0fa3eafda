"""The command `plan`: meshes and choices that are not there, as tables, curves and pictures."""

__all__: list[str] = []

"""The processes of a run: devices, meshes, agreement on errors and on signals."""

__all__: list[str] = []

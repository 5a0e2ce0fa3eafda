"""Memory of a planned step: storages, their owners, and memory inside operations."""

__all__: list[str] = []

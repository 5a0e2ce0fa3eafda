"""Memory of a planned step: storages, their owners, and memory inside operations."""

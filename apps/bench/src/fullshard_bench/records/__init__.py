"""Results as frozen records: their schema, their statistics, and their JSON files."""

__all__: list[str] = []

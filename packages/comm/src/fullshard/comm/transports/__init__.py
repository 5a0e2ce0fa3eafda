"""Who moves bytes, and what travels."""

__all__: list[str] = []

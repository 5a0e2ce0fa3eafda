"""Finds ranks that call different collectives, before they hang."""

__all__: list[str] = []

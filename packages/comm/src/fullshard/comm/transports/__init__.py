"""Transports, and the configuration of collectives."""

__all__: list[str] = []

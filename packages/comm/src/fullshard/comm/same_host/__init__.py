"""Memory shared by the ranks of one host."""

__all__: list[str] = []

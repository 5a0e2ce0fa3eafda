"""Full parameters and state dicts for users."""

__all__: list[str] = []

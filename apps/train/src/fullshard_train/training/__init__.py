"""The training loop, and what it is made of: model, optimiser, rates, checks before it."""

__all__: list[str] = []

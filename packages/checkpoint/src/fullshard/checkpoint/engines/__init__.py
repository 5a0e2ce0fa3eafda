"""Weights of a model in training for the workers of an inference engine."""

__all__: list[str] = []

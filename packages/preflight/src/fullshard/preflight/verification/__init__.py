"""Trains a model both ways, compares, and finds causes."""

__all__: list[str] = []

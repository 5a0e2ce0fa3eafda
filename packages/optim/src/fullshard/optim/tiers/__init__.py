"""Optimizer state away from where it is stepped: in files of each rank, or in host memory."""

__all__: list[str] = []

"""Optimizer state outside the device's and the process's memory, in files of each rank."""

__all__: list[str] = []

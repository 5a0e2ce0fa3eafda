"""Compares values of both runs: tensors, replicas, and what optimizers do."""

__all__: list[str] = []

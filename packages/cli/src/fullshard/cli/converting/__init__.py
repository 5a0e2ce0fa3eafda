"""Checkpoints from one format into another, one tensor at a time.

``sources`` opens a checkpoint of any format, ``targets`` writes one, ``command`` does both.
"""

__all__: list[str] = []

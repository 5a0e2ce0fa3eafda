"""Checkpoints from one format into another, one tensor at a time.

``convert`` opens a checkpoint of any format and writes it in another; the modules named after files
and folders know one format each. ``command`` has the words and the output of ``fullshard convert``.
"""

__all__: list[str] = []

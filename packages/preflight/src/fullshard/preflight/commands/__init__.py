"""The commands ``doctor``, ``plan``, ``verify`` and ``races``.

``command_line.main`` is what ``python -m fullshard.preflight`` and ``fullshard`` run.
"""

__all__: list[str] = []

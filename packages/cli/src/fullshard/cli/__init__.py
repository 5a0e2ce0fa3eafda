"""The command ``fullshard``: one word for all that the project does from a shell.

``main`` is what the console script and ``python -m fullshard.cli`` run.
"""

from fullshard.cli.app import main

__version__ = "0.1.0"

__all__ = ["main"]

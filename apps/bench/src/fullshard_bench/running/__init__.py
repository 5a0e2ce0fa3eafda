"""The measurements of a command: runs, suites of runs, and their execution."""

__all__: list[str] = []

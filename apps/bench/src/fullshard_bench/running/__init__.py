"""What a command measures: runs, suites of runs, and how they are executed."""

__all__: list[str] = []

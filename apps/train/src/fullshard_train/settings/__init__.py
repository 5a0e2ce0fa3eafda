"""The settings of a run, checked where they are built, and their files."""

__all__: list[str] = []

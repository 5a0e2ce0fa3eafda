"""What a run is told: the settings, checked where they are built, and the files they come from."""

__all__: list[str] = []

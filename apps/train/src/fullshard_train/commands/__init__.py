"""What the command line does beside training: which run to continue, exports, the launcher."""

__all__: list[str] = []

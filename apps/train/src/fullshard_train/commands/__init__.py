"""Commands other than training: which run to continue, exports, the launcher."""

__all__: list[str] = []

"""Which rank owns a matrix, and how matrices travel to their owners and back."""

__all__: list[str] = []

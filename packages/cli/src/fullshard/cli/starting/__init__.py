"""``fullshard init``: five questions, and a training script or a configuration from the answers."""

__all__: list[str] = []

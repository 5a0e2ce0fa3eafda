"""The models that are measured, by name, and the batches they train on."""

__all__: list[str] = []

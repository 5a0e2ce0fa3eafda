"""A model's weights from and to safetensors files, by the byte ranges of each rank's shards."""

__all__: list[str] = []

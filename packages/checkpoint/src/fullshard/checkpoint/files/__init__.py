"""Safetensors files: headers, the bytes of each part of a tensor, and sets of files."""

__all__: list[str] = []

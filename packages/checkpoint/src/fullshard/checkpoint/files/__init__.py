"""Safetensors files: their headers, which bytes of them a part of a tensor is, and sets of them."""

__all__: list[str] = []

"""Worlds of up to 128 ranks: models and comparisons that fit them."""

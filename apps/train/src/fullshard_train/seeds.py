"""Seeds derived from names, so that nothing random depends on what was drawn before.

Owns the rule by which every random stream of a run (initial weights, data order, sampling) gets its
own seed. Refuses to hold a generator: a stream that lives across steps would have to be saved, and
would depend on the world size.
"""

from __future__ import annotations

import hashlib

import torch

__all__ = ["derive_seed", "generator_for"]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on `parts` only: the same on every machine and rank."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(*parts: int | str) -> torch.Generator:
    """A new CPU generator seeded with `derive_seed(*parts)`."""
    return torch.Generator().manual_seed(derive_seed(*parts))

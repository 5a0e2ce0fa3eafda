"""The import line for code written against torch's ``replicate``, data parallel on FSDP2's engine.

Owns no code: torch's names, from the layer that defines them. In the import line, write
``fullshard.wrappers.replicate`` for torch's ``replicate_with_fsdp``.
"""

from fullshard.sharding import ReplicateModule, replicate

__all__ = ["ReplicateModule", "replicate"]

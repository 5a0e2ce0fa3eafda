"""What ranks hold of a tensor: whole, as shards, and who holds which element."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.preflight.machine import usable_device

__all__ = ["digest", "full", "generators_mark", "local", "owners"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor unsharded; all ranks call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def owners(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the full shape with the rank that holds each element; all ranks call it.

    Of replicas it names the ranks of the caller's own.
    """
    ranks = torch.full_like(local(tensor), dist.get_rank(), dtype=torch.float32)
    if isinstance(tensor, DTensor):
        ranks = DTensor.from_local(
            ranks,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        ).full_tensor()
    return ranks.cpu().long()


def digest(tensor: torch.Tensor) -> bytes:
    """Return 16 bytes that another tensor has only if all its bits are the same."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return b"".join(digest(getattr(tensor, name)) for name in names)
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    copied = flat.clone()  # memory that numpy has seen cannot be resized any more
    return hashlib.blake2b(copied.numpy().data, digest_size=16).digest()


def generators_mark() -> bytes:
    """Return bytes that differ when torch's generators, here or on the device, are elsewhere."""
    device = usable_device()
    mark = digest(torch.get_rng_state())
    if device.type != "cpu":
        mark += digest(torch.get_device_module(device).get_rng_state(device))
    return mark

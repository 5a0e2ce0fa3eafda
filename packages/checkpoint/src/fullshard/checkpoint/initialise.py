"""Initial values that do not depend on the mesh: each parameter is drawn whole, then cut.

Owns the generator of each parameter and the order of drawing, casting and cutting. The caller
chooses the distribution. Ranks do not communicate, and buffers stay unchanged.

[Note: one generator per parameter] A sharded parameter that ranks fill piece by piece depends on
who drew which piece. Here every rank draws the whole parameter and keeps its part. The seed of the
generator is made of the parameter's clean name and the given seed only. Therefore values do not
depend on the mesh, the order of parameters, or the other parameters of the model. The price is that
each rank draws everything: that takes as long as for the unsharded model on one CPU, and the memory
of the largest parameter. The seed of torch's CPU generator has 32 bits. Therefore two of ``n``
parameters draw equal numbers with a probability of about ``n * n / 2**33``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from fullshard.checkpoint.boxes import box_of
from fullshard.checkpoint.names import ParamNames
from fullshard.sharding import FSDPParamGroup
from fullshard.sharding.spi import group_of, in_block, local_of, require_between_steps

__all__ = ["InitFn", "initialise"]

InitFn: TypeAlias = Callable[[str, torch.Tensor, torch.Generator], object]
"""Fills a whole parameter in place, given its name, memory for it and its generator."""


@torch.no_grad()
def initialise(model: nn.Module, init_fn: InitFn, seed: int) -> None:
    """Give every parameter its initial value: the same on any mesh and for the unsharded model.

    Per parameter, ``init_fn`` fills a whole tensor in float32 on the CPU with random numbers of a
    generator that knows only the seed and the parameter's name; each rank casts and keeps its part.
    Nothing is sent. A rank's memory grows by one whole parameter at a time. Any sharding will do:
    in any dim, hybrid, tensor or expert parallel, replicated, offloaded, or unsharded; frozen
    parameters get values, too. Buffers are left alone. On another kind of CPU, torch's own random
    numbers may differ in their last bits.

    Args:
        model: after ``fully_shard``, with memory (``model.to_empty(device=...)`` after the meta
            device); any model that holds sharded ones; or a plain one.
        init_fn: called as ``init_fn(name, tensor, generator)``, for each parameter once, in the
            model's order. ``name``: the parameter's in the unsharded model, of tied ones the
            first; what ``torch.compile``, checkpoint wrappers and FSDP wrappers put into names is
            not in it. ``tensor``: of the parameter's whole shape, float32 (complex64 for complex
            ones), to be filled in place. ``generator``: hand it to each function that draws, as in
            ``torch.nn.init.normal_(tensor, std=0.02, generator=generator)``.
        seed: of all parameters.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if parameters are on the meta device, or ``init_fn`` leaves elements unset.
        RuntimeError: inside a forward, a backward or an ``unsharded`` block of the model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass an nn.Module")
    if not callable(init_fn):
        raise TypeError(f"init_fn is a {type(init_fn).__name__}; pass a function that fills")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed is a {type(seed).__name__}; pass an int")
    params = ParamNames(model, None).params
    _require_memory(params)
    groups = _quiet_groups(params)
    for group in groups:
        group.reshard()
    try:
        for name, param in params.items():
            _fill(name, param, init_fn, seed)
    finally:
        for group in groups:
            group.generation.advance()


def _require_memory(params: dict[str, torch.Tensor]) -> None:
    lacking = [name for name, param in params.items() if param.is_meta]
    if lacking:
        shown = ", ".join(lacking[:3]) + (" and more" if len(lacking) > 3 else "")
        raise ValueError(
            f"{shown} {'is' if len(lacking) == 1 else 'are'} on the meta device; give the model "
            "memory with model.to_empty(device=...), then call initialise()"
        )


def _quiet_groups(params: dict[str, torch.Tensor]) -> list[FSDPParamGroup]:
    """Return the parameter groups, none of which is in use.

    Raises:
        RuntimeError: if somebody does.
    """
    groups = [group for param in params.values() if (group := group_of(param)) is not None]
    found = list({id(group): group for group in groups}.values())
    for group in found:
        require_between_steps(group, "initialise()")
        if in_block(group):
            raise RuntimeError(
                f"initialise() was called inside an unsharded() block of group {group.name!r}, "
                "which would write other values over it; call it outside of the block"
            )
    return found


def _fill(name: str, param: torch.Tensor, init_fn: InitFn, seed: int) -> None:
    """Draw one parameter and write this rank's part of it."""
    dtype = torch.complex64 if param.is_complex() else torch.float32
    full = torch.full(param.shape, float("nan"), dtype=dtype, device="cpu")
    init_fn(name, full, _generator(name, seed))
    _require_set(name, full)
    local = local_of(param).detach()
    try:
        local.copy_(box_of(param).of(full))
    except Exception as error:
        error.add_note(f"while writing the initial value of {name}, a {type(local).__name__}")
        raise


def _generator(name: str, seed: int) -> torch.Generator:
    """Return a CPU generator of ``name`` and ``seed``; see [Note: one generator per parameter]."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _require_set(name: str, full: torch.Tensor) -> None:
    """Raise if an element is still NaN; without a copy of ``full``."""
    numbers = torch.view_as_real(full) if full.is_complex() else full
    if numbers.numel() and bool(numbers.amin().isnan()):
        unset = "all" if bool(numbers.isnan().all()) else "some"
        raise ValueError(
            f"init_fn left {unset} elements of {name}, shape {tuple(full.shape)}, unset or NaN; it "
            "must fill the tensor that it is given, in place"
        )

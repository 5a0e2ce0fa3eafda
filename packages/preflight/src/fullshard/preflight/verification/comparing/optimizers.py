"""Compares what two optimizers are set to, and what they keep of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.preflight.verification.agree import everyones
from fullshard.preflight.verification.comparing.compare import Comparison, rms
from fullshard.preflight.verification.comparing.replicas import compare_replicas
from fullshard.preflight.verification.comparing.tensors import full
from fullshard.preflight.verification.verdict import Phase, Seen
from fullshard.preflight.wording import listed

__all__ = [
    "Settings",
    "States",
    "compare_states",
    "full_states",
    "note_settings",
    "settings_of",
    "states_of",
]

Settings = dict[str, dict[str, Any]]
"""By parameter what its group has, but for what chooses a kernel."""

States = Mapping[str, Mapping[str, torch.Tensor]]
"""By parameter and key what an optimizer keeps."""

_KERNELS = {"params", "foreach", "fused", "capturable", "differentiable"}


def settings_of(
    optimizers: Iterable[torch.optim.Optimizer], params: Mapping[str, nn.Parameter]
) -> Settings:
    """Return what optimizers are set to for each of the parameters that they have."""
    names = {id(param): name for name, param in params.items()}
    return {
        names[id(param)]: {
            key: _plain(value) for key, value in group.items() if key not in _KERNELS
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) in names
    }


def note_settings(seen: Seen, ours: Settings, theirs: Settings) -> None:
    """Note where ranks' settings are not the reference's, which rank 0 passes; all ranks call it.

    A rank without a reference, as all are layer by layer, passes none.
    """
    ranks = everyones(ours)
    wanted = theirs or ranks[0]
    if dist.get_rank() > 0:
        return
    apart: dict[str, list[str]] = {}
    for name, settings in wanted.items():
        for rank, each in enumerate(ranks):
            for key, value in each.get(name, {}).items():
                if key in settings and value != settings[key]:
                    text = f"{key} is {value} on rank {rank} and {settings[key]}"
                    text += " in the unsharded run" if theirs else " on rank 0"
                    apart.setdefault(text, []).append(name)
    seen.settings = tuple(f"{text} ({listed(names)})" for text, names in apart.items())
    seen.uncovered = tuple(
        name for name in wanted if any(name not in each for each in ranks) and theirs
    )


def states_of(
    optimizers: Iterable[torch.optim.Optimizer], params: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors and numbers that optimizers keep of each parameter."""
    return {
        name: {
            str(key): value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
            for optimizer in optimizers
            for key, value in optimizer.state.get(param, {}).items()
            if isinstance(value, torch.Tensor | int | float)
        }
        for name, param in params.items()
    }


def full_states(ours: States) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield by parameter and key what all ranks keep, unsharded, one at a time.

    All ranks iterate, with what each keeps.
    """
    mine = {(name, key): isinstance(value, DTensor) for name, key, value in _each(ours)}
    ranks = everyones(mine)
    for name, key in ranks[0]:
        if all(each.get((name, key)) is ranks[0][name, key] for each in ranks):
            yield name, key, full(ours[name][key])


def compare_states(comparison: Comparison, ours: States, theirs: States) -> None:
    """Compare what both optimizers keep; all ranks call it, and rank 0 alone has ``theirs``.

    Values without the whole parameter's shape, such as the state of an optimizer of shards, are
    left out, and so are codes of fewer bits.
    """
    sizes: dict[str, float] = {}
    for name, key, came in full_states(ours):
        wanted = theirs.get(name, {}).get(key)
        is_code = came.dim() > 0 and not came.is_floating_point()
        if wanted is not None and wanted.shape == came.shape and not is_code:
            if key not in sizes:
                sizes[key] = rms(each.get(key) for each in theirs.values())
            comparison.states(name, key, (came, wanted), sizes[key])
    sharded = {f"{k} of {n}": each for n, k, each in _each(ours) if isinstance(each, DTensor)}
    compare_replicas(comparison, Phase.STATE, sharded)


def _each(states: States) -> Iterable[tuple[str, str, torch.Tensor]]:
    return ((name, key, value) for name, state in states.items() for key, value in state.items())


def _plain(value: Any) -> Any:
    """A value that ranks can compare."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value if isinstance(value, bool | int | float | str | tuple | None) else repr(value)

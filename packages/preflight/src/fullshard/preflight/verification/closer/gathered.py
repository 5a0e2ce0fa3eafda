"""Looks whether the full parameters that modules see are what the ranks' shards hold.

Parameters are checked when a module's forward begins, when it ends, and when its backward begins.
The values are compared by digest, and only wrong values are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.preflight.tensors import each_tensor
from fullshard.preflight.verification.agree import everyones
from fullshard.preflight.verification.comparing.tensors import digest, full
from fullshard.preflight.verification.names import clean
from fullshard.preflight.verification.sharded import Sharded
from fullshard.preflight.verification.verdict import Cause

__all__ = ["GatherWatch"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what policies cast to
_MOST = 4
_AFTER = "after the forward of"


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """A full parameter that is not what the shards hold.

    Attributes:
        rank: that saw it.
        when: a part of the module's life.
        name: of the parameter.
        looks: in words, how it differs; also the text that distinguishes two kinds of fault.
        cast: the dtype whose rounding explains it; None if none does.
    """

    rank: int
    when: str
    name: str
    looks: str
    cast: torch.dtype | None = None


class GatherWatch:
    """Watches one rank's full parameters in each step."""

    def __init__(self) -> None:
        """Start before the first step."""
        self._expected: dict[str, dict[torch.dtype, bytes]] = {}
        self._before: dict[str, dict[torch.dtype, bytes]] = {}
        self._found: dict[str, tuple[str, torch.Tensor]] = {}
        self._stale: set[str] = set()

    def begin_step(self, sharded: Sharded) -> None:
        """Note what the shards hold; all ranks call it."""
        self._before, self._expected = self._expected, {}
        self._found.clear()
        self._stale.clear()
        for name, param in sharded.params.items():
            value = full(param)
            dtypes = {param.dtype, *_DTYPES} if param.is_floating_point() else {param.dtype}
            self._expected[name] = {dtype: digest(value.to(dtype)) for dtype in dtypes}

    @contextmanager
    def watching(self, sharded: Sharded) -> Iterator[None]:
        """Look inside a ``with`` block, in which the model's forward and backward run."""
        names = {id(param): name for name, param in sharded.params.items()}
        with ExitStack() as stack:
            for path, module in sharded.named.named_modules():
                params = module.named_parameters(recurse=False)
                own = {key: names[id(each)] for key, each in params if id(each) in names}
                if own:
                    enter, leave = partial(self._enter, own), partial(self._leave, clean(path), own)
                    stack.enter_context(module.register_forward_pre_hook(enter))
                    stack.enter_context(module.register_forward_hook(leave))
            yield

    def _enter(self, own: dict[str, str], module: nn.Module, inputs: Any) -> None:
        self._look("in forward", own, module)

    def _leave(
        self, path: str, own: dict[str, str], module: nn.Module, inputs: Any, output: Any
    ) -> None:
        self._look(f"{_AFTER} {path or 'the model'}", own, module)
        for tensor in each_tensor(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._look_back, own, module))

    def _look_back(self, own: dict[str, str], module: nn.Module, gradient: torch.Tensor) -> None:
        self._look("in backward", own, module)

    def _look(self, when: str, own: dict[str, str], module: nn.Module) -> None:
        for key, name in own.items():
            param = module._parameters.get(key)
            if name in self._found or param is None or isinstance(param, DTensor):
                continue
            if not param.numel() or not param.untyped_storage().nbytes():
                continue  # it is not gathered now
            wanted = self._expected[name].get(param.dtype)
            came = digest(param)
            if wanted is not None and came != wanted:
                if self._before.get(name, {}).get(param.dtype) == came:
                    self._stale.add(name)
                self._found[name] = (when, param.detach().cpu().clone())

    def faults(self, sharded: Sharded) -> list[_Fault]:
        """Return what all ranks saw, worded; all ranks call it, before the optimizer's step."""
        names = sorted(set().union(*everyones(set(self._found))))[:_MOST]
        mine = []
        for name in names:
            value = full(sharded.params[name])
            if name in self._found:
                when, seen = self._found[name]
                mine.append(self._fault(when, name, seen, value.cpu()))
        return [fault for faults in everyones(mine) for fault in faults]

    def _fault(self, when: str, name: str, seen: torch.Tensor, value: torch.Tensor) -> _Fault:
        looks, cast = _difference(seen, value)
        if name in self._stale:
            looks = "it is what the shards held in the step before"
        return _Fault(rank=dist.get_rank(), when=when, name=name, looks=looks, cast=cast)

    def causes(self, sharded: Sharded) -> list[Cause]:
        """Return what explains the faults; all ranks call it."""
        faults = self.faults(sharded)
        return [_cause(faults)] if faults else []


def _cause(faults: list[_Fault]) -> Cause:
    # Ranks of a host may share the memory: what one changes in forward, another sees before it.
    first = next((each for each in faults if each.when.startswith(_AFTER)), faults[0])
    ranks = sorted({each.rank for each in faults if each.name == first.name})
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    seen = f"{first.name}, as {who} saw it {first.when}"
    if first.when.startswith(_AFTER):
        return Cause(
            name="a full parameter that forward changes",
            evidence=f"{seen}, is not what the shards hold, and was when that began "
            f"({first.looks}): what forward writes is lost. Change parameters outside of forward, "
            "inside unsharded(..., writeback=True) or through the optimizer",
        )
    if first.cast is not None:
        return Cause(
            name="a policy's dtype",
            evidence=f"{seen}, is rounded to {first.cast}: it is gathered in fewer bits than it is "
            "computed with. Pass stretch= to allow it",
        )
    return Cause(
        name="a gathered parameter that is not what the shards hold",
        evidence=f"{seen}: {first.looks}. Look at the collective that gathers it, and at what "
        "keeps a gathered copy; who changes shards otherwise than by an optimizer calls "
        "parameters_changed()",
    )


def _difference(seen: torch.Tensor, value: torch.Tensor) -> tuple[str, torch.dtype | None]:
    """How a full parameter differs from what the shards hold; the dtype that explains it."""
    if seen.shape != value.shape:
        return f"it has shape {tuple(seen.shape)} and not {tuple(value.shape)}", None
    if not value.is_floating_point():
        return f"{int((seen != value).sum())} of {value.numel()} elements differ", None
    for dtype in (torch.bfloat16, torch.float16):
        if torch.finfo(dtype).eps > torch.finfo(seen.dtype).eps and torch.equal(
            seen, value.to(dtype).to(seen.dtype)
        ):
            return f"it is rounded to {dtype}", dtype
    came, held = seen.double(), value.to(seen.dtype).double()
    apart = came != held
    count = int(apart.sum())
    if torch.equal(came.flatten().sort().values, held.flatten().sort().values):
        return f"it holds the same values, {count} of them in another place", None
    if not bool(came[apart].any()):
        return f"{count} of {held.numel()} elements are 0 in it", None
    part = float((came - held)[apart].norm() / held[apart].norm().clamp(min=1e-30))
    return f"{count} of {held.numel()} elements differ, by {part:.2g} of their size", None

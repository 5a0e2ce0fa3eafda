"""What modules did in a forward: which ran, in which dtypes, what went in and what came out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.preflight.compat import backward_number, tree_leaves
from fullshard.preflight.tensors import each_tensor
from fullshard.preflight.verification.comparing.tensors import generators_mark
from fullshard.preflight.verification.names import clean

__all__ = ["Place", "Trace", "fingerprint", "first_place", "parts", "traced"]

_SAMPLE = 4096
_NUMBERS = 3  # of a fingerprint


@dataclass(kw_only=True)
class Trace:
    """One forward.

    Attributes:
        outputs: per module that ran, in the order in which they ended, fingerprints of the floating
            tensors that it returned first.
        inputs: fingerprints of all tensors and numbers that the modules were given first.
        attached: modules whose output requires a gradient.
        entered: modules of whose inputs one requires a gradient.
        dtypes: the floating dtypes of parameters and outputs.
        runs: per module what it returned each time, as ``outputs``.
        again: the same of what ran again in backward, as with checkpointing.
        draws: per module that drew random numbers, marks of the generators when it began.
        begun: the last such mark of each module.
        begun_again: per module that ran again in backward, such marks.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    attached: set[str] = field(default_factory=set)
    entered: set[str] = field(default_factory=set)
    dtypes: set[torch.dtype] = field(default_factory=set)
    runs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    again: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    draws: dict[str, list[bytes]] = field(default_factory=dict)
    begun: dict[str, bytes] = field(default_factory=dict)
    begun_again: dict[str, list[bytes]] = field(default_factory=dict)

    def changed_again(self, relative: float) -> list[str]:
        """Return the modules that did something else when they ran again in backward.

        The modules returned other values, or drew other random numbers: the end of what
        checkpointing computes again may be left out, so that the last module returns nothing.
        """
        drawn = [
            name
            for name, marks in self.begun_again.items()
            if name in self.draws and not set(marks) <= set(self.draws[name])
        ]
        returned = [
            name
            for name, prints in self.again.items()
            for came in prints
            if name in self.runs
            and not any(_is_near(came, each, relative) for each in self.runs[name])
        ]
        return list(dict.fromkeys([*drawn, *returned]))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where two runs part in a forward.

    Attributes:
        module: the first module whose output differs; or, if what it was given differs too, the
            module that gave it that. Empty: the model itself, or nowhere.
        given: in words, the module inside ``module`` that was given something else, and on which
            rank; empty if none was.
        fed: whether the model itself had another input.
        found: whether they part in the forward at all.
    """

    module: str = ""
    given: str = ""
    fed: bool = False
    found: bool = False


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return three numbers of ``tensor``: its norm, its sum, and a sample with changing weights.

    The sum is divided by the root of the number of elements: then it is no more than the norm, and
    neither is its rounding. Two tensors that differ have other fingerprints, but for a chance of no
    interest here. NaN counts as 0, so that a tensor that holds some has the fingerprint of its
    copy.
    """
    if isinstance(tensor, DTensor):  # a tensor parallel module gives it, on all of its ranks
        tensor = tensor.full_tensor()
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].to("cpu", torch.float64).nan_to_num()
    weights = torch.cos(torch.arange(sample.numel(), dtype=torch.float64))
    known = flat.nan_to_num() if flat.is_floating_point() else flat.float()
    norm, total = known.norm(dtype=torch.float64).cpu(), known.sum(dtype=torch.float64).cpu()
    root = max(1, flat.numel()) ** 0.5
    return torch.stack([norm, total / root, (sample * weights).sum()])


@contextmanager
def traced(model: nn.Module, prefix: str = "") -> Iterator[Trace]:
    """Note what the modules of ``model``, which is called ``prefix``, do in a ``with`` block.

    A call in backward counts as a repetition.
    """
    trace = Trace()
    with ExitStack() as stack:
        for name, module in model.named_modules(prefix=prefix):
            own = clean(name)
            enter, leave = partial(_enter, trace, own), partial(_leave, trace, own)
            stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(leave))
        yield trace


def _enter(
    trace: Trace, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = each_tensor((args, kwargs))
    trace.begun[name] = generators_mark()
    if backward_number() is not None:
        trace.begun_again.setdefault(name, []).append(trace.begun[name])
    elif name not in trace.inputs:
        trace.inputs[name] = _prints([*given, *_numbers((args, kwargs))])
        if any(each.requires_grad for each in given):
            trace.entered.add(name)


def _leave(trace: Trace, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    floating = [each for each in each_tensor(output) if each.is_floating_point()]
    prints = _prints(floating)
    if backward_number() is not None:
        trace.again.setdefault(name, []).append(prints)
        return
    trace.runs.setdefault(name, []).append(prints)
    if trace.begun[name] != generators_mark():
        trace.draws.setdefault(name, []).append(trace.begun[name])
    trace.dtypes.update(each.dtype for each in floating)
    own = module.parameters(recurse=False)
    trace.dtypes.update(param.dtype for param in own if param.is_floating_point())
    if name not in trace.outputs:
        trace.outputs[name] = prints
        if any(each.requires_grad for each in floating):
            trace.attached.add(name)


def _numbers(value: Any) -> list[torch.Tensor]:
    """Return the numbers in nested containers, as tensors."""
    return [
        torch.tensor(float(each), dtype=torch.float64)
        for each in tree_leaves(value)
        if isinstance(each, bool | int | float)
    ]


def _prints(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the fingerprints of all tensors, one after another."""
    return torch.cat([*map(fingerprint, tensors), torch.zeros(0, dtype=torch.float64)])


def first_place(theirs: list[Trace], ours: list[Trace], relative: float) -> Place:
    """Return where the runs part, by the traces of each rank's batch in both of them."""
    for rank, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for name, found in one.outputs.items():
            if _is_near(found, other.outputs.get(name), relative):
                continue
            inner = ""
            while name and not _is_near(one.inputs.get(name), other.inputs.get(name), relative):
                inner = f"{name} on rank {rank}"
                name = next(each for each in _around(name) if each in one.inputs or not each)
            fed = not _is_near(one.inputs.get(name), other.inputs.get(name), relative)
            return Place(module=name, given="" if fed else inner, fed=fed, found=True)
    return Place()


def _around(name: str) -> Iterator[str]:
    """The names of the modules around one, the innermost first, the model itself last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _is_near(found: torch.Tensor | None, wanted: torch.Tensor | None, relative: float) -> bool:
    if found is None or wanted is None:
        return found is None or not found.numel()
    return found.shape == wanted.shape and parts(found, wanted) <= relative


def parts(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return by how much two fingerprints differ, as part of the norms in them."""
    if found.numel() == 0:
        return 0.0
    norms = wanted[::_NUMBERS].abs().clamp(min=1e-30)
    return float(((found - wanted).view(-1, _NUMBERS).abs() / norms[:, None]).max())

"""A user's training program, as data: how to build the model, shard it, feed it, and step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight.tensors import each_tensor
from fullshard.preflight.training import Training
from fullshard.preflight.verification.comparing.modules import ModuleSettings, apply_settings
from fullshard.preflight.verification.trace import fingerprint
from fullshard.sharding.spi import require_count

__all__ = [
    "Choose",
    "Program",
    "Seeds",
    "looks_of",
    "remarks_on",
    "require_shapes",
    "sgd",
    "shapes_of",
]

IGNORED = -100
"""What torch's losses ignore unless told otherwise."""

Choose = Callable[[nn.Module], Iterable[nn.Module]]
"""Returns the layers of a model."""


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that treats each element alone, and linearly."""
    return torch.optim.SGD(params, lr=1e-2)


class Seeds(StrEnum):
    """How random numbers are seeded."""

    ONCE = "once"
    """At the beginning, alike on all ranks; the reference draws for one batch after the other."""
    BY_RANK = "by rank"
    """In each step, by the rank whose batch it is."""
    ALIKE = "alike"
    """In each step, alike for all batches; an experiment."""


@dataclass(frozen=True, kw_only=True)
class Program(Training):
    """A training run; the arguments of ``verify``, which documents them.

    The fields after ``layers`` change the run for an experiment.

    Attributes:
        build_model: return the model, unsharded.
        shard: shard the model in place.
        batch: the batch of this rank, or a function of a step that returns it.
        steps: how many the run has.
        tokens: return the number of items that a loss is the mean of; None: all ranks have as many.
        seed: of random numbers.
        seeds: how random numbers are seeded.
        weighted: multiply each rank's loss by its share of all tokens.
        unhooked: build the reference without the hooks of its parameters.
        bare: take off the hooks of modules that ``shard`` registered.
        settings: by rank, attributes of modules that the reference takes on for its batch.
        modes: modules that the reference trains or evaluates as the sharded model does.
        by_rank: answer the reference's ``dist.get_rank()`` with the rank whose batch it has.
    """

    build_model: Callable[[], nn.Module]
    shard: Callable[[nn.Module], Any]
    batch: Any
    steps: int = 3
    tokens: Callable[[Any], float] | None = None
    seed: int = 0
    layers: bool | Choose | None = None
    seeds: Seeds = Seeds.ONCE
    weighted: bool = False
    unhooked: bool = False
    bare: bool = False
    settings: Sequence[ModuleSettings] = ()
    modes: Mapping[str, bool] = field(default_factory=dict)
    by_rank: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without a run."""
        super().__post_init__()
        for name in ("build_model", "shard"):
            if not callable(getattr(self, name)):
                given = type(getattr(self, name)).__name__
                raise TypeError(f"{name} is a {given}; pass a function")
        if self.tokens is not None and not callable(self.tokens):
            raise TypeError(f"tokens is a {type(self.tokens).__name__}; pass a function of a batch")
        if not isinstance(self.layers, bool | None) and not callable(self.layers):
            raise TypeError(
                f"layers is a {type(self.layers).__name__}; pass True, False, None, or a function "
                "that returns modules of the model it is given"
            )
        if self.step is not None and self.layers not in (None, False):
            raise ValueError(
                "layers= and step= are both given, and layers are compared in steps of one "
                "backward; leave out layers= to compare the whole model"
            )
        require_count("steps", self.steps)

    def built(self) -> nn.Module:
        """Return the unsharded model, from the program's seed."""
        torch.manual_seed(self.seed)
        model = self.build_model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"build_model returned a {type(model).__name__}; return an nn.Module")
        return model

    def skeleton(self) -> nn.Module:
        """Return the unsharded model on the meta device, which takes no memory."""
        with torch.device("meta"):
            model = self.built()
        return model.to("meta")

    def batch_of(self, step: int) -> Any:
        """Return this rank's batch of a step."""
        if callable(self.batch) and not isinstance(self.batch, nn.Module):
            return self.batch(step) if inspect.signature(self.batch).parameters else self.batch()
        return self.batch

    def prepare(self, model: nn.Module, rank: int, path: str = "") -> None:
        """Give ``model``, called ``path``, the settings of a rank, if the program asks for it."""
        if self.settings:
            apply_settings(self.settings[rank], model, path)

    def as_rank(self, rank: int) -> AbstractContextManager[object]:
        """Return a context in which ``dist.get_rank()`` is ``rank``, if the program asks for it."""
        answer = (lambda group=None: rank) if self.by_rank else dist.get_rank
        return patch.object(dist, "get_rank", answer)

    def but(self, **changes: Any) -> Program:
        """Return a copy of the program with some changes."""
        return replace(self, **changes)


def shapes_of(batch: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in a batch."""
    return [tuple(tensor.shape) for tensor in each_tensor(batch)]


def looks_of(batch: Any) -> tuple[int, list[torch.Tensor]]:
    """Return how many of a batch's whole numbers are -100, and a fingerprint of each tensor."""
    tensors = each_tensor(batch)
    whole = [tensor for tensor in tensors if not tensor.is_floating_point()]
    ignored = sum(int((tensor == IGNORED).sum()) for tensor in whole)
    return ignored, [fingerprint(tensor) for tensor in tensors]


def remarks_on(program: Program, looks: list[tuple[int, list[torch.Tensor]]]) -> tuple[str, ...]:
    """Return what all ranks' batches show, which both runs alike would pass over."""
    found = []
    ignored = [number for number, _ in looks]
    if program.tokens is None and len(set(ignored)) > 1:
        found.append(
            f"ranks' batches have unequal numbers of {IGNORED} ({ignored[:8]}): if the loss is a "
            "mean over the others, its mean over ranks weighs them unequally; pass tokens= to "
            "compare with the mean over all"
        )
    first = looks[0][1]
    alike = [len(each) == len(first) and all(map(torch.equal, each, first)) for _, each in looks]
    if len(looks) > 1 and first and all(alike):
        found.append(
            "all ranks were given the same batch: right for tensor parallel ranks; others want "
            "each its own, as from a DistributedSampler"
        )
    return tuple(found)


def require_shapes(program: Program, shapes: list[list[tuple[int, ...]]]) -> None:
    """Return if all ranks' batches have one shape, or the program counts tokens.

    Raises:
        ValueError: if not.
    """
    for rank, each in enumerate(shapes):
        if each != shapes[0] and program.tokens is None:
            raise ValueError(
                f"rank {rank}'s batch has shapes {each}, rank 0's has {shapes[0]}; means over "
                "them weigh differently. Give all ranks equal shapes, or pass tokens=, a "
                "function that says how many items of a batch count"
            )

"""The questions that sharding asks and policies answer, one small protocol each.

Owns the protocols, and the answers that are torch's defaults. ``require`` checks a policy once,
when it is passed in; the engine never asks one for its class and never tests one for None. No
policy is known here: ``fullshard.policies`` satisfies these structurally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fullshard.comm import AllGather, Layout, ReduceConfig, TensorSpec, default_all_gather
from fullshard.comm.spi import ReducePlan

__all__ = [
    "FixedReshard",
    "FullWidth",
    "ModuleCasts",
    "NoOffload",
    "Offload",
    "ParameterDTypes",
    "PrecisionPolicy",
    "PrefetchPolicy",
    "ReshardPolicy",
    "ReverseOrderPrefetch",
    "WireForms",
]


class ParameterDTypes(Protocol):
    """In what dtype is a parameter gathered, and its gradient reduced?"""

    def for_parameter(self, param: nn.Parameter) -> ParameterDTypes:
        """Return what answers for ``param``, asked once, when it is given to ``fully_shard``.

        The identity unless a policy looks at parameters. Ranks must get equal answers.
        """
        return self

    def gathered_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which ``name``, stored in ``dtype``, is gathered and used."""

    def reduced_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which its gradient is reduced."""


class ModuleCasts(Protocol):
    """How are a module's inputs and outputs cast?

    A policy whose ``casts_nothing`` is true when a module is sharded is never called.
    """

    def cast_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what an input holds while the module's forward runs; ``tensor`` if it is that.

        The engine asks for each tensor in the arguments, on the device on which the module
        computes.
        """

    def cast_output(self, output: Any) -> Any:
        """Return what the module's caller is to see."""


class PrecisionPolicy(ParameterDTypes, ModuleCasts, Protocol):
    """What ``mp_policy=`` takes: both questions of precision, answered by one object."""


class Offload(Protocol):
    """Where do a shard, its gradient and the optimizer's state live, and where does it step?

    A copy that a method begins may still be on its way when it returns, on the current stream. The
    engine calls ``arrived`` before the host reads it, once for many copies. A policy may declare
    ``stages_in_nothing`` or ``stages_out_nothing``: the engine may then use the tensors themselves
    without a call. It may declare ``lands_early``: ``stage_out`` is then asked as soon as a
    reduction is over, also where the host waits for that.
    """

    def home(self, device: torch.device) -> torch.device:
        """Return where sharded parameters live, and their gradients, if ``device`` computes.

        The device is equal for both: torch keeps a gradient on its parameter's device.
        """

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Return ``shard``, on its home device, in the kind of memory wanted (pinned, say)."""

    def stage_in(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the shard on ``device``, ready to be gathered."""

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the reduced sharded gradient where the parameter lives."""

    def accumulate(self, present: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add ``gradient``, which ``stage_out`` returned and which arrived, to an earlier one."""

    def stage_step(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a parameter's shard, its gradient or its state where the optimizer steps.

        The result is ``tensor`` itself if it is there already; if the result is another tensor, the
        optimizer steps this tensor, and the parameter is copied back after the step.
        """

    def arrived(self, device: torch.device) -> None:
        """Return when every copy begun on the current stream of ``device`` has arrived."""


class ReshardPolicy(Protocol):
    """Which groups stay unsharded after forward and after backward?

    Asked when it is known which module is the root; the answer holds for all steps after.
    """

    def after_forward(self, is_root: bool) -> bool:
        """Return whether a group is resharded after forward; the root's forward is outermost."""

    def after_backward(self, is_root: bool) -> bool:
        """Return whether a group is resharded after backward."""


class PrefetchPolicy(Protocol):
    """Which groups are gathered ahead of use?

    ``order`` holds the module names in the order in which they run their forward, with
    multiplicity; the answer is positions in it, gathered in the order of the answer. Positions that
    do not exist raise an error; groups that are unsharded already are skipped. In forward,
    ``order`` is that of the last forward. Asked at each module of each step, on all ranks, which
    must answer alike.
    """

    def in_forward(self, order: Sequence[str], position: int) -> Sequence[int]:
        """Return what to gather when ``order[position]`` begins its forward."""

    def in_backward(self, order: Sequence[str], position: int) -> Sequence[int]:
        """Return what to gather when ``order[position]`` begins its backward."""


class WireForms(Protocol):
    """In what form do shards travel to be gathered, and gradients to be reduced?

    Asked when a root is found, with the full names of parameters, and never where a rank shards by
    itself. A form is a spec of the same shape and dim with another dtype; or one that
    ``PacksItself`` for that number of ``ranks``, whose ``arrives_as`` is such a spec. Forms
    that cannot be sent on ``device`` raise a ``ValueError``. Ranks compare forms, and ``hosts``, if
    it has such a thing.
    """

    def unmatched(self, names: Sequence[str]) -> Sequence[str]:
        """Return what the policy names and is no parameter of ``names``, which a root has.

        The engine warns of it when it finds the root: it is a spelling mistake most often.
        """
        return ()

    def gathered_as(
        self, name: str, spec: TensorSpec, ranks: int, device: torch.device
    ) -> TensorSpec:
        """Return what travels of ``name``, which modules see as ``spec``."""

    def reduced_as(
        self, name: str, spec: TensorSpec, ranks: int, device: torch.device
    ) -> TensorSpec:
        """Return what travels of its gradient, whose sum arrives as ``spec``."""

    def all_gather(self, process_group: torch.distributed.ProcessGroup, /) -> AllGather:
        """Return what gathers shards among these ranks, if the user did not choose; at once."""

    def reduction(
        self, layout: Layout, forms: Sequence[TensorSpec], config: ReduceConfig
    ) -> ReducePlan:
        """Return what reduces gradients of ``layout`` that travel in ``forms``, one for each."""


def _function_of(method: object) -> object:
    """Return the function of a bound method; None for what an object holds in its place."""
    return getattr(method, "__func__", None)


@dataclass(frozen=True, kw_only=True)
class NoOffload:
    """The identity offload: shards and gradients live where the model computes."""

    @property
    def stages_in_nothing(self) -> bool:
        """Whether ``stage_in`` returns the shard: gathers then read the shard itself."""
        return _function_of(self.stage_in) is NoOffload.stage_in

    @property
    def stages_out_nothing(self) -> bool:
        """Whether ``stage_out`` returns the gradient, so that nothing has to arrive."""
        mine = _function_of(self.stage_out), _function_of(self.arrived)
        return mine == (NoOffload.stage_out, NoOffload.arrived)

    def home(self, device: torch.device) -> torch.device:
        """Return ``device``."""
        return device

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Return ``shard``."""
        return shard

    def stage_in(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return ``shard``."""
        return shard

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return ``gradient``."""
        return gradient

    def accumulate(self, present: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add in place."""
        present.add_(gradient)

    def stage_step(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return ``tensor``."""
        return tensor

    def arrived(self, device: torch.device) -> None:
        """Return at once: nothing travels."""


@dataclass(frozen=True, kw_only=True)
class FixedReshard:
    """The same answer at every step, as ``reshard_after_forward=`` gives it.

    Attributes:
        forward: reshard after forward; None: all but the root.
        backward: reshard after backward.
    """

    forward: bool | None = None
    backward: bool = True

    def after_forward(self, is_root: bool) -> bool:
        """Return ``forward``, or for None whether the module is not the root."""
        return not is_root if self.forward is None else self.forward

    def after_backward(self, is_root: bool) -> bool:
        """Return ``backward``."""
        return self.backward


@dataclass(frozen=True, kw_only=True)
class ReverseOrderPrefetch:
    """torch's default: backward gathers one group ahead, in the reverse of the forward order."""

    def in_forward(self, order: Sequence[str], position: int) -> Sequence[int]:
        """Return nothing."""
        return ()

    def in_backward(self, order: Sequence[str], position: int) -> Sequence[int]:
        """Return the position before, if there is one."""
        return (position - 1,) if position > 0 else ()


@dataclass(frozen=True, kw_only=True)
class FullWidth:
    """Shards and gradients travel in the dtypes in which they are used and summed."""

    all_gather = staticmethod(default_all_gather)
    """Return the default all-gather for a process group."""

    def unmatched(self, names: Sequence[str]) -> Sequence[str]:
        """Return nothing: no parameter is named."""
        return ()

    def gathered_as(
        self, name: str, spec: TensorSpec, ranks: int, device: torch.device
    ) -> TensorSpec:
        """Return ``spec``."""
        return spec

    def reduced_as(
        self, name: str, spec: TensorSpec, ranks: int, device: torch.device
    ) -> TensorSpec:
        """Return ``spec``."""
        return spec

    def reduction(
        self, layout: Layout, forms: Sequence[TensorSpec], config: ReduceConfig
    ) -> ReducePlan:
        """Return the ordinary one, by the config's collective."""
        return ReducePlan(layout, config)

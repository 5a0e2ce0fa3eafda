"""Record gathers, waits and reductions of ours and of torch's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard.comm import DefaultAllGather, Event, EventKind, EventLog, observe
from fullshard.sharding import fully_shard
from fullshard.sharding.base.states import ShardedState
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.lookup import state_of
from support.collectives import ToldReduceScatter
from support.events.models import make_net
from support.parity.compare import gradients_of
from support.ranks import cpu_mesh

Shard = Callable[..., Any]

full_gradients = gradients_of

STEP = "root 0 1 2 2 1 0"  # gathers of one step: the root stays for its backward


@dataclass
class Recorder:
    """The collectives of one model, in the order in which they were called.

    Attributes:
        calls: ``"gather NAME"``, ``"wait NAME"`` (a gather's handle), ``"reduce NAME"``.
        reduced_numels: per reduction, the elements that it was given.
    """

    calls: list[str] = field(default_factory=list)
    reduced_numels: list[int] = field(default_factory=list)

    @property
    def gathers(self) -> list[str]:
        return [call.removeprefix("gather ") for call in self.calls if call.startswith("gather ")]

    @property
    def reductions(self) -> list[str]:
        return [call.removeprefix("reduce ") for call in self.calls if call.startswith("reduce ")]

    def note_reduction(self, name: str, given: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.calls.append(f"reduce {name}")
        self.reduced_numels.append(given.numel())

    def clear(self) -> None:
        self.calls.clear()
        self.reduced_numels.clear()


class _RecordingWork(dist.Work):
    def __init__(self, work: dist.Work, name: str, recorder: Recorder) -> None:
        super().__init__()
        self._work, self._name, self._recorder = work, name, recorder

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._recorder.calls.append(f"wait {self._name}")
        return self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class _RecordingAllGather(DefaultAllGather):
    def __init__(self, name: str, recorder: Recorder) -> None:
        super().__init__()
        self._name, self._recorder = name, recorder

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self._recorder.calls.append(f"gather {self._name}")
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        return work if work is None else _RecordingWork(work, self._name, self._recorder)


def record(model: nn.Module) -> Recorder:
    """A recorder of the collectives of every sharded module under ``model``.

    A group of several modules goes by the name of the first.
    """
    recorder = Recorder()
    for name, module in reversed(list(model.named_modules())):
        if hasattr(module, "set_custom_all_gather"):
            module.set_custom_all_gather(_RecordingAllGather(name or "root", recorder))
            module.set_custom_reduce_scatter(
                ToldReduceScatter(partial(recorder.note_reduction, name or "root"))
            )
    return recorder


def ours(module: Any, **arguments: Any) -> Any:
    """Our ``fully_shard`` on the CPU mesh of all ranks."""
    return fully_shard(module, mesh=cpu_mesh(), **arguments)


def shard_with_torch(module: Any, **arguments: Any) -> Any:
    """Torch's own ``fully_shard`` on the same mesh."""
    return torch_fully_shard(module, mesh=cpu_mesh(), **arguments)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a scenario leaves behind.

    Attributes:
        recorder: its collectives.
        gradients: the full gradients, by parameter name; None where there is none.
    """

    recorder: Recorder
    gradients: dict[str, torch.Tensor | None]


Scenario = Callable[[Shard], tuple[nn.Module, Recorder]]


def averaged_gradients(plain: nn.Module) -> dict[str, torch.Tensor | None]:
    """The mean over ranks of the gradients of an unsharded model; None if no rank has one."""
    averaged: dict[str, torch.Tensor | None] = {}
    for name, param in plain.named_parameters():
        present = torch.tensor(float(param.grad is not None))
        grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        dist.all_reduce(present)
        dist.all_reduce(grad)
        averaged[name] = grad / dist.get_world_size() if present else None
    return averaged


def assert_close_to(
    got: dict[str, torch.Tensor | None], wanted: dict[str, torch.Tensor | None]
) -> None:
    """The same parameters have the same gradients; float32 sums of a few ranks in any order."""
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        mine = got[name]
        if grad is None or mine is None:
            assert mine is grad, name
        else:
            torch.testing.assert_close(mine, grad, rtol=1e-5, atol=1e-6)


def assert_gradients_of(model: nn.Module, plain: nn.Module) -> None:
    """They are the mean over ranks of those of ``plain``, unsharded; no group holds a lease."""
    assert_close_to(full_gradients(model), averaged_gradients(plain))
    assert_all_returned(model)


def compare_with_torch(scenario: Scenario, *, gradients: bool = True) -> tuple[Outcome, Outcome]:
    """The outcome of ``scenario`` with ours and with torch's, whose gathers and gradients agree.

    ``gradients=False`` is for where torch's own are wrong.
    """
    outcomes = []
    for shard in (shard_with_torch, ours):
        model, recorder = scenario(shard)
        outcomes.append(Outcome(recorder=recorder, gradients=full_gradients(model)))
    theirs, mine = outcomes
    if mine.recorder.gathers != theirs.recorder.gathers:
        raise AssertionError(
            f"ours gathered  {' '.join(mine.recorder.gathers)}\n"
            f"torch gathered {' '.join(theirs.recorder.gathers)}"
        )
    if gradients:
        assert_close_to(mine.gradients, theirs.gradients)
    assert_all_returned(model)
    return mine, theirs


def against_torch(
    run: Callable[[Any, Recorder], object],
    *,
    make: Callable[..., Any] = make_net,
    gradients: bool = True,
    **options: Any,
) -> tuple[Outcome, Outcome]:
    """`compare_with_torch` of ``run(model, recorder)`` on ``make(shard, **options)``."""

    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        model = make(shard, **options)
        recorder = record(model)
        run(model, recorder)
        return model, recorder

    return compare_with_torch(scenario, gradients=gradients)


def group_of(module: nn.Module) -> FSDPParamGroup:
    """The group of the parameters that ``fully_shard`` took from ``module``."""
    state = state_of(module)
    assert state is not None
    (group,) = state.own_groups
    return group


def gathered(names: str) -> list[str]:
    """``"root 0 1"`` as the recorder has it."""
    return ["root" if name == "root" else f"blocks.{name}" for name in names.split()]


def unsharded(net: nn.Module) -> list[str]:
    """Which groups of a ``Net`` hold full parameters now."""
    groups = {"root": net, **{str(i): block for i, block in enumerate(net.blocks)}}  # type: ignore[arg-type]  # a ModuleList
    return [name for name, each in groups.items() if group_of(each).state is ShardedState.UNSHARDED]


def assert_all_returned(model: nn.Module) -> None:
    """Every group under ``model`` is sharded, and nobody holds a lease on it."""
    for module in model.modules():
        state = state_of(module)
        for group in [] if state is None else state.own_groups:
            assert group.state is ShardedState.SHARDED, group
            assert not group.leases.out, group


_LIFECYCLE = frozenset(
    {
        EventKind.UNSHARD,
        EventKind.WAIT,
        EventKind.RESHARD,
        EventKind.REDUCE,
        EventKind.REDUCE_DONE,
        EventKind.PRE_FORWARD,
        EventKind.POST_FORWARD,
        EventKind.PRE_BACKWARD,
        EventKind.POST_BACKWARD,
        EventKind.PREFETCH,
    }
)


def lifecycle(log: EventLog) -> list[str]:
    """What happened to modules and groups, as ``"KIND NAME"``; events of bytes are left out."""
    return [_line(event) for event in log.events if event.kind in _LIFECYCLE]


def events_of(action: Callable[[], object]) -> list[str]:
    """The life-cycle events while ``action`` runs."""
    log = EventLog()
    with observe(log):
        action()
    return lifecycle(log)


def by_name(text: str) -> list[str]:
    """Life-cycle events from lines such as ``NAME: pre_forward unshard``."""
    lines = (line.strip().split(": ") for line in text.strip().splitlines())
    return [f"{kind} {name}" for name, kinds in lines for kind in kinds.split()]


def _line(event: Event) -> str:
    name = "root" if event.name in ("", "(root)") else event.name.removeprefix("blocks.")
    return f"{event.kind} {name}"

"""``watch_races`` and ``check``: the races that a program has on a simulated accelerator."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard.comm import CommStreams, Event, EventKind, observe
from fullshard.preflight.compat import DispatchMode, lonely_group
from fullshard.preflight.planning.world import MeshLike, axes_of
from fullshard.preflight.races.access import Effects, effects_of, here
from fullshard.preflight.races.collectives import Collectives
from fullshard.preflight.races.memory import Memory, Operation, is_gone
from fullshard.preflight.races.names import Names
from fullshard.preflight.races.report import OUTSIDE, Kind, RaceError, RaceReport
from fullshard.preflight.simulation.device import accelerated
from fullshard.preflight.simulation.host import offloading
from fullshard.preflight.simulation.streams import Actor, Machine
from fullshard.preflight.tensors import local_tensors, resizes_told

__all__ = ["check", "keep_on_host", "watch_races"]

_UNORDERED = ("prim",)  # questions, no operations
_LAUNCHED = {EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE}


class RaceMode(DispatchMode):
    """A mode that reports the operations and memory accesses of this thread to the checker."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.names = Names()
        self.memory = Memory(machine, self.names)
        self.collectives = Collectives(machine)
        self.counts: Counter[str] = Counter()
        self.launched = 0
        self.outside = False
        self.stopped = False
        self._travels = ""

    def on_event(self, event: Event) -> None:
        """Remember whose collective is launched now."""
        self.launched += event.kind in _LAUNCHED
        if event.kind in _LAUNCHED or event.kind is EventKind.COPY_IN:
            self._travels = f"buffer of {event.kind.value} of {event.name or 'no name'}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and follow it."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor first: its local operations come back here
        kwargs = kwargs or {}
        if func.namespace in _UNORDERED or self.collectives.landing:
            return func(*args, **kwargs)
        self.memory.settle()
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        return self._operation(func, args, kwargs)

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        launched = self.collectives.launched(func, args, kwargs)
        name = func._schema.name
        used = [(tensor, False) for tensor in launched.read]
        used += [(tensor, True) for tensor in launched.written]
        self._require_memory(name, launched.stream, used)
        result = func(*args, **kwargs)
        operation = self._begin(name, launched.stream)
        for tensor, writes in used:
            block = self.memory.use(tensor, operation, writes=writes)
            block.label = block.label or self._travels
        self.collectives.fill(launched)
        return result

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        effects, stream = effects_of(func), self.machine.current()
        given = list(effects.tensors(args, kwargs))
        if torch.is_grad_enabled():
            for tensor, _ in given:
                if tensor.requires_grad and tensor.is_leaf:
                    self.machine.graph.used(tensor, stream)
        if effects.uses:
            self._require_memory(func._schema.name, stream, given)
        result = func(*args, **kwargs)
        if effects.touches:
            host = not effects.allocates and self._is_hosts([tensor for tensor, _ in given])
            operation = self._begin(func._schema.name, self.machine.host if host else stream)
            for tensor, writes in given if effects.uses else ():
                self.memory.use(tensor, operation, writes=writes)
            self._results(operation, effects, result)
            if effects.asks:
                self.machine.host_waits(stream.clock)
        return result

    def _require_memory(
        self, name: str, stream: Actor, used: Iterable[tuple[torch.Tensor, bool]]
    ) -> None:
        """Stop the program before an operation that would use memory that was freed.

        Raises:
            RaceError: if it would.
        """
        gone = [(tensor, writes) for tensor, writes in used if is_gone(tensor)]
        if not gone:
            return
        self.stopped = True
        operation = Operation(name, stream, stream.time, here())
        for tensor, writes in gone:
            self.memory.use_gone(tensor, operation, writes=writes)
        found = [race for race in self.memory.races if race.kind is Kind.GONE]
        raise RaceError("\n".join(map(str, found)))

    def _is_hosts(self, tensors: list[torch.Tensor]) -> bool:
        """Whether the host does it itself, as all that is used is its own."""
        on_host = [self.memory.is_on_host(each) for each in tensors]
        return bool(on_host) and all(on_host)

    def _results(self, operation: Operation, effects: Effects, result: Any) -> None:
        for tensor in local_tensors(result):
            if self.memory.find(tensor.untyped_storage()) is None:
                self.memory.meet(tensor, operation)
                if not effects.allocates:
                    self.memory.use(tensor, operation, writes=True)

    def _begin(self, name: str, actor: Actor) -> Operation:
        machine = self.machine
        self.counts[actor.name] += 1
        autograd = machine.graph.chose(actor)
        return Operation(name, actor, machine.begin(actor), here(), autograd)

    def read_by_host(self, tensor: torch.Tensor) -> None:
        """Follow the host reading a tensor, for which it waits for the current stream."""
        stream = self.machine.current()
        self._require_memory("read by the host", stream, [(tensor, False)])
        self.memory.use(tensor, self._begin("read by the host", stream), writes=False)
        self.machine.host_waits(stream.clock)

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Inside the ``with`` block what no dispatch shows is seen, too."""
        tensor = torch.Tensor

        def record_stream(given: torch.Tensor, stream: Any) -> None:
            self.memory.meet(given, None).recorded.add(stream.number)

        with ExitStack() as stack:
            stack.enter_context(self.names.following())
            stack.enter_context(resizes_told(self.memory.resized))
            for name in ("record", "synchronize_with_current"):  # one precedes each launch
                method = self._of_here(getattr(CommStreams, name))
                stack.enter_context(patch.object(CommStreams, name, method))
            stack.enter_context(patch.object(tensor, "record_stream", record_stream))
            for name in ("tolist", "numpy", "cpu"):
                stack.enter_context(
                    patch.object(tensor, name, self._reading(getattr(tensor, name)))
                )
            yield

    def _of_here(self, method: Any) -> Any:
        """A method of ``CommStreams``, which raises if they are not of this machine."""

        def checked(streams: CommStreams, given: Any = None) -> Any:
            if streams.copy_in not in self.machine.streams:
                self.outside = True
                raise RaceError(OUTSIDE)
            return method(streams, given)

        return checked

    def _reading(self, method: Any) -> Any:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(tensor, DTensor) and not self.memory.is_on_host(tensor):
                self.read_by_host(tensor)
            return method(tensor, *args, **kwargs)

        return read


_watching: list[Memory] = []


def keep_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, whose memory is the host's for the races that are watched now.

    An operation that uses only such memory runs on the host, at once, outside of any stream's
    order.
    """
    if _watching:
        _watching[-1].keep_on_host(tensor)
    return tensor


@contextmanager
def watch_races(*, expect_collectives: bool = True) -> Iterator[RaceReport]:
    """The report of what runs inside the ``with`` block, complete at its end.

    The CPU is taken for an accelerator there: work is queued on simulated streams, in the place of
    torch's own, and computed at once, so that values are right whatever the order would be. Shard
    and train inside the block: what was sharded before it has no streams.

    Args:
        expect_collectives: whether the report is not ``ok`` if the engine launched no collective.

    Raises:
        RaceError: if a model communicates that was sharded before; if an operation would use freed
            memory, which is then also in the report.
    """
    report = RaceReport(expects_collectives=expect_collectives)
    with _watching_into(report):
        yield report


@contextmanager
def _watching_into(report: RaceReport) -> Iterator[RaceMode]:
    """Watch what runs inside the ``with`` block, and complete ``report`` however it ends."""
    machine = Machine()
    watch = RaceMode(machine)
    with DispatchMode():  # the first one makes torch import what subclasses events
        torch.empty(0)
    with ExitStack() as stack:
        stack.enter_context(accelerated(machine))
        stack.enter_context(offloading(watch.memory, steps=False))
        stack.enter_context(watch.collectives.intercepted())
        stack.enter_context(watch.intercepted())
        stack.enter_context(observe(watch))
        stack.enter_context(watch)
        _watching.append(watch.memory)
        stack.callback(_watching.pop)
        stack.callback(_complete, report, watch)
        yield watch
        report.ended = True


def _complete(report: RaceReport, watch: RaceMode) -> None:
    watch.memory.settle()
    report.races.update(watch.memory.races)
    report.operations.update(watch.counts)
    report.collectives, report.outside = watch.launched, watch.outside


def check(
    program: Callable[..., object],
    *,
    mesh: MeshLike | None = None,
    expect_collectives: bool = True,
) -> RaceReport:
    """The races of a program, which is called here as one rank.

    A program that would use freed memory is stopped, and the report has the reason.

    Args:
        program: shards a model and trains it. The program receives the mesh, if there is one.
        mesh: a number of ranks, (replicas, shards), or the size of each axis by its name: a world
            of that size is made, whose other ranks are not there and are taken to hold what this
            one does. None: in the world that this process is in, over gloo, or in none. In that
            world, memory that is freed too early can be missed, as gloo's threads may release it
            late.
        expect_collectives: whether the report is not ``ok`` if the engine launched no collective.

    Raises:
        RaceError: if a model communicates that was sharded before.
        RuntimeError: if ``mesh`` is given and this process is already in a world.
        TypeError: if ``mesh`` is none of these.
        ValueError: if a size is below 1, or there is no axis.
    """
    report = RaceReport(expects_collectives=expect_collectives)
    if mesh is None:
        _run(program, report)
        return report
    axes = axes_of(mesh)
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised, and mesh= makes a world of its own; leave mesh out, "
            "or check in a process of its own"
        )
    with lonely_group(math.prod(axes.values())):
        made = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        _run(partial(program, made), report)
    return report


def _run(program: Callable[[], object], report: RaceReport) -> None:
    """Watch a program to its end, or to where it was stopped."""
    with _watching_into(report) as watch:
        try:
            program()
        except Exception:
            if not watch.stopped:
                raise

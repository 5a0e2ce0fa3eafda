"""The waits, events and kept references of the engine, each broken by one changed line."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest.mock import patch

from fullshard.comm import AllGatherInFlight, CommStreams, ReduceInFlight
from fullshard.comm.buffers.buffers import BufferSource
from fullshard.comm.collectives import gather, lists, reduce
from fullshard.comm.collectives.gather import FullTensors, OwnShards
from fullshard.comm.collectives.reduce import ReducePlan
from fullshard.comm.collectives.replicas import AllReduceInFlight, SecondReduceInFlight
from fullshard.comm.runtime.works import SeveralWorks
from fullshard.sharding.access.full_params import LeasedParams
from fullshard.sharding.base.policies import OffloadToCPU
from fullshard.sharding.gather.compute_shards import CutShards, TwoLevelInputs
from fullshard.sharding.hooks.context import RootContext
from fullshard.sharding.hooks.module_state import ModuleState
from fullshard.sharding.reduce import launched
from fullshard.sharding.reduce.launched import LaunchedReduction
from fullshard.sharding.reduce.strategies import TwoReductions
from support.races.orderings import (
    all_reduce_after_reduction,
    gather_after_current,
)


@dataclass(frozen=True)
class Mutation:
    """One changed line.

    Attributes:
        place: the class or module of the function.
        function: its name.
        line: what is there, once.
        instead: what stands there then.
        program: which of ``PROGRAMS`` shows it.
        mesh: over which ranks.
        redundant: why nothing is reported, if so.
        ordering: of a redundant one, whether the order that is the reason is there each time.
    """

    place: Any
    function: str
    line: str
    instead: str = "pass"
    program: str = "plain"
    mesh: Any = 4
    redundant: str = ""
    ordering: Callable[[], AbstractContextManager[list[bool]]] | None = None

    def found(self) -> FunctionType:
        """The function as it is written."""
        function = inspect.unwrap(vars(self.place)[self.function])
        assert isinstance(function, FunctionType)
        return function

    def __str__(self) -> str:
        place = self.place.__name__.rpartition(".")[2]
        return f"{place}.{self.function}: {self.line} -> {self.instead}"


def changed_source(mutation: Mutation) -> str:
    """The source of the function, with the line changed."""
    source = textwrap.dedent(inspect.getsource(mutation.found()))
    assert source.count(mutation.line) == 1, source
    return source.replace(mutation.line, mutation.instead)


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Inside the ``with`` block the line is changed."""
    function, names = mutation.found(), dict[str, Any]()
    changed = "from __future__ import annotations\ndef made(__class__):\n"  # which super() reads
    changed += textwrap.indent(changed_source(mutation), "    ")
    changed += f"\n    return {mutation.function}\n"
    exec(compile(changed, inspect.getfile(function), "exec"), function.__globals__, names)
    with patch.object(mutation.place, mutation.function, names["made"](mutation.place)):
        yield


M = Mutation
_HYBRID = (2, 2)
MUTATIONS = [
    # gathers
    M(AllGatherInFlight, "wait", "streams.current().wait_event(self.event)"),
    M(AllGatherInFlight, "wait", "wait_for(self.config, self.work)", program="prefetch-far"),
    M(
        AllGatherInFlight,
        "wait",
        "self.event = streams.record(streams.gather)",
        program="prefetch-far",
    ),
    M(OwnShards, "gather", "streams.gather.wait_event(packed)"),
    M(
        OwnShards,
        "gather",
        "packed = streams.record(streams.copy_in)",
        "packed = streams.record(streams.gather)",
    ),
    M(
        OwnShards,
        "gather",
        "event = streams.record(streams.gather)",
        "event = packed",
        program="prefetch-nothing",
    ),
    M(
        BufferSource,
        "release",
        "streams.retire(buffer.tensor, owner, after or streams.record(), keep=keep)",
    ),
    M(BufferSource, "release", "streams.record()", "streams.record(streams.copy_in)"),
    M(
        OwnShards,
        "gather",
        "event, self.tensors)",
        "event, ())",
        program="post-forward-mesh",  # else shards live in modules, or belong to the copy-in stream
    ),
    M(gather, "wait_for", "work.wait()", program="prefetch-far"),
    M(FullTensors, "fill", "in_flight.wait()"),
    M(AllGatherInFlight, "discard", "self.wait()", program="recovered-ahead"),
    M(
        CommStreams,
        "record",
        "(self.current() if stream is None else stream).record_event()",
        "torch.Event()",
    ),
    # reductions
    M(
        ReduceInFlight,
        "wait",
        "self.plan.config.streams.current().wait_event(self.event)",
        program="lists",
    ),
    M(ReducePlan, "launch", "streams.reduce.wait_event(flight.event)"),
    M(ReducePlan, "launch", "streams.record())", "streams.record(streams.reduce))"),
    M(ReduceInFlight, "launched", "work.wait()", program="own-collectives"),
    M(ReduceInFlight, "_finish", "self.event = streams.record()", program="accumulated"),
    M(
        ReduceInFlight,
        "_finish",
        "config.source.release(packed, streams, streams.inputs, self.event, keep=keep)",
        program="reductions",
    ),
    M(
        reduce,
        "take_input",
        "streams.current().wait_event(streams.record(streams.inputs))",
        program="reductions",
    ),
    M(
        reduce,
        "take_input",
        "streams.record(streams.inputs)",
        "streams.record(streams.gather)",
        program="reductions",
    ),
    M(SeveralWorks, "wait", "work.wait(timeout)", program="all-to-all"),
    M(
        LaunchedReduction,
        "discard",
        "self.in_flight.discard()",
        program="recovered-pageable",
        mesh=_HYBRID,
    ),
    M(LaunchedReduction, "discard", "self.wait()", program="recovered-accumulated"),
    M(
        LaunchedReduction,
        "land",
        "self.event = streams.record()",
        "self.event = streams.record(streams.copy_in)",
        program="accumulated",
    ),
    M(
        LaunchedReduction,
        "land",
        "streams.retire(result.output, streams.reduce, self.event, keep=1)",
        program="accumulated",
        mesh=_HYBRID,
    ),
    M(
        LaunchedReduction,
        "wait",
        "self.setup.config.streams.current().wait_event(self.event)",
        program="accumulated",
    ),
    # replicas
    M(
        AllReduceInFlight,
        "_launch",
        "streams.all_reduce.wait_event(self._reduction.event)",
        mesh=_HYBRID,
    ),
    M(
        AllReduceInFlight,
        "_launch",
        "self._event = streams.record(streams.all_reduce)",
        program="recovered-pageable",
        mesh=_HYBRID,
    ),
    M(AllReduceInFlight, "discard", "flight.wait()", program="recovered-pageable", mesh=_HYBRID),
    M(
        AllReduceInFlight,
        "wait",
        "streams.current().wait_event(self._event)",
        program="recovered-pageable",
        mesh=_HYBRID,
    ),
    M(
        AllReduceInFlight,
        "wait",
        "self._reduction.wait()",
        "self._reduction.plan.shards_in(self._reduction.output)",
        mesh=_HYBRID,
        redundant="the all-reduce, which is waited for next, comes after its reduce-scatter",
        ordering=all_reduce_after_reduction,
    ),
    M(
        TwoReductions,
        "launch",
        "streams.retire(partial_sum, streams.reduce, added, keep=1)",
        program="partial-by-hand",
        mesh=_HYBRID,
    ),
    M(
        TwoReductions,
        "launch",
        "streams.record(streams.all_reduce)",
        "streams.record(streams.reduce)",
        program="partial-by-hand",
        mesh=_HYBRID,
    ),
    # two levels
    M(
        SecondReduceInFlight,
        "_launch",
        "streams.all_reduce.wait_event(self._reduction.event)",
        program="two-levels",
        mesh=_HYBRID,
    ),
    M(
        SecondReduceInFlight,
        "wait",
        "self._second.wait()",
        "self._second.plan.shards_in(self._second.output)",
        program="two-levels",
        mesh=_HYBRID,
    ),
    M(
        TwoLevelInputs,
        "_gather_compute_shards",
        "streams.current().wait_event(streams.record(streams.copy_in))",
        program="two-levels",
        mesh=(4, 1),
    ),
    M(
        TwoLevelInputs,
        "_gather_compute_shards",
        "streams.record(streams.copy_in)",
        "streams.record(streams.reduce)",
        program="two-levels",
        mesh=(4, 1),
    ),
    # buffers in retirement
    M(CommStreams, "_collect", "owner.wait_event(after)"),
    # the beginning of a forward, and gathers that are not a forward's
    M(RootContext, "_begin_forward", "self.shared.streams.synchronize_with_current(event)"),
    M(CommStreams, "synchronize_with_current", "self.copy_in.wait_event(event)"),
    M(CommStreams, "synchronize_with_current", "self.record() if", "torch.Event() if"),
    M(
        CommStreams,
        "synchronize_with_current",
        "self.gather.wait_event(event)",
        redundant="the gather stream waits for the packing on the copy-in stream",
        ordering=gather_after_current,
    ),
    M(
        ModuleState,
        "unshard",
        "self.context.shared.streams.synchronize_with_current()",
        program="by-hand",
    ),
    M(
        LeasedParams,
        "launch",
        "self.group.shared.streams.synchronize_with_current()",
        program="full-after-step",
    ),
    M(
        CutShards,
        "gather",
        "config.streams.copy_in.wait_event(self._cut)",
        program="post-forward-mesh",
    ),
    M(
        CutShards,
        "__init__",
        "self._cut = config.streams.record()",
        "self._cut = config.streams.record(config.streams.copy_in)",
        program="post-forward-mesh",
    ),
    M(
        CutShards,
        "__init__",
        "few.shard_of(tensor, spec.dim)",
        "tensor.chunk(2, spec.dim)[0]",
        program="post-forward-mesh",
    ),
    # lists of a program's own
    M(lists, "all_gather_tensors", "streams.synchronize_with_current()", program="lists"),
    M(
        lists,
        "reduce_scatter_tensors",
        "reduction.wait().shards",
        "reduction.plan.shards_in(reduction.output).shards",
        program="lists",
    ),
    # offload
    M(
        OffloadToCPU,
        "arrived",
        "torch.accelerator.current_stream(device).synchronize()",
        program="offloaded",
    ),
    # a user's function of a reduced buffer
    M(launched, "_call_hook", "stream.wait_event(streams.record())", program="all-reduce-hook"),
    M(
        launched,
        "_call_hook",
        "done = streams.record(stream)",
        "done = streams.record(streams.reduce)",
        "all-reduce-hook",
    ),
    M(launched, "_call_hook", "streams.current().wait_event(done)", program="all-reduce-hook"),
]

"""The places in the engine's source that order streams or keep memory."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fullshard.comm
import fullshard.sharding
from support.races.mutations import Mutation, changed_source

_CALLS = {
    "_collect",
    "collect_all",
    "record",
    "record_event",
    "record_stream",
    "retire",
    "synchronize",
    "synchronize_with_current",
    "wait",
    "wait_event",
    "wait_for",
    "wait_stream",
}
Site = tuple[str, str]

_MEMORY = "keeps memory for longer, and frees nothing: the wait is in CommStreams"
_WORK = "reached without streams only, where a reduction has a handle of its own"
_SAME_HOST = "between CPU processes of one host, which have no streams"
_IN_ORDER = "of a synchronous collective, which is in order already"
_OWN_STREAM = "on the stream that made the result; the host waits without streams"
LEFT_OUT: dict[Site, str] = {
    ("CommStreams.retire", "self._collect(owner, keep)"): _MEMORY,
    ("CommStreams.collect_all", "self._collect(owner, 0)"): _MEMORY,
    ("RootContext.commit", "self.shared.streams.collect_all()"): _MEMORY,
    ("ReduceInFlight.discard", "self.wait()"): "changed in ReduceInFlight.wait",
    ("ReduceInFlight.launch_second", "self.wait()"): "changed in ReduceInFlight.wait",
    ("ReduceInFlight.launched", "wait_for(config, work)"): _WORK,
    ("ReduceInFlight.wait", "wait_for(self.plan.config, self.work)"): _WORK,
    (
        "AllReduceInFlight.launch_second",
        "self._reduction.wait()",
    ): "bounds memory, as ReduceInFlight.launch_second",
    ("AllReduceInFlight.wait", "wait_for(self._reduction.plan.config, self._work)"): _WORK,
    ("ReducePlan._launch_parts", "config.streams.record(config.streams.reduce)"): _SAME_HOST,
    ("AliasReduce.launch", "config.streams.record()"): "a gradient stays where it was made",
    ("gather_into", "work.wait()"): _IN_ORDER,
    ("reduce_scatter_into", "work.wait()"): _IN_ORDER,
    ("awaited", "work.wait()"): _IN_ORDER,
    ("finished", "tensor.wait()"): "of a functional collective, which is taken to be synchronous",
    ("SharedGatherInFlight.wait", "wait_for(self.config, self.work)"): _SAME_HOST,
    ("SharedGatherInFlight.discard", "self.wait()"): _SAME_HOST,
    ("SharedBufferUnshard.discard", "in_flight.wait()"): _SAME_HOST,
    ("SharedBufferUnshard.finish", "in_flight.wait()"): _SAME_HOST,
    ("OffloadToCPU.arrived", "torch.get_device_module(device).synchronize()"): (
        "of a device with one queue, where only the host has to wait"
    ),
    ("StepSettings.finalize_backward", "handle.wait()"): (
        "sets the gradients; the wait is in LaunchedReduction.wait"
    ),
    ("LaunchedReduction.land", "self.in_flight.wait()"): _OWN_STREAM,
    ("ReductionQueue._await_landed", "reduction.wait()"): "changed in LaunchedReduction.wait",
    ("TwoReductions._add", "reduction.wait()"): _OWN_STREAM,
}
"""Places that no mutation changes, with the reason."""

_RELEASED = "goes into `BufferSource.release`, whose line is changed"
_RESULT = "is what was asked for: without it there is no value"
_FLIGHT = "keeps a flight, whose own references are in this list"
_VIEWS = "views of memory that another in this list keeps"
KEPT: dict[Site, str] = {
    ("AllGatherInFlight", "buffer"): _RELEASED,
    ("AllGatherInFlight", "sources"): "changed in OwnShards.gather",
    ("AllReduceInFlight", "_partial"): "changed in TwoReductions.launch, which retires it",
    ("AllReduceInFlight", "_reduction"): _FLIGHT,
    ("BufferedUnshard", "_full"): _VIEWS,
    ("CommStreams", "_retired"): "changed in both uses of `BufferSource.release`",
    ("GroupGradients", "_sums"): "used by the current stream alone",
    ("GatherSetup", "prepared"): _FLIGHT,
    ("TwoReductions", "_begun"): _FLIGHT,
    ("TwoReductions", "_ended"): _FLIGHT,
    ("TwoReductions", "_partial"): "changed in TwoReductions.launch",
    ("ReduceInFlight", "output"): _RESULT,
    ("ReduceInFlight", "packed"): _RELEASED,
    ("ReduceSettings", "divide_factor"): "a user's number",
    ("ReducedShards", "mask"): _RESULT,
    ("ReducedShards", "output"): _RESULT,
    ("ReducedShards", "shards"): _RESULT,
    ("GatherInputs", "_shards"): "shards, which live in the modules",
    ("SecondReduceInFlight", "_second"): _FLIGHT,
    ("TwoLevelInputs", "_full"): _VIEWS,
    ("FullTensors", "_rows"): _VIEWS + "; padding is used by the current stream alone",
    ("LaunchedReduction", "in_flight"): _FLIGHT,
    ("LaunchedReduction", "landed"): "gradients soon, which the current stream waits for",
    ("LaunchedReduction", "mask"): "read by the host, after the same wait",
}
"""By class and attribute, what keeps memory while something is in flight; who answers for it."""

_IN_FLIGHT = {"collectives", "gather", "groups", "reduce", "runtime"}  # folders
_KEEPING = re.compile(r"\bTensor\b|Buffer\b|FullTensors|InFlight|BufferedUnshard")


def sites() -> Counter[Site]:
    """All places, with how often the same call stands there."""
    found: Counter[Site] = Counter()
    for package in (fullshard.comm, fullshard.sharding):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            found.update(_in(ast.parse(path.read_text())))
    return found


def kept() -> set[Site]:
    """Attributes that are declared to hold tensors, buffers, or what is in flight."""
    found: set[Site] = set()
    for package in (fullshard.comm, fullshard.sharding):
        for path in Path(package.__path__[0]).rglob("*.py"):
            if path.parent.name in _IN_FLIGHT:
                found.update(_declared(ast.parse(path.read_text())))
    return found


def _declared(tree: ast.Module) -> Iterator[Site]:
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in (each for each in ast.walk(owner) if isinstance(each, ast.AnnAssign)):
            declared, target = ast.unparse(node.annotation), ast.unparse(node.target)
            attribute = target.startswith("self.") or node in owner.body
            if attribute and "Callable" not in declared and _KEEPING.search(declared):
                yield owner.name, target.removeprefix("self.")


def changed_sites(mutation: Mutation) -> Counter[Site]:
    """The places that a mutation takes away or changes."""
    function = mutation.found()
    owner = function.__qualname__.rpartition(".")[0]
    prefix = f"{owner}." if owner else ""
    before = Counter(_in(ast.parse(textwrap.dedent(inspect.getsource(function))), prefix))
    return before - Counter(_in(ast.parse(changed_source(mutation)), prefix))


def _in(node: ast.AST, prefix: str = "") -> Iterator[Site]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{prefix}{child.name}."
        elif isinstance(child, ast.Call) and _name(child.func) in _CALLS:
            yield prefix.removesuffix("."), ast.unparse(child)
        yield from _in(child, inner)


def _name(function: Any) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))

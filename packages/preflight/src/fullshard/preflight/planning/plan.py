"""``plan``: the memory of a training run on any number of ranks, from one process without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.comm.spi import simulated, traits_of
from fullshard.preflight.compat import foreach_as_on_accelerators, is_compiled, tree_map
from fullshard.preflight.costs.devices import Device, device_named
from fullshard.preflight.costs.here import Here
from fullshard.preflight.planning.choices import Choice, blocks_of, call_shard, takes_mesh
from fullshard.preflight.planning.failures import (
    PlanError,
    check_model,
    saying_where,
)
from fullshard.preflight.planning.measuring import Measuring
from fullshard.preflight.planning.memory.inside import Inside
from fullshard.preflight.planning.memory.ledger import Category, Ledger
from fullshard.preflight.planning.memory.places import Places
from fullshard.preflight.planning.recorder import CollectiveRecorder, Recorder
from fullshard.preflight.planning.report import Plan
from fullshard.preflight.planning.timeline import Timeline, replay
from fullshard.preflight.planning.world import MeshLike, axes_of, lonely_world
from fullshard.preflight.simulation.device import accelerated
from fullshard.preflight.simulation.fused import fused_as_on_accelerators
from fullshard.preflight.simulation.host import offloading
from fullshard.preflight.simulation.streams import Machine
from fullshard.preflight.training import (
    Loss,
    MakeOptimizer,
    MakeOptimizers,
    Step,
    Training,
    adamw,
)
from fullshard.sharding import FSDPModule
from fullshard.sharding.spi import EarlyReduction, groups_of, require_count

__all__ = ["PlanError", "plan", "shard_blocks"]


def shard_blocks(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Shards each module of each outermost ``nn.ModuleList``, then the model."""
    Choice().shard(blocks_of, model, mesh)


def plan(
    build_model: Callable[[], nn.Module],
    batch: Any,
    loss: Loss | None = None,
    *,
    mesh: MeshLike,
    shard: Callable[..., object] = shard_blocks,
    optimizer: MakeOptimizer = adamw,
    step: Step | None = None,
    optimizers: MakeOptimizers | None = None,
    micro_batches: int = 1,
    device: str | Device | Here | None = None,
) -> Plan:
    """Return what a rank's memory and time will be, without the rank.

    The real engine runs as rank 0 of the world, on tensors with shapes but without data, and with a
    process group that moves nothing: two steps, of which the second counts. Peak memory is the
    largest sum of tensors alive after any operation. The peak does not include unused memory of an
    allocator, workspaces of libraries, and memory that ranks of one host share.

    Args:
        build_model: makes the unsharded model; on the meta device, or with values.
        batch: one rank's micro-batch, any nest of tensors whose values do not matter, or a function
            that returns it.
        loss: the scalar loss of a model and a batch.
        mesh: how many ranks shard, or (replicas, shards), or the size of each axis by its name,
            such as ``{"shard": 64, "tp": 8}``, of which ranks of one host come last.
        shard: shards the model. The function is called with the model, and with ``mesh=`` if it has
            this parameter.
        optimizer: makes the optimizer from the parameters.
        step: in place of ``loss`` and ``optimizer``, a generator function of the model, its
            optimizers and a batch. The function calls the optimizers, and yields each loss instead
            of a call of ``backward()``.
        optimizers: with ``step``, makes a list of optimizers from the model.
        micro_batches: backwards before each step of the optimizer; not with ``step``.
        device: what the ranks compute on, for the time of a step: ``"a100"``, ``"h100"``,
            ``"h200"``, ``"b200"``, ``"mi300x"``, or a ``Device`` of your own. None: any
            accelerator, without time. On these the engine runs on simulated streams, optimizers
            work on many tensors at once, and what ``CPUOffloadPolicy`` keeps on the host counts
            apart.
            ``"cpu"``: ranks on CPUs, without time; there the engine keeps the buffers of
            collectives, and all memory is the host's. ``"here"`` or a ``Here``: such ranks on this
            machine, whose single operations and collectives are measured when the plan knows them,
            by as many processes at once as the mesh has ranks.

    Raises:
        PlanError: if an operation of the model depends on data, or is not known without, or with a
            device a collective is none whose time is known; it says which. If a process that
            measures this machine fails.
        RuntimeError: if this process is in a process group already.
        TypeError: if the mesh is no number of ranks and no pair, ``micro_batches`` no int, the loss
            no tensor, or what ``optimizer`` returns no optimizer; if ``loss`` and ``step`` are both
            given, or neither.
        ValueError: if a size of the mesh or ``micro_batches`` is below 1, or the loss no scalar; if
            no device has this name, or the mesh has several axes and ``shard`` takes no mesh; if an
            optimizer's step needs a closure; if ``micro_batches`` is given with ``step``.
    """
    axes = axes_of(mesh)
    training = Training(loss=loss, optimizer=optimizer, step=step, optimizers=optimizers)
    require_count("micro_batches", micro_batches)
    if step is not None and micro_batches > 1:
        raise ValueError(
            f"micro_batches is {micro_batches} and step= is given; yield the loss of each "
            "micro-batch in step, and leave out micro_batches="
        )
    if len(axes) > 1 and not takes_mesh(shard):
        raise ValueError(
            f"mesh is {axes}, and shard takes no mesh=, so that it would shard over all ranks; "
            "give it a parameter mesh and pass that to fully_shard"
        )
    places = Places()
    on = _Machine.of(device, tuple(axes.values()), places)
    recorder = on.recorder
    ledger = Ledger(places, recorder, Inside(kernels=on.on_cpu))
    with lonely_world(axes) as made, on.simulated(ledger), ledger:
        if recorder is not None:
            recorder.name_axes(made)
        with saying_where(places):
            model = build_model()
            check_model(model)
            parameters = sum(each.numel() for each in model.parameters())
            compiled = any(map(is_compiled, model.modules()))
            call_shard(shard, model, made)
            _materialise(model)
            run = _Run(model, training, ledger, micro_batches)
            construction = ledger.peak.nbytes
            with places.followed(model, run.optimizers):
                run.step(_without_data(batch))  # makes what later steps find: state and buffers
                ledger.restart()
                run.step(_without_data(batch))
        found = _plan_of(axes, parameters, ledger, construction, compiled)
    tensors = sum(1 for _ in model.parameters())
    return replace(found, device=on.name, time=on.timeline(tensors))


@dataclass(frozen=True)
class _Machine:
    """The machine on which the ranks of a plan compute.

    Attributes:
        name: for the report.
        on_cpu: whether they compute on CPUs; else on accelerators, which are simulated.
        recorder: records a step to be timed, if it is.
        device: the description by which the step is timed, if it is.
        measuring: measures that, if it is to be.
    """

    name: str
    on_cpu: bool
    recorder: Recorder | None = None
    device: Device | None = None
    measuring: Measuring | None = None

    @classmethod
    def of(
        cls, device: str | Device | Here | None, sizes: tuple[int, ...], places: Places
    ) -> _Machine:
        """Return the machine for ``device=`` and a mesh of these sizes."""
        if device is None:
            return cls("any accelerator", on_cpu=False)
        if device == "cpu":
            return cls("CPU", on_cpu=True, recorder=CollectiveRecorder(places))
        here = Here() if device == "here" else device
        if isinstance(here, Here):
            measuring = Measuring(here, sizes, places)
            return cls(
                "this machine", on_cpu=True, recorder=measuring.recorder, measuring=measuring
            )
        described = device_named(here)
        return cls(described.name, described.synchronous, Recorder(places), described)

    def timeline(self, parameters: int) -> Timeline | None:
        """The step that was recorded, in time; of a model with so many tensors as parameters."""
        if self.measuring is not None:
            try:
                return self.measuring.timeline(parameters)
            except RuntimeError as error:
                raise PlanError(str(error)) from error
        if self.recorder is None or self.device is None:
            return None
        return replay(self.recorder.records, self.recorder.streams, self.device)

    @contextmanager
    def simulated(self, ledger: Ledger) -> Iterator[None]:
        """Inside the ``with`` block the CPU is taken for it."""
        with ExitStack() as stack:
            if self.on_cpu:
                unpinned = replace(traits_of(_CPU), pinned_memory=False)  # nothing to pin is there
                stack.enter_context(simulated("cpu", unpinned))
            else:
                stack.enter_context(foreach_as_on_accelerators())
                stack.enter_context(fused_as_on_accelerators())
                stack.enter_context(offloading(ledger.host, steps=True))
            if self.measuring is not None:
                stack.enter_context(self.measuring.following(ledger.reserve))
            elif self.recorder is not None:
                keep = ledger.reserve if self.on_cpu else None
                stack.enter_context(self.recorder.following(streams=not self.on_cpu, keep=keep))
            elif not self.on_cpu:
                stack.enter_context(accelerated(Machine()))
            yield


_CPU = torch.device("cpu")


def _materialise(model: nn.Module) -> None:
    """Give what is on the meta device memory, as a user's initialisation does."""
    if any(each.is_meta for each in (*model.parameters(), *model.buffers())):
        model.to_empty(device="cpu")


def _without_data(batch: Any) -> Any:
    """The batch as tensors of this world; called inside it, where new tensors have no data."""
    return tree_map(_empty, batch() if callable(batch) else batch)


def _empty(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.requires_grad_(value.requires_grad)


class _Run:
    """Trains, and notes what the tensors are that it knows."""

    def __init__(
        self, model: nn.Module, training: Training, ledger: Ledger, micro_batches: int
    ) -> None:
        self._model, self._training, self._ledger = model, training, ledger
        self._micro_batches = micro_batches
        self._announces: FSDPModule | None = None  # if placements ask which backward is the last
        groups = groups_of(model, recurse=True) if isinstance(model, FSDPModule) else ()
        if any(each.gradients.early_reduction is not EarlyReduction.ALL for each in groups) or any(
            each.gathering.keeps_copies for each in groups
        ):
            assert isinstance(model, FSDPModule), "it has groups"
            self._announces = model
        self.optimizers = training.optimizers_of(model)
        ledger.note(Category.SHARDS, list(model.parameters()), list(model.buffers()))
        for module in model.modules():
            module.register_forward_pre_hook(self._note_gathered)

    def step(self, batch: Any) -> None:
        """Run one step of the program."""
        note = self._ledger.note
        tree_map(partial(note, Category.BATCH), batch)
        for number in range(1, self._micro_batches + 1):
            for loss in self._training.losses_of(self._model, self.optimizers, batch):
                if self._announces is not None and self._training.step is None:
                    self._announces.set_is_last_backward(number == self._micro_batches)
                loss.backward()
                note(Category.GRADIENTS, [each.grad for each in self._model.parameters()])
        if self._training.step is None:
            self.optimizers[0].step()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                note(Category.OPTIMIZER_STATE, list(state.values()))
        if self._training.step is None:
            self.optimizers[0].zero_grad()

    def _note_gathered(self, module: nn.Module, args: Any) -> None:
        full = [each for each in module.parameters(recurse=False) if not isinstance(each, DTensor)]
        self._ledger.note(Category.GATHERED, full)


def _plan_of(
    axes: dict[str, int], parameters: int, ledger: Ledger, construction: int, compiled: bool
) -> Plan:
    peak = ledger.peak
    modules: dict[str, int] = {}
    for number, nbytes in peak.sizes.items():
        if nbytes and ledger.category_of(number) is Category.ACTIVATIONS:
            name = ledger.born_in(number)
            modules[name] = modules.get(name, 0) + nbytes
    held = ledger.by_category(ledger.sizes())
    categories = ledger.by_category(peak.sizes)
    categories[Category.INSIDE] += peak.inside
    return Plan(
        mesh=tuple(axes.values()),
        parameters=parameters,
        peak=peak.nbytes,
        place=peak.place,
        operation=peak.operation,
        tensors=ledger.tensors,
        categories=categories,
        modules=dict(sorted(modules.items(), key=lambda item: -item[1])),
        held=sum(held.values()),
        kept=sum(held.values()) - held[Category.SHARDS] - held[Category.OPTIMIZER_STATE],
        host=peak.host,
        construction=construction,
        course=ledger.course.totals(),
        course_parts=ledger.course_by_category(),
        attention=tuple(sorted(ledger.kernels)),
        reads=tuple(ledger.reads.lines),
        compiled=compiled,
    )

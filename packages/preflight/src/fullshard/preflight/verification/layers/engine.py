"""Compares layer by layer: each layer alone, unsharded, given what it saw in the sharded run.

Owns the order of a step and of its collectives. All ranks train the sharded model and record each
layer's calls. Then, one layer at a time, its full parameters are gathered, and rank 0 runs all
ranks' calls of it again. Therefore no more than one layer is ever unsharded, in addition to the
recorded calls.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight.verification.agree import everyones, from_first, jointly, raise_together
from fullshard.preflight.verification.closer.contributions import Contributions
from fullshard.preflight.verification.closer.look import Look
from fullshard.preflight.verification.comparing.compare import Comparison, rms
from fullshard.preflight.verification.comparing.optimizers import (
    Settings,
    note_settings,
    settings_of,
)
from fullshard.preflight.verification.comparing.replicas import compare_replicas, differing
from fullshard.preflight.verification.comparing.tensors import full, generators_mark, local
from fullshard.preflight.verification.comparing.updates import Updates
from fullshard.preflight.verification.draws import Draws, State
from fullshard.preflight.verification.layers.calls import Call, Recorder, Replay, replay
from fullshard.preflight.verification.layers.copies import Layers
from fullshard.preflight.verification.program import (
    Program,
    Seeds,
    looks_of,
    remarks_on,
    require_shapes,
    shapes_of,
)
from fullshard.preflight.verification.recovery import meeting
from fullshard.preflight.verification.sharded import look_at, look_at_draws
from fullshard.preflight.verification.snapshot import held_by, in_turn
from fullshard.preflight.verification.tolerance import Tolerance
from fullshard.preflight.verification.trace import Trace, fingerprint, first_place, traced
from fullshard.preflight.verification.verdict import Outcome, Phase
from fullshard.preflight.wording import listed

__all__ = ["run_by_layer"]


def run_by_layer(program: Program, stretch: float, look: Look) -> Outcome:
    """Train sharded and compare each layer, to the first step that differs; same everywhere.

    Raises:
        Exception: what the user's functions raise; other ranks raise a ``RuntimeError`` about it.
    """
    return from_first(_ByLayer(program, stretch, look).outcome())


class _ByLayer:
    def __init__(self, program: Program, stretch: float, look: Look) -> None:
        self._program = program
        self._look = look
        self._world, self._rank = dist.get_world_size(), dist.get_rank()
        self._layers = Layers(program)
        self._sharded = self._layers.sharded
        self._device = self._layers.device
        self._draws = Draws(self._device, program.seed)
        self._unknown: set[str] = set()
        self._coupled: set[str] = set()
        self._settings: Settings = {}
        self._contributions = Contributions(self._world)
        self._remarks: tuple[str, ...] = ()
        self._after: dict[int, State] = {}
        self._found = Outcome(
            tolerance=Tolerance(dtype=self._sharded.dtype, world_size=self._world, stretch=stretch),
            device=str(self._device),
            notes=(f"compared layer by layer on rank 0 ({self._device})",),
        )
        self._found.seen.untied = self._layers.untied

    def outcome(self) -> Outcome:
        """Runs; rank 0's is the one that counts."""
        found, sharded = self._found, self._sharded
        self._draws.seed()
        comparison = self._comparison(0)
        comparison.untied(found.seen.untied)
        self._compare_build(comparison)
        for step in range(self._program.steps) if not self._stops(comparison) else ():
            held = held_by(sharded.named)
            recorder, traces = self._train(step)
            if step == 0:
                self._look_at(traces, recorder)
            comparison = self._comparison(step)
            if step == 0:  # right after sharding, the bits of another dtype were allowed
                buffers = {name: held[name] for name in sharded.buffers}
                self._compare_before(comparison, Phase.BUFFER, buffers)
            self._compare_layers(comparison, recorder, traces, held)
            if not self._stops(comparison):
                self._step(comparison)
            order = list(Phase)
            comparison.differences.sort(key=lambda each: order.index(each.phase))
            found.largest = comparison.larger(found.largest)
            if self._stops(comparison):
                break
            sharded.optimizers[0].zero_grad()
        found.differences = comparison.differences
        sharded.look_at_tensors(found.seen, self._layers.skeleton)
        self._add_notes()
        if self._stops(comparison):
            ours = settings_of(sharded.optimizers, sharded.params)
            note_settings(found.seen, ours, self._settings)
            sharded.look_at_modules(found.seen, self._layers.skeleton)
            self._look.conclude(found, comparison, self._contributions, self._sharded)
        return found

    def _comparison(self, step: int) -> Comparison:
        return Comparison(self._found.tolerance, step=step, keeps=self._look.is_closer)

    def _step(self, comparison: Comparison) -> None:
        """The optimizer's step, and what it makes of each layer's full parameters."""
        updates = Updates(self._sharded, self._program, self._device)
        self._look.before_update(lambda: updates)
        jointly(self._sharded.optimizers[0].step)
        for names in self._layers.groups():
            self._settings |= updates.compare(comparison, names)
        compare_replicas(comparison, Phase.UPDATE, self._sharded.params)
        self._unknown |= updates.unknown
        self._coupled |= updates.coupled

    def _add_notes(self) -> None:
        """Add notes about parts that were not compared."""
        found = self._found
        if self._unknown:
            found.notes += (
                f"not compared after step 0: updates of {listed(sorted(self._unknown))}, "
                "whose optimizer keeps a state of the shard's shape",
            )
        if self._coupled:
            found.notes += (
                f"not compared: updates of {listed(sorted(self._coupled))}: on one layer's "
                "parameters the optimizer does not do what it does on all, as one that clips by "
                "the norm of all gradients; compare a smaller model as a whole",
            )
        if found.seen.modes:
            modes = listed(each or "the model" for each in found.seen.modes)
            found.notes += (
                f"{modes} is in another mode, train or eval, than build_model makes it",
            )

    def _stops(self, comparison: Comparison) -> bool:
        return from_first(bool(comparison.differences))

    def _compare_build(self, comparison: Comparison) -> None:
        """Check that sharding changed no value, where ``build_model`` gave any."""
        self._compare_before(comparison, Phase.BUILD, self._sharded.params)
        self._compare_before(comparison, Phase.BUILD, self._sharded.buffers)
        compare_replicas(comparison, Phase.BUILD, self._sharded.params)

    def _train(self, step: int) -> tuple[Recorder, list[Trace]]:
        program, sharded = self._program, self._sharded
        batch = raise_together(lambda: program.batch_of(step))
        raise_together(partial(require_shapes, program, everyones(shapes_of(batch))))
        if step == 0:
            self._remarks = remarks_on(program, everyones(looks_of(batch)))
        self._look.begin_step(sharded)
        self._draws.align(program.seeds, step, self._rank)
        recorder = Recorder(
            {name: self._layers.modules[name] for name in self._layers.names}, self._draws
        )

        before = generators_mark()

        def train() -> Trace:
            watches = meeting(step, sharded.named), self._look.forward(sharded)
            with watches[0], watches[1], recorder.recording(), traced(sharded.named) as trace:
                with recorder.watching():
                    loss = next(program.losses_of(sharded.model, sharded.optimizers, batch))
                recorder.in_backward = True
                loss.backward()
            return trace

        traces = everyones(jointly(train))
        look_at_draws(self._found, before)
        return recorder, traces

    def _look_at(self, traces: list[Trace], recorder: Recorder) -> None:
        found, skeleton = self._found, self._layers.skeleton
        dtypes = {each.dtype for each in skeleton.parameters() if each.is_floating_point()}
        look_at(found, [Trace(dtypes=dtypes)], traces)
        ran = set().union(*everyones({name for name, calls in recorder.calls.items() if calls}))
        loose = [name for name in self._sharded.params if name not in self._layers.owners]
        loose += sorted(
            {
                n
                for each in self._layers.names
                if each not in ran
                for n in self._layers.params_of(each)
            }
        )
        found.notes = (
            f"compared layer by layer on rank 0 ({self._device}): {len(ran)} layers, each given "
            "the inputs, random numbers and gradients that it saw",
            "not compared so: the loss, and what happens between layers"
            + (f"; gradients of {listed(loose, 5)}" if loose else ""),
            *self._remarks,
        )

    def _compare_layers(
        self,
        comparison: Comparison,
        recorder: Recorder,
        traces: list[Trace],
        held: dict[str, Any],
    ) -> None:
        size = self._mean_size()
        self._contributions = Contributions(self._world, self._look.keeps)
        seen, sharded = self._found.seen, self._sharded
        alike = set(sharded.compare_presence(comparison, seen))
        grads = {name: param.grad for name, param in sharded.params.items() if name in alike}
        compare_replicas(comparison, Phase.GRADIENT, grads)
        seen.apart.update(differing(sharded.buffers))
        outside = {f"{path}.{name}" for path, name in recorder.outside}
        alike -= {self._layers.known(name) for name in set().union(*everyones(outside))}
        left = Counter(self._layers.owners)
        sums: dict[str, torch.Tensor | None] = {}
        for name in self._layers.names:
            layer = self._layers.copy(name, held)
            values = {} if layer is None else dict(layer.named_parameters())
            before = {inner: fingerprint(value) for inner, value in values.items()}
            self._contributions.follow(
                {self._layers.known(f"{name}.{i}"): v for i, v in values.items()}
            )
            ran = self._run_again(comparison, name, layer, recorder.calls[name], traces)
            for inner, value in values.items():
                comparison.prints(Phase.UPDATE, f"{name}.{inner}", value, before[inner])
            self._add(sums, name, layer)
            for param in self._layers.params_of(name):
                left[param] -= 1
                wanted = sums.pop(param, None) if left[param] == 0 else None
                if left[param] == 0 and param in alike and ran:
                    self._compare_gradient(comparison, param, wanted, size)
            self._compare_buffers(comparison, name, layer)
        compare_replicas(comparison, Phase.BUFFER, sharded.buffers)

    def _mean_size(self) -> float:
        """The mean size of an element of any gradient of the sharded model."""
        grads = [param.grad for param in self._sharded.params.values() if param.grad is not None]
        shards = [local(each) for each in grads]
        numel = sum(each.numel() for each in shards)
        parts = everyones((numel, numel * rms(shards) ** 2))
        return math.sqrt(sum(part for _, part in parts) / max(1, sum(n for n, _ in parts)))

    def _run_again(
        self,
        comparison: Comparison,
        name: str,
        layer: nn.Module | None,
        calls: list[Call],
        traces: list[Trace],
    ) -> bool:
        """Run all ranks' calls of a layer again on rank 0; return whether any rank called it."""
        ran = False
        self._after = {}
        for rank, trace in in_turn(layer, enumerate(traces)):
            theirs = from_first(calls, rank)
            ran = ran or bool(theirs)
            raise_together(partial(self._again, comparison, name, layer, (rank, theirs, trace)))
        return ran

    def _again(
        self,
        comparison: Comparison,
        name: str,
        layer: nn.Module | None,
        of_rank: tuple[int, list[Call], Trace],
    ) -> None:
        """Run one rank's calls; if unaligned, random numbers continue from the last rank."""
        rank, calls, trace = of_rank
        if layer is None:
            return
        own = self._draws.state()
        self._contributions.rank = rank
        for number, call in enumerate(calls):
            follows = rank > 0 and self._program.seeds is Seeds.ONCE and number in self._after
            self._draws.restore(self._after[number] if follows else call.draws)
            self._program.prepare(layer, rank, name)
            with self._program.as_rank(rank):
                again = replay(name, layer, call, self._device)
            self._after[number] = self._draws.state()
            self._compare_call(comparison, name, (call, again), trace)
        self._draws.restore(own)

    def _compare_call(
        self, comparison: Comparison, name: str, both: tuple[Call, Replay], trace: Trace
    ) -> None:
        call, found = both

        def locate() -> str:
            again = found.trace
            ours = Trace(
                outputs={key: trace.outputs[key] for key in again.outputs if key in trace.outputs},
                inputs={key: trace.inputs[key] for key in again.inputs if key in trace.inputs},
            )
            first = first_place([again], [ours], self._found.tolerance.relative).module
            return first or name

        if len(call.outputs) != len(found.outputs):
            comparison.missing(f"the number of tensors that {name} returns", name)
            return
        pairs = zip(call.outputs, found.outputs, strict=True)
        comparison.activations(Phase.OUTPUT, name, pairs, found.size, locate)
        for number, attached in enumerate(call.attached):
            if call.recorded and found.attached[number] and not attached:
                comparison.missing(f"the output of {name} requires no gradient; it", name)
                self._found.seen.detached += (f"the output of {name}",)
        handed = [
            (call.input_grads.get(number), found.input_grads.get(number))
            for number in sorted({*call.input_grads, *found.input_grads})
        ]
        known = [(one, other) for one, other in handed if one is not None and other is not None]
        beside = rms(call.output_grads.values())
        comparison.activations(Phase.INPUT_GRADIENT, name, known, beside, lambda: name)
        for one, other in handed:
            lonely = [each for each in (one, other) if each is not None and rms([each]) > 0]
            if len(lonely) == 1:
                comparison.missing(f"the gradient of an input of {name}", name)

    def _add(
        self, sums: dict[str, torch.Tensor | None], name: str, layer: nn.Module | None
    ) -> None:
        """Add the mean over ranks of a layer's gradients, by the sharded model's names."""
        if layer is None:
            return
        for inner, param in layer.named_parameters():
            key = self._layers.known(f"{name}.{inner}")
            if param.grad is not None:
                before = sums.get(key)
                mean = param.grad / self._world
                sums[key] = mean if before is None else before + mean

    def _compare_gradient(
        self, comparison: Comparison, name: str, wanted: torch.Tensor | None, size: float
    ) -> None:
        grad = self._sharded.params[name].grad
        ours = None if grad is None else full(grad)
        self._look.gradient(name, ours)
        comparison.norms({name: wanted}, self._contributions.sizes, size)
        if self._rank == 0:
            comparison.tensors(Phase.GRADIENT, name, ours, wanted)

    def _compare_before(
        self, comparison: Comparison, phase: Phase, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Check that sharding changed no tensor."""
        for name, tensor in tensors.items():
            if name in self._sharded.before:
                comparison.prints(phase, name, full(tensor), self._sharded.before[name])

    def _compare_buffers(self, comparison: Comparison, name: str, layer: nn.Module | None) -> None:
        if layer is not None:
            for inner, wanted in layer.named_buffers():
                key = f"{name}.{inner}"
                comparison.tensors(Phase.BUFFER, key, self._sharded.buffers[key], wanted)

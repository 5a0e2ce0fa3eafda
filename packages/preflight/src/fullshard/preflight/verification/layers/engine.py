"""Compares layer by layer: each layer alone, unsharded, given what it saw in the sharded run.

Owns the order of a step and of its collectives. All ranks train the sharded model and record each
layer's calls. Then, one layer at a time, its full parameters are gathered, and rank 0 runs all
ranks' calls of it again. So no more than one layer is ever unsharded, beside what is recorded.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.preflight.compat import copy_hooks, is_compiled
from fullshard.preflight.verification.agree import everyones, from_first, jointly, together
from fullshard.preflight.verification.compare import Comparison, rms
from fullshard.preflight.verification.draws import Draws, State
from fullshard.preflight.verification.layers.calls import Call, Recorder, Replay, replay
from fullshard.preflight.verification.layers.chosen import layer_names
from fullshard.preflight.verification.layers.updates import Updates
from fullshard.preflight.verification.names import clean
from fullshard.preflight.verification.program import (
    Program,
    looks_of,
    remarks_on,
    require_shapes,
    shapes_of,
)
from fullshard.preflight.verification.room import nbytes, reference_device
from fullshard.preflight.verification.sharded import Sharded, aliases, apart, full, look_at
from fullshard.preflight.verification.tolerance import Tolerance
from fullshard.preflight.verification.trace import Trace, fingerprint, traced
from fullshard.preflight.verification.verdict import Outcome, Phase

__all__ = ["run_by_layer"]


def run_by_layer(program: Program, stretch: float = 1.0) -> Outcome:
    """Trains sharded and compares each layer, to the first step that differs; same everywhere.

    Raises:
        Exception: what the user's functions raise; on the other ranks a ``RuntimeError`` about it.
    """
    return from_first(_ByLayer(program, stretch).outcome())


class _ByLayer:
    def __init__(self, program: Program, stretch: float) -> None:
        self._program = program
        self._world, self._rank = dist.get_world_size(), dist.get_rank()
        choose = program.layers if callable(program.layers) else None
        self._skeleton = together(program.skeleton)
        self._names = together(lambda: layer_names(self._skeleton, choose))
        self._sharded = Sharded(program)
        together(self._require_eager)
        untied = together(lambda: self._sharded.untied(self._skeleton))
        self._device = together(self._room)
        self._draws = Draws(self._device, program.seed)
        self._modules = {clean(name): each for name, each in self._sharded.named.named_modules()}
        self._aliases = aliases(self._skeleton)
        self._owners = Counter(name for each in self._names for name in self._params_of(each))
        self._unknown: set[str] = set()
        self._coupled: set[str] = set()
        self._remarks: tuple[str, ...] = ()
        self._after: dict[int, State] = {}
        self._found = Outcome(
            tolerance=Tolerance(
                dtype=self._sharded.dtype, world_size=self._world, stretch=stretch, growth=1
            ),
            device=str(self._device),
            untied=untied,
            notes=(f"compared layer by layer on rank 0 ({self._device})",),
        )

    def _require_eager(self) -> None:
        """Returns if no module is compiled: what a compiled one does is not seen by hooks."""
        for name, module in self._sharded.model.named_modules():
            if is_compiled(module):
                raise TypeError(
                    f"{clean(name) or 'the model'} is compiled, and layers are compared by what "
                    "they are given and give; leave torch.compile out of shard, or compare the "
                    "whole model with layers=False"
                )

    def _room(self) -> torch.device:
        """Where the largest layer has room; rank 0 alone needs it."""
        largest = max(self._names, key=lambda name: nbytes(self._skeleton.get_submodule(name)))
        layer = self._skeleton.get_submodule(largest)
        home = self._sharded.home
        return home if self._rank else reference_device(layer, home, f"the layer {largest} alone")

    def _params_of(self, layer: str) -> list[str]:
        """The names, by which the sharded model knows them, of a layer's parameters."""
        inner = self._skeleton.get_submodule(layer).named_parameters(remove_duplicate=False)
        names = [f"{layer}.{name}" for name, _ in inner]
        return list(dict.fromkeys(self._aliases.get(name, name) for name in names))

    def outcome(self) -> Outcome:
        """Runs; rank 0's is the one that counts."""
        found, sharded = self._found, self._sharded
        self._draws.seed()
        comparison = Comparison(found.tolerance, step=0)
        comparison.untied(found.untied)
        self._compare_build(comparison)
        for step in range(self._program.steps) if not self._stops(comparison) else ():
            buffers = {name: each.detach().clone() for name, each in sharded.buffers.items()}
            recorder, traces = self._train(step)
            if step == 0:
                self._look_at(traces, recorder)
            comparison = Comparison(found.tolerance, step=step)
            if step == 0:
                self._compare_first_buffers(comparison, buffers)
            self._compare_layers(comparison, recorder, traces, buffers)
            if not self._stops(comparison):
                updates = Updates(sharded, self._program, self._device)
                jointly(sharded.optimizer.step)
                for names in self._groups():
                    updates.compare(comparison, names)
                self._unknown |= updates.unknown
                self._coupled |= updates.coupled
            order = list(Phase)
            comparison.differences.sort(key=lambda each: order.index(each.phase))
            found.largest = comparison.larger(found.largest)
            if self._stops(comparison):
                break
            sharded.optimizer.zero_grad()
        found.differences = comparison.differences
        sharded.look_at_tensors(found, self._skeleton)
        if self._unknown:
            found.notes += (
                f"not compared after step 0: updates of {', '.join(sorted(self._unknown)[:3])}, "
                "whose optimizer keeps a state of the shard's shape",
            )
        if self._coupled:
            found.notes += (
                f"not compared: updates of {', '.join(sorted(self._coupled)[:3])}: on one layer's "
                "parameters the optimizer does not do what it does on all, as one that clips by "
                "the norm of all gradients; compare a smaller model as a whole",
            )
        if found.modes:
            found.notes += (
                f"{', '.join(each or 'the model' for each in found.modes[:3])} is in another mode, "
                "train or eval, than build_model makes it",
            )
        return found

    def _stops(self, comparison: Comparison) -> bool:
        return from_first(bool(comparison.differences))

    def _groups(self) -> list[list[str]]:
        """The parameters of each layer, tied ones once, then each that lies in none."""
        done: set[str] = set()
        groups = []
        for name in self._names:
            groups.append([each for each in self._params_of(name) if each not in done])
            done.update(groups[-1])
        return groups + [[name] for name in self._sharded.params if name not in done]

    def _compare_build(self, comparison: Comparison) -> None:
        """That sharding changed no value, where ``build_model`` gave one."""
        for name, param in self._sharded.params.items():
            if name in self._sharded.before:
                comparison.prints(Phase.BUILD, name, full(param), self._sharded.before[name])

    def _train(self, step: int) -> tuple[Recorder, list[Trace]]:
        program, sharded = self._program, self._sharded
        batch = together(lambda: program.batch_of(step))
        together(partial(require_shapes, program, everyones(shapes_of(batch))))
        if step == 0:
            self._remarks = remarks_on(program, everyones(looks_of(batch)))
        if program.aligned_seeds:
            self._draws.align(step, self._rank, self._world)
        recorder = Recorder({name: self._modules[name] for name in self._names}, self._draws)

        def train() -> Trace:
            with recorder.recording():
                with traced(sharded.named) as trace, recorder.watching():
                    loss = program.loss_of(sharded.model, batch)
                recorder.in_backward = True
                loss.backward()
            return trace

        return recorder, everyones(jointly(train))

    def _look_at(self, traces: list[Trace], recorder: Recorder) -> None:
        found, skeleton = self._found, self._skeleton
        dtypes = {each.dtype for each in skeleton.parameters() if each.is_floating_point()}
        look_at(found, [Trace(dtypes=dtypes)], traces)
        dtype = max(found.dtypes, key=lambda each: torch.finfo(each).eps)
        found.tolerance = replace(found.tolerance, dtype=dtype)
        ran = set().union(*everyones({name for name, calls in recorder.calls.items() if calls}))
        loose = [name for name in self._sharded.params if name not in self._owners]
        loose += sorted(
            {n for each in self._names if each not in ran for n in self._params_of(each)}
        )
        found.notes = (
            f"compared layer by layer on rank 0 ({self._device}): {len(ran)} layers, each given "
            "the inputs, random numbers and gradients that it saw",
            "not compared so: the loss, and what happens between layers"
            + (f"; gradients of {', '.join(loose[:5])}" if loose else "")
            + (f" and {len(loose) - 5} more" if len(loose) > 5 else ""),
            *self._remarks,
        )

    def _compare_layers(
        self,
        comparison: Comparison,
        recorder: Recorder,
        traces: list[Trace],
        buffers: dict[str, torch.Tensor],
    ) -> None:
        size = self._mean_size()
        alike = set(self._sharded.compare_presence(comparison, self._found))
        self._found.apart |= apart(self._sharded.buffers)
        outside = {f"{path}.{name}" for path, name in recorder.outside}
        alike -= {self._aliases.get(name, name) for name in set().union(*everyones(outside))}
        left = Counter(self._owners)
        sums: dict[str, torch.Tensor | None] = {}
        for name in self._names:
            layer = self._copy(name, buffers)
            values = {} if layer is None else dict(layer.named_parameters())
            before = {inner: fingerprint(value) for inner, value in values.items()}
            ran = self._run_again(comparison, name, layer, recorder.calls[name], traces)
            for inner, value in values.items():
                comparison.prints(Phase.UPDATE, f"{name}.{inner}", value, before[inner])
            self._add(sums, name, layer)
            for param in self._params_of(name):
                left[param] -= 1
                wanted = sums.pop(param, None) if left[param] == 0 else None
                if left[param] == 0 and param in alike and ran:
                    self._compare_gradient(comparison, param, wanted, size)
            self._compare_buffers(comparison, name, layer)

    def _mean_size(self) -> float:
        """The mean size of an element of any gradient of the sharded model."""
        grads = [param.grad for param in self._sharded.params.values() if param.grad is not None]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in grads]
        numel = sum(each.numel() for each in local)
        parts = everyones((numel, numel * rms(local) ** 2))
        return math.sqrt(sum(part for _, part in parts) / max(1, sum(n for n, _ in parts)))

    def _copy(self, name: str, buffers: dict[str, torch.Tensor]) -> nn.Module | None:
        """The layer with full parameters, on rank 0; gathers them one at a time."""
        layer = None if self._rank else copy.deepcopy(self._skeleton.get_submodule(name))
        trained = dict(self._skeleton.named_parameters())
        values: dict[str, nn.Parameter] = {}
        for param in self._params_of(name):
            value = full(self._sharded.params[param])
            if self._rank == 0:
                value = value.to(self._device, trained[param].dtype, copy=True)
                values[param] = nn.Parameter(value, requires_grad=trained[param].requires_grad)
                copy_hooks(trained[param], values[param])
        if layer is not None:
            for path, module in layer.named_modules():
                where = f"{name}.{path}" if path else name
                self._fill(module, where, values, buffers)
        return layer

    def _fill(
        self,
        module: nn.Module,
        where: str,
        values: dict[str, nn.Parameter],
        buffers: dict[str, torch.Tensor],
    ) -> None:
        """Gives one module its parameters, buffers and other tensors; the rest is as it was."""
        ours = self._modules[where]
        module.train(ours.training)
        for key, _ in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            full_name = f"{where}.{key}"
            setattr(module, key, values[self._aliases.get(full_name, full_name)])
        for key, _ in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, key, buffers[f"{where}.{key}"].to(self._device, copy=True))
        for key, value in vars(ours).items():
            if isinstance(value, torch.Tensor):
                setattr(module, key, value.detach().to(self._device, copy=True))

    def _run_again(
        self,
        comparison: Comparison,
        name: str,
        layer: nn.Module | None,
        calls: list[Call],
        traces: list[Trace],
    ) -> bool:
        """Runs all ranks' calls of a layer again on rank 0; returns whether any rank called it."""
        ran = False
        self._after = {}
        for rank, trace in enumerate(traces):
            theirs = from_first(calls, rank)
            ran = ran or bool(theirs)
            together(partial(self._again, comparison, name, layer, (rank, theirs, trace)))
        return ran

    def _again(
        self,
        comparison: Comparison,
        name: str,
        layer: nn.Module | None,
        of_rank: tuple[int, list[Call], Trace],
    ) -> None:
        """One rank's calls. Its random numbers are its own if aligned, else follow the last's."""
        rank, calls, trace = of_rank
        if layer is None:
            return
        own = self._draws.state()
        for number, call in enumerate(calls):
            follows = rank > 0 and not self._program.aligned_seeds and number in self._after
            self._draws.restore(self._after[number] if follows else call.draws)
            again = replay(layer, call, self._device)
            self._after[number] = self._draws.state()
            self._compare_call(comparison, name, (call, again), trace)
        self._draws.restore(own)

    def _compare_call(
        self, comparison: Comparison, name: str, both: tuple[Call, Replay], trace: Trace
    ) -> None:
        call, found = both

        def locate() -> str:
            again = {
                f"{name}.{path}" if path else name: each
                for path, each in found.trace.outputs.items()
            }
            ours = {key: trace.outputs[key] for key in again if key in trace.outputs}
            first = comparison.first_module([Trace(outputs=again)], [Trace(outputs=ours)])
            return first or name

        if len(call.outputs) != len(found.outputs):
            comparison.missing(f"the number of tensors that {name} returns", name)
            return
        pairs = zip(call.outputs, found.outputs, strict=True)
        comparison.activations(Phase.OUTPUT, name, pairs, found.size, locate)
        for number, attached in enumerate(call.attached):
            if call.recorded and found.attached[number] and not attached:
                comparison.missing(f"the output of {name} requires no gradient; it", name)
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
        """Adds the mean over ranks of a layer's gradients, by the sharded model's names."""
        if layer is None:
            return
        for inner, param in layer.named_parameters():
            full_name = f"{name}.{inner}"
            key = self._aliases.get(full_name, full_name)
            if param.grad is not None:
                before = sums.get(key)
                mean = param.grad / self._world
                sums[key] = mean if before is None else before + mean

    def _compare_gradient(
        self, comparison: Comparison, name: str, wanted: torch.Tensor | None, size: float
    ) -> None:
        grad = self._sharded.params[name].grad
        ours = None if grad is None else full(grad)
        comparison.norms({name: wanted}, size)
        if self._rank == 0:
            comparison.tensors(Phase.GRADIENT, name, ours, wanted)

    def _compare_first_buffers(
        self, comparison: Comparison, buffers: dict[str, torch.Tensor]
    ) -> None:
        """That sharding changed no buffer; those of layers are what the layers begin with."""
        for name, buffer in buffers.items():
            if name in self._sharded.before:
                comparison.prints(Phase.BUFFER, name, buffer, self._sharded.before[name])

    def _compare_buffers(self, comparison: Comparison, name: str, layer: nn.Module | None) -> None:
        if layer is not None:
            for inner, wanted in layer.named_buffers():
                key = f"{name}.{inner}"
                comparison.tensors(Phase.BUFFER, key, self._sharded.buffers[key], wanted)

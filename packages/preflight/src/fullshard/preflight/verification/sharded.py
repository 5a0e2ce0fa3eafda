"""The sharded side of a verification: the model as ``shard`` left it, its optimizer, its tensors.

Owns what must be asked of all ranks in one order. This module uses only the names of the reference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.preflight.compat import module_hooks
from fullshard.preflight.verification.agree import everyones, jointly, raise_together
from fullshard.preflight.verification.comparing.compare import Comparison
from fullshard.preflight.verification.comparing.modules import (
    added_hooks,
    differing_settings,
    module_settings,
)
from fullshard.preflight.verification.comparing.replicas import differing
from fullshard.preflight.verification.comparing.tensors import generators_mark
from fullshard.preflight.verification.names import clean, module_of, own_names
from fullshard.preflight.verification.program import Program
from fullshard.preflight.verification.trace import Trace, fingerprint
from fullshard.preflight.verification.verdict import Outcome, Seen

__all__ = ["Sharded", "aliases", "coarsest", "look_at", "look_at_draws"]


class Sharded:
    """A model, sharded by the user's function, and the user's optimizers of it."""

    def __init__(self, program: Program) -> None:
        """Build and shards; an error of one rank is an error of all.

        ``before`` has a fingerprint of each parameter and buffer that had a value then; ``model``
        is the model to call, and ``named`` the module inside that gives names. ``hooks`` has the
        hooks of modules that ``shard`` registered.
        """
        built = raise_together(program.built)
        self.before = {
            name: fingerprint(param)
            for name, param in (*built.named_parameters(), *built.named_buffers())
            if not param.is_meta
        }
        known = {
            id(hook): hook
            for module in built.modules()
            for registry in module_hooks(module).values()
            for hook in registry.values()
        }
        shapes = {name: param.shape for name, param in built.named_parameters()}
        found = jointly(lambda: program.shard(built))
        self.model = found if isinstance(found, nn.Module) else built
        self.named = own_names(self.model)
        self.hooks = added_hooks(self.named, known)
        for hook in self.hooks if program.bare else ():
            del hook.registry[hook.number]
        self.params = {clean(name): each for name, each in self.named.named_parameters()}
        raise_together(lambda: self._require_whole(shapes))
        self.optimizers = jointly(lambda: program.optimizers_of(self.model))

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Its buffers now, by name: a forward may put others in their place."""
        return {clean(name): each for name, each in self.named.named_buffers()}

    @property
    def home(self) -> torch.device:
        """Where it computes."""
        return next((each.device for each in self.params.values()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its first parameter."""
        floating = (each.dtype for each in self.params.values() if each.is_floating_point())
        return next(floating, torch.float32)

    def _require_whole(self, shapes: Mapping[str, torch.Size]) -> None:
        """Return if each parameter is whole, or a ``DTensor``, which can be made whole."""
        for name, param in self.params.items():
            if name in shapes and param.shape != shapes[name]:
                raise ValueError(
                    f"{name} had shape {tuple(shapes[name])}, after shard {tuple(param.shape)}. "
                    "verify compares DTensors and whole tensors; torch's FSDP1 keeps parts of flat "
                    "ones, which it alone can put together. Use fully_shard, torch's or ours, or "
                    "FullyShardedDataParallel of fullshard.wrappers.fsdp1"
                )

    def untied(self, reference: nn.Module) -> tuple[str, ...]:
        """Return names of parameters that are separate here, and tied in ``reference``.

        Also the other way round: what was tied by sharding.

        Raises:
            ValueError: if names differ for another reason.
        """
        names, own = {name for name, _ in reference.named_parameters()}, set(self.params)
        tied = {*aliases(reference), *aliases(self.named)}
        if unknown := sorted((names ^ own) - tied):
            raise ValueError(
                f"shard changed the names of parameters: {unknown[:4]} are in one of the models "
                "only; return the model with its own parameters. torch's FSDP1 makes flat ones: "
                "use fully_shard, or FullyShardedDataParallel of fullshard.wrappers.fsdp1"
            )
        return tuple(sorted(names ^ own))

    def look_at_tensors(self, seen: Seen, reference: nn.Module) -> None:
        """Note what is trained, typed, or in a mode, otherwise than in ``reference``."""
        modes = {name: module.training for name, module in reference.named_modules()}
        seen.modes = {
            clean(name): module.training
            for name, module in self.named.named_modules()
            if modes.get(clean(name), module.training) != module.training
        }
        theirs = dict(reference.named_parameters())
        seen.otherwise = tuple(
            name
            for name, param in self.params.items()
            if name in theirs and theirs[name].requires_grad != param.requires_grad
        )
        tensors = {**theirs, **dict(reference.named_buffers())}
        seen.cast = {
            name: (tensors[name].dtype, each.dtype)
            for name, each in {**self.params, **self.buffers}.items()
            if name in tensors and tensors[name].dtype != each.dtype
        }

    def look_at_modules(self, seen: Seen, reference: nn.Module | None) -> None:
        """Note the hooks that ``shard`` registered, and settings that ``reference`` has not.

        All ranks call it; rank 0 alone has the reference.
        """
        ranks = everyones((module_settings(self.named), [each.text for each in self.hooks]))
        seen.hooks = tuple(dict.fromkeys(text for _, texts in ranks for text in texts))
        if reference is not None:
            theirs = module_settings(reference)
            seen.changed = tuple(differing_settings(ours, theirs) for ours, _ in ranks)

    def compare_presence(self, comparison: Comparison, seen: Seen) -> list[str]:
        """Note gradients that only some ranks have; return the names that all or none have."""
        grads = {name: param.grad for name, param in self.params.items()}
        has = everyones({name for name, grad in grads.items() if grad is not None})
        plain = {n: grad for n, grad in grads.items() if grad is not None}
        seen.apart.update(differing({n: g for n, g in plain.items() if not isinstance(g, DTensor)}))
        alike = []
        for name in grads:
            ranks = [rank for rank, names in enumerate(has) if name in names]
            if 0 < len(ranks) < dist.get_world_size():
                why = f"only ranks {ranks} have a gradient of {name}"
                comparison.missing(why, module_of(name))
            else:
                alike.append(name)
        return alike


def aliases(model: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters, each with the first name."""
    first: dict[int, str] = {}
    found = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), clean(name)) != clean(name):
            found[clean(name)] = first[id(param)]
    return found


def look_at(found: Outcome, theirs: list[Trace], ours: list[Trace]) -> None:
    """Note what a forward of both shows: modules that some ranks skip, and dtypes.

    ``theirs`` has the reference's by the batch's rank; empty where it has none of its own.
    """
    ran = [list(each.outputs) for each in ours]
    everywhere = set(ran[0]).intersection(*ran[1:])
    names = dict.fromkeys(name for each in ran for name in each if name not in everywhere)
    found.seen.skipped += tuple(names)
    if theirs and theirs[0].outputs:
        found.seen.strayed += tuple(
            name
            for name in names
            if any(
                (name in one.outputs) != (name in other.outputs)
                for one, other in zip(ours, theirs, strict=True)
            )
        )
        found.seen.detached += _detached(theirs, ours)
    relative = found.tolerance.relative
    again = dict.fromkeys(name for each in ours for name in each.changed_again(relative))
    found.seen.recomputed += tuple(again)
    found.seen.passes += max(len(each.runs.get("", ())) for each in ours)
    dtypes = [set().union(*(each.dtypes for each in side)) for side in (theirs, ours)]
    found.dtypes = (coarsest(dtypes[0]), coarsest(dtypes[1]))
    found.tolerance = found.tolerance.of(coarsest({*found.dtypes}))


def look_at_draws(found: Outcome, before: bytes) -> None:
    """Note whether a forward drew random numbers, since the mark ``before``; all ranks call it."""
    marks = everyones((before, generators_mark()))
    found.drew |= any(one != other for one, other in marks)
    is_apart = len({one for one, _ in marks}) > 1
    found.reseeded |= is_apart and len({other for _, other in marks}) == 1


def _detached(theirs: list[Trace], ours: list[Trace]) -> tuple[str, ...]:
    """Return the outputs that require a gradient in the reference only; if none, such inputs.

    Modules that run again in backward are left out: there they require gradients.
    """
    again = set().union(*(each.again for each in ours))
    names = [name for name in ours[0].inputs if name not in again]
    pairs = list(zip(ours, theirs, strict=True))
    outputs = [
        f"the output of {name or 'the model'}"
        for name in names
        if any(name in a.outputs and name in b.attached - a.attached for a, b in pairs)
    ]
    inputs = [
        f"an input of {name or 'the model'}"
        for name in names
        if any(name in a.inputs and name in b.entered - a.entered for a, b in pairs)
    ]
    return tuple(outputs or inputs)


def coarsest(dtypes: set[torch.dtype]) -> torch.dtype:
    """Return the dtype that rounds most."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

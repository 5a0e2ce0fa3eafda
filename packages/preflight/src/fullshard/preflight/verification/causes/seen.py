"""Causes that a run shows by itself: its notes, in addition to the values that differ.

Owns the list. Causes that need another run are found by ``find``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist

from fullshard.preflight.verification.causes.source import lines_that_bypass
from fullshard.preflight.verification.program import Program
from fullshard.preflight.verification.verdict import Cause, Difference, Outcome, Phase
from fullshard.preflight.wording import listed

__all__ = ["seen_causes"]


def seen_causes(program: Program, outcome: Outcome) -> Iterator[Cause]:
    """Yield the causes that an outcome shows, then those that only fit; the same on all ranks."""
    first = outcome.first
    if first is None:
        return
    found = [each for each in outcome.differences if each.phase is first.phase]
    names = _once([each.name for each in found])
    yield from _of_parameters(outcome, names)
    yield from _of_replicas(outcome, found)
    yield from _of_ranks(outcome, names)
    yield from _of_modules(outcome, names)
    if first.phase is Phase.MISSING:
        yield from _missing(outcome, found)
    if first.phase in (Phase.GRADIENT, Phase.INPUT_GRADIENT):
        yield from _of_graphs(outcome)
    if first.phase is Phase.GRADIENT:
        yield from _scaled(found, outcome.seen.passes)
    if first.phase in (Phase.UPDATE, Phase.STATE):
        yield from _of_optimizer(outcome)
    places = lines_that_bypass(program, first.module)
    if places:
        yield Cause(
            name="a parameter read or set through .data, .grad or to_local()",
            evidence=f"{places[0]}: autograd and the sharding see nothing of it, and outside a "
            "forward it is this rank's shard. Use the parameter itself, inside forward",
            tested=False,
        )


def _of_parameters(outcome: Outcome, names: list[str]) -> Iterator[Cause]:
    seen, first = outcome.seen, outcome.first
    if seen.untied:
        yield Cause(
            name="weights that are tied in one of the models only",
            evidence=f"{listed(seen.untied)} is a parameter of its own in one model, and in the "
            "other the same as another. to_empty() and new nn.Parameters undo a tie: tie again "
            "after it, before sharding, and shard both modules in one group",
        )
    cast = [name for name in names if name in seen.cast]
    if cast:
        theirs, ours = seen.cast[cast[0]]
        yield Cause(
            name="a policy's dtype",
            evidence=f"{listed(cast)} is {ours} in the sharded model and {theirs} in the unsharded "
            "one: a buffer of positions or frequencies wants all its bits",
        )
    if first is not None and first.phase is Phase.BUILD and not (seen.untied or cast):
        yield Cause(
            name="values that sharding changes",
            evidence=f"{listed(names)} has other values right after shard than build_model gave it"
            ": initialise before sharding, or draw the same values on all ranks; load a checkpoint "
            "in both",
        )


def _of_replicas(outcome: Outcome, found: list[Difference]) -> Iterator[Cause]:
    apart = [each for each in found if each.ranks and each.name not in outcome.seen.apart]
    if apart:
        names = _once([each.name for each in apart])
        yield Cause(
            name="replicas that are not the same",
            evidence=f"{apart[0].phase} of {listed(names)}: ranks {list(apart[0].ranks)} hold "
            "another value than the first ranks with the same shards. Something changes it on some "
            "replicas only, or it is not reduced over them",
        )


def _of_ranks(outcome: Outcome, names: list[str]) -> Iterator[Cause]:
    apart = [name for name in names if name in outcome.seen.apart]
    first = outcome.first
    if apart and first is not None and first.phase is Phase.BUFFER:
        yield Cause(
            name="a buffer that ranks update apart",
            evidence=f"ranks hold different values of {listed(apart)}. Each saw its own "
            "batch only: reduce what the update uses (SyncBatchNorm does), or do not update in "
            "training",
        )
    elif apart:
        yield Cause(
            name="a parameter outside every group",
            evidence=f"{listed(apart)} is a plain tensor in the sharded model, whose "
            "gradient differs between ranks: nothing reduces it. Shard a module that holds it",
        )


def _of_modules(outcome: Outcome, names: list[str]) -> Iterator[Cause]:
    seen, first = outcome.seen, outcome.first
    assert first is not None, "there is a difference"
    names = [first.module, *names]
    concerned = [
        module
        for module in seen.skipped
        if module in seen.strayed
        or any(_is_within(name, module) or _is_within(module, name) for name in names if name)
    ]
    if concerned:
        yield Cause(
            name="a module that some ranks skip",
            evidence=f"not all ranks ran {listed(concerned)}; a rank that does not run a "
            "module has no gradient for it. Run it on all ranks, times 0 where it is not wanted",
        )
    if first.phase is Phase.LOSS and seen.fed:
        yield Cause(
            name="inputs that are not the batch's",
            evidence="the sharded model is given other inputs than the unsharded one is for the "
            "same batch: look at what loss, or a hook before forward, makes of it, and whether "
            "that depends on the rank",
        )
    elif first.phase is Phase.LOSS and seen.given:
        yield Cause(
            name="a module that is given other inputs",
            evidence=f"{seen.given} is given something else than in the unsharded model, and "
            f"{first.module or 'the model'}, which calls it, is given the same: look at what its "
            "forward makes of it, and whether that depends on the rank",
            tested=False,
        )
    elif first.phase is Phase.LOSS and seen.traced and not seen.parts:
        yield from _of_loss(outcome)


def _of_loss(outcome: Outcome) -> Iterator[Cause]:
    relative = outcome.tolerance.relative
    wrong = {
        rank: (ours, theirs)
        for rank, (ours, theirs) in enumerate(outcome.seen.losses)
        if not abs(ours - theirs) <= relative * abs(theirs)
    }
    if wrong:
        factors = [ours / theirs if theirs else float("nan") for ours, theirs in wrong.values()]
        yield Cause(
            name="a loss function that is not the same",
            evidence="the outputs of all modules agree, and the loss does not: on ranks "
            f"{list(wrong)} it is {', '.join(f'{each:.4g}' for each in factors[:4])} times the "
            "unsharded model's",
        )


def _missing(outcome: Outcome, found: list[Difference]) -> Iterator[Cause]:
    """Yield a cause for gradients that exist in only one of the runs."""
    seen = outcome.seen
    otherwise = [each.name for each in found if each.name in seen.otherwise]
    if otherwise:
        yield Cause(
            name="requires_grad that is not the same in both models",
            evidence=f"{listed(otherwise)} requires a gradient in one of the models only. Set it "
            "in build_model, before sharding",
        )
    elif seen.detached:
        yield from _of_graphs(outcome)
    else:
        yield Cause(
            name="gradients that are not reduced",
            evidence="the parameters require gradients, and have none after backward: its last "
            "micro-batch ran with set_requires_gradient_sync(False) or in no_sync(), or a gradient "
            "was set to None",
            tested=False,
        )


def _of_graphs(outcome: Outcome) -> Iterator[Cause]:
    """Yield causes that lie in what autograd recorded, or in what backward computes again."""
    seen = outcome.seen
    if seen.detached:
        yield Cause(
            name="an output that is detached",
            evidence=f"{listed(_once(seen.detached))} requires a gradient in the unsharded model "
            "only: look for detach(), no_grad() or a hook that returns another tensor",
        )
    if seen.recomputed:
        yield Cause(
            name="a module that computes something else in backward",
            evidence=f"{listed(seen.recomputed)} ran again in backward, as with checkpointing, and "
            "returned something else than in forward: look for preserve_rng_state=False with "
            "dropout, and for state that changes in between",
        )


def _scaled(found: list[Difference], passes: int) -> Iterator[Cause]:
    """Yield a cause for one factor between all gradients that differ."""
    known = [each.scale for each in found if each.scale is not None and not each.ranks]
    if len(known) < max(2, len(found)):
        return
    if max(known) - min(known) > 1e-2 * abs(max(known)):
        return
    world = dist.get_world_size()
    meaning = [
        (world, "the world size: they are summed over ranks where a mean is expected"),
        (1 / world, "1 over the world size: they are divided once too often"),
    ]
    if passes > 1:
        meaning.append((passes, "the number of forwards in a step: divide each loss by it"))
    near = [text for scale, text in meaning if abs(known[0] - scale) < 1e-2 * scale]
    yield Cause(
        name="gradients scaled by one factor",
        evidence=f"all that differ are {known[0]:.4g} times the reference's"
        + (f", {', or '.join(near)}" if near else "")
        + "; look at the divide factor, and at what the loss is divided by",
    )


def _of_optimizer(outcome: Outcome) -> Iterator[Cause]:
    seen = outcome.seen
    if seen.uncovered:
        yield Cause(
            name="parameters that the optimizer does not have",
            evidence=f"{listed(seen.uncovered)} is not in the sharded model's optimizer, and in "
            "the unsharded one's it is: make the optimizer after sharding, of the parameters that "
            "the model has then",
        )
    if seen.settings:
        yield Cause(
            name="optimizer settings that are not the same",
            evidence="; ".join(seen.settings[:3]),
        )


def _is_within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _once(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))

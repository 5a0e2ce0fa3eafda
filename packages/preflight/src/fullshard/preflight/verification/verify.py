"""``verify``: train a model both ways, and report whether they agree, and if not, where and why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from fullshard.preflight.training import Loss, MakeOptimizer, MakeOptimizers, Step, adamw
from fullshard.preflight.verification.agree import everyones, from_first, raise_together
from fullshard.preflight.verification.causes.find import find_causes
from fullshard.preflight.verification.closer.look import Look
from fullshard.preflight.verification.comparing.tensors import digest, generators_mark
from fullshard.preflight.verification.draws import draws_restored
from fullshard.preflight.verification.engine import run as run_whole
from fullshard.preflight.verification.layers.engine import run_by_layer
from fullshard.preflight.verification.program import Choose, Program, Seeds
from fullshard.preflight.verification.recovery import recovering
from fullshard.preflight.verification.room import has_room
from fullshard.preflight.verification.verdict import Cause, Outcome, Verdict

__all__ = ["verify"]

_DRAWN_ALIKE = (
    "forward draws random numbers, and the generators of all ranks were in the same state: ranks "
    "seeded so have the same masks of dropout. Seed ranks apart, but tensor parallel ranks alike"
)


def verify(
    build_model: Callable[[], nn.Module],
    shard: Callable[[nn.Module], Any],
    batch: Any,
    loss: Loss | None = None,
    *,
    steps: int = 3,
    optimizer: MakeOptimizer = adamw,
    step: Step | None = None,
    optimizers: MakeOptimizers | None = None,
    tokens: Callable[[Any], float] | None = None,
    aligned_seeds: bool = False,
    layers: bool | Choose | None = None,
    seed: int = 0,
    stretch: float = 1.0,
) -> Verdict:
    """Train the model sharded over all ranks, and unsharded on rank 0, and compare as it goes.

    The unsharded model takes all ranks' batches one after another and averages their losses: that
    is what sharded data parallel training means to compute. Compared are the parameters after
    sharding, then in each step the loss, which parameters have a gradient, gradients, buffers, and
    the parameters after the optimizer's step, all by name. The run stops at the first step that
    differs, and repeats some of these runs to test possible causes.

    All ranks call it, with the same arguments but for the batch. The rank with the unsharded model
    needs room for four times the parameters, with ``step`` for nine times. Where that has none, or
    the model has no values before it is sharded, it goes layer by layer: each layer alone is run
    again unsharded, given the inputs, random numbers and gradients of the sharded run. Compared are
    its outputs, the gradients of its inputs and parameters, its buffers and its updates. This mode
    needs four times the largest layer, and does not check the code between layers. Random numbers
    go on afterwards as if it had not run.

    Args:
        build_model: makes the unsharded model, the same each time from the seed; on the meta device
            if ``shard`` gives it values.
        shard: shards it in place, or returns what it is wrapped in; any function, torch's
            ``fully_shard`` too.
        batch: this rank's batch, tensors in any containers; or a function of the step's number
            that returns it.
        loss: of a model and a batch, a scalar tensor.
        steps: how many steps.
        optimizer: makes an optimizer of parameters; AdamW if not given.
        step: in place of ``loss`` and ``optimizer``, a generator function of a model, its
            optimizers and a batch. The function calls the optimizers, and yields each loss instead
            of a call of ``backward()``: there both models have their backward and are compared.
        optimizers: with ``step``, makes a list of optimizers of a model.
        tokens: how many items of a batch its loss is the mean of, if ranks may have unequal
            numbers; the reference then weighs each rank's loss by its part of all.
        aligned_seeds: seed each rank's random numbers alike in both runs, for dropout.
        layers: True compares layer by layer, False never does; None where the whole has no room. A
            function picks the layers: it gets the unsharded model on the meta device, and returns
            modules that do not contain each other. By default, layers are the elements of lists of
            modules, and the modules outside of these lists.
        seed: of the model and of random numbers.
        stretch: a factor on what rounding may make differ.

    Returns:
        The verdict, the same on all ranks; ``print`` it, or call its ``require()``.

    Raises:
        RuntimeError: if ``torch.distributed`` is not initialised; if another rank raised.
        ValueError: if ``build_model`` gives other values each time, or on other ranks; if batches
            differ in shape and ``tokens`` is not given; if a loss is no scalar; if ``layers``
            are none, or are given with ``step``; if an optimizer's step needs a closure.
        TypeError: if ``loss`` and ``step`` are both given, or neither; if a function returns
            something else than it should.
        MemoryError: if the unsharded model has no room with ``layers=False``, or not even its
            largest layer has.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; start with torchrun and call "
            "init_process_group() first"
        )

    make = partial(
        Program,
        build_model=build_model,
        shard=shard,
        batch=batch,
        loss=loss,
        steps=steps,
        optimizer=optimizer,
        step=step,
        optimizers=optimizers,
        tokens=tokens,
        seeds=Seeds.BY_RANK if aligned_seeds else Seeds.ONCE,
        layers=layers,
        seed=seed,
    )
    alike = len(set(everyones(generators_mark()))) == 1
    with draws_restored():
        return recovering(lambda: _verified(make, stretch, alike))


def _verified(make: Callable[[], Program], stretch: float, alike: bool) -> Verdict:
    """The verdict on the program that ``make`` returns, after checking it.

    ``alike``: whether the generators of all ranks were in one state when it was called.
    """
    program = raise_together(make)
    _require_deterministic(program)
    run = run_by_layer if _is_by_layer(program) else run_whole
    found = run(program, stretch, Look())
    causes, known = list[Cause](), list[str]()
    if found.first is not None:
        causes, known = find_causes(
            program, found, lambda changed, look: run(changed, stretch, look)
        )
    if found.drew and dist.get_world_size() > 1 and (alike or found.reseeded):
        found.notes += (_DRAWN_ALIKE,)
    return _verdict(program, found, causes, known)


def _is_by_layer(program: Program) -> bool:
    """Whether to compare layer by layer: if asked, or if the whole model has no values or room."""
    model = raise_together(program.built)
    empty = next((name for name, each in model.named_parameters() if each.is_meta), "")
    is_whole = program.layers is False or program.step is not None
    if empty and is_whole:
        given = "step=" if program.step is not None else "layers=False"
        raise ValueError(
            f"{empty} of what build_model returned is on the meta device; return a model whose "
            f"parameters have values, or leave out {given} to compare layer by layer"
        )
    if is_whole or program.layers is not None:
        return not is_whole
    return bool(empty) or from_first(not has_room(model))


def _require_deterministic(program: Program) -> None:
    """Return if every rank builds the same model each time."""
    first, again = (raise_together(lambda: _digests(program)) for _ in range(2))
    others = [(again, "built a second time")]
    others += [(found, f"on rank {rank}") for rank, found in enumerate(everyones(first))]

    def check() -> None:
        for other, where in others:
            for name, found in first.items():
                if other.get(name) != found:
                    raise ValueError(
                        f"build_model is not deterministic: {name} has other values {where}. "
                        "Seed whatever it draws from (torch's generator is seeded already), and "
                        "read no rank in it"
                    )

    raise_together(check)


def _digests(program: Program) -> dict[str, object]:
    """Return digests by parameter and buffer, equal if all bits are equal."""
    model = program.built()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (tuple(each.shape), None if each.is_meta else digest(each))
        for name, each in tensors.items()
    }


def _verdict(program: Program, found: Outcome, causes: list[Cause], known: list[str]) -> Verdict:
    first = found.first
    notes = list(found.notes)
    if found.dtypes[0] != found.dtypes[1]:
        notes.append(f"it computes in {found.dtypes[0]}, the sharded model in {found.dtypes[1]}")
    others = tuple(
        each.name
        for each in found.differences[1:]
        if first is not None and each.phase is first.phase and each.name != first.name
    )
    return Verdict(
        equal=first is None,
        steps=program.steps,
        first=first,
        others=tuple(dict.fromkeys(others)),
        largest=found.largest,
        causes=tuple(causes),
        known=tuple(known),
        notes=tuple(notes),
        tolerance=found.tolerance,
    )

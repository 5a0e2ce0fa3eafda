"""The usual causes of a difference, seen, tested by running without them, or found to fit.

Owns the list. An experiment changes one thing about the program and runs both ways again: if they
then agree, or agree for longer, that was a cause. Seen: noted by the run that differed.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight.compat import hooks_of
from fullshard.preflight.verification.agree import together
from fullshard.preflight.verification.names import module_of
from fullshard.preflight.verification.program import Program, sgd
from fullshard.preflight.verification.verdict import Cause, Outcome, Phase

__all__ = ["find_causes"]

_NAMES = ("data", "grad", "to_local")

Run = Callable[[Program], Outcome]


def find_causes(program: Program, outcome: Outcome, run: Run) -> tuple[Cause, ...]:
    """Returns the causes that were shown, then those that fit; the same on all ranks."""
    shown = list(_experiments(program, outcome, run))
    seen = together(lambda: list(_seen(program, outcome)))
    found = [*shown, *seen]
    return tuple(sorted(found, key=lambda cause: not cause.tested))


def _experiments(program: Program, outcome: Outcome, run: Run) -> Iterator[Cause]:
    def helps(changed: Program) -> bool:
        return run(changed).reached > outcome.reached

    if helps(program.but(aligned_seeds=True)):
        yield Cause(
            name="random numbers drawn per rank",
            evidence="with the random numbers of each rank's batch seeded alike in both runs they "
            "agree, or agree for longer. If they are meant (dropout), pass aligned_seeds=True; "
            "ranks that should draw apart need seeds of their own",
            tested=True,
        )
    if program.tokens is not None and helps(program.but(weighted=True)):
        yield Cause(
            name="a mean over each rank's own tokens",
            evidence="ranks have unequal numbers of tokens; with each loss times its rank's share "
            "of all tokens, times the world size, both agree. Divide the sum by the tokens of all "
            "ranks, and multiply by the world size",
            tested=True,
        )
    updates = outcome.first is not None and outcome.first.phase is Phase.UPDATE
    if updates and helps(program.but(optimizer=sgd)):
        yield Cause(
            name="an optimizer that decides by the shard",
            evidence="gradients agree, and with SGD so do updates: the optimizer uses norms, "
            "shapes or numbers of elements, and sees those of this rank's shard",
            tested=True,
        )


def _seen(program: Program, outcome: Outcome) -> Iterator[Cause]:
    """Causes that the outcome, the reference or its source show, the same on all ranks."""
    first = outcome.first
    if first is None:
        return
    names = [each.name for each in outcome.differences]
    if outcome.untied:
        yield Cause(
            name="weights that are tied in one of the models only",
            evidence=f"{_list(outcome.untied)} is a parameter of its own in one model, and in the "
            "other the same as another. to_empty() and new nn.Parameters undo a tie: tie again "
            "after it, before sharding, and shard both modules in one group",
            tested=True,
        )
    if outcome.modes:
        yield Cause(
            name="train and eval mode mixed up",
            evidence=f"{_list([each or 'the model' for each in outcome.modes])} is in train mode "
            "in one of the models, in eval mode in the other. Set the mode in build_model or loss",
            tested=True,
        )
    yield from _apart(outcome, names)
    if outcome.skipped:
        yield Cause(
            name="a module that some ranks skip",
            evidence=f"not all ranks ran {_list(outcome.skipped)}; a rank that does not run a "
            "module has no gradient for it. Run it on all ranks, times 0 where it is not wanted",
            tested=True,
        )
    yield from _ungiven(outcome)
    yield from _scaled(outcome)
    yield from _typed(outcome, names)
    yield from _rounded(program, outcome)
    yield from _hooked(program, names)
    yield from _bypassed(program, first.module)


def _apart(outcome: Outcome, names: list[str]) -> Iterator[Cause]:
    buffers = [n for n in names if n in outcome.apart and _phase(outcome, n) is Phase.BUFFER]
    params = [n for n in names if n in outcome.apart and n not in buffers]
    if buffers:
        yield Cause(
            name="a buffer that ranks update apart",
            evidence=f"ranks hold different values of {_list(buffers)}. Each saw its own batch "
            "only: reduce what the update uses (SyncBatchNorm does), or do not update in training",
            tested=True,
        )
    if params:
        yield Cause(
            name="a parameter outside every group",
            evidence=f"{_list(params)} is a plain tensor in the sharded model, whose gradient "
            "differs between ranks: nothing reduces it. Shard a module that holds it",
            tested=True,
        )


def _ungiven(outcome: Outcome) -> Iterator[Cause]:
    """Gradients that are there in one of the runs only."""
    missing = [each.name for each in outcome.differences if each.phase is Phase.MISSING]
    otherwise = [name for name in missing if name in outcome.otherwise]
    if otherwise:
        yield Cause(
            name="requires_grad that is not the same in both models",
            evidence=f"{_list(otherwise)} requires a gradient in one of the models only. Set it in "
            "build_model, before sharding",
            tested=True,
        )
    elif missing:
        yield Cause(
            name="gradients that are not reduced",
            evidence="the parameters require gradients, and have none after backward: its last "
            "micro-batch ran with set_requires_gradient_sync(False) or in no_sync(), a gradient "
            "was set to None, or an output detached",
            tested=False,
        )


def _typed(outcome: Outcome, names: list[str]) -> Iterator[Cause]:
    """A tensor that sharding cast."""
    cast = [name for name in names if name in outcome.cast]
    if cast:
        theirs, ours = outcome.cast[cast[0]]
        yield Cause(
            name="a policy's dtype",
            evidence=f"{_list(cast)} is {ours} in the sharded model and {theirs} in the unsharded "
            "one: a buffer of positions or frequencies wants all its bits",
            tested=True,
        )


def _phase(outcome: Outcome, name: str) -> Phase:
    return next(each.phase for each in outcome.differences if each.name == name)


def _scaled(outcome: Outcome) -> Iterator[Cause]:
    """One factor between all gradients."""
    scales = [each.scale for each in outcome.differences if each.phase is Phase.GRADIENT]
    known = [scale for scale in scales if scale is not None]
    if len(known) < max(2, len(scales)):
        return
    if max(known) - min(known) > 1e-2 * abs(max(known)):
        return
    world = dist.get_world_size()
    meaning = {
        float(world): "the world size: they are summed over ranks where a mean is expected",
        1 / world: "1 over the world size: they are divided once too often",
    }
    near = [text for scale, text in meaning.items() if abs(known[0] - scale) < 1e-2 * scale]
    yield Cause(
        name="gradients scaled by one factor",
        evidence=f"all that differ are {known[0]:.4g} times the reference's"
        + (f", {near[0]}" if near else "")
        + "; look at the divide factor, and at what the loss is divided by",
        tested=True,
    )


def _rounded(program: Program, outcome: Outcome) -> Iterator[Cause]:
    """A difference of the size that rounding to fewer bits makes."""
    theirs, ours = outcome.dtypes
    if torch.finfo(ours).eps > torch.finfo(theirs).eps:
        yield Cause(
            name="a policy's dtype",
            evidence=f"the sharded model computes in {ours}, the unsharded one in {theirs}, and "
            "the difference is more than that rounds",
            tested=False,
        )
        return
    found = [each for each in outcome.differences if each.phase is Phase.GRADIENT]
    trained = sum(each.requires_grad for each in program.built().parameters())
    if 2 * len(found) < trained:
        return  # rounding would show in most
    relative = [each.excess * outcome.tolerance.at(each.step) for each in found if each.allowed > 0]
    for dtype in (torch.float16, torch.bfloat16):
        eps = torch.finfo(dtype).eps
        if relative and eps > torch.finfo(ours).eps and max(relative) < 2 * eps:
            yield Cause(
                name="a policy's dtype",
                evidence=f"both compute in {ours}, and gradients differ by no more than rounding "
                f"to {dtype}: the reduction's dtype may be that. Pass stretch= to allow it",
                tested=False,
            )
            return


def _hooked(program: Program, names: list[str]) -> Iterator[Cause]:
    found = dict(program.built().named_parameters())
    kinds = {name: hooks_of(found[name]) for name in names if name in found}
    hooked = {name: kind for name, kind in kinds.items() if kind}
    if hooked:
        name, kind = next(iter(hooked.items()))
        yield Cause(
            name="a hook on a parameter",
            evidence=f"{name} has a hook by {kind[0]} from before it was sharded; the sharded "
            "parameter is another tensor, and does not call it. Register it after sharding",
            tested=False,
        )


def _bypassed(program: Program, module: str) -> Iterator[Cause]:
    """Code that reads or sets ``.data`` or ``.grad`` where both part."""
    places = []
    modules = dict(program.built().named_modules())
    for name in dict.fromkeys((module, module_of(module), "")):
        if isinstance(modules.get(name), nn.Module):
            places += _lines_with(type(modules[name]))
    places += _lines_with(program.loss)
    if places:
        yield Cause(
            name="a parameter read or set through .data, .grad or to_local()",
            evidence=f"{places[0]}: autograd and the sharding see nothing of it, and outside a "
            "forward it is this rank's shard. Use the parameter itself, inside forward",
            tested=False,
        )


def _list(names: list[str] | tuple[str, ...]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _lines_with(thing: Any) -> list[str]:
    """Returns ``file:line, code`` of each place in ``thing`` that uses ``.data`` or ``.grad``.

    Classes of torch itself have none that matter; what has no source has none that can be seen.
    """
    if isinstance(thing, type) and thing.__module__.startswith("torch."):
        return []
    try:
        source, first = inspect.getsourcelines(thing)
        file = Path(inspect.getfile(thing)).name
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError):
        return []
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _NAMES
    ]
    lines = sorted({node.lineno for node in found if not _is_namespace(node)})
    return [f"{file}:{first + line - 1}, `{source[line - 1].strip()}`" for line in lines]


def _is_namespace(node: ast.Attribute) -> bool:
    """Whether it is ``torch.utils.data`` or the like, not a tensor's attribute."""
    return ast.unparse(node).startswith(("torch.", "F.", nn.__name__))

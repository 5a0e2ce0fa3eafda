"""What a user's program does between steps, and between the micro-batches of a step.

Each event changes both models alike, or neither.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from fullshard.sharding import FSDPModule, unsharded
from support.fuzz.around import MORE_BEFORE, ONE_AXIS, PLACED, TWO_LEVELS
from support.fuzz.pair import Pair

__all__ = ["before_micro_batch", "before_step"]

SOME = StateDictOptions(strict=False)  # of what is not used, there is no state


def before_step(pair: Pair) -> None:
    """Do what the program does before a step."""
    for name in pair.drawn.before[pair.step] if pair.drawn.before else ():
        _BEFORE[name](pair)


def before_micro_batch(pair: Pair, micro: int) -> None:
    """Do what the program does before a micro-batch that is not the first of its step."""
    name = pair.drawn.between[pair.step][micro - 1] if pair.drawn.between else ""
    if name == "evaluate":
        pair.compare_evaluations(8)
    if name == "read":
        pair.compare_parameters("between backwards")
    if name == "freeze":
        _freeze(pair)
    if name in ("fail", "interrupt"):
        _drop_earlier(pair, _PlannedError if name == "fail" else _Interrupt)
    if name in ("change placements", "change the reshard", "average"):
        _BEFORE[name](pair)
    if name == "replace a parameter" and not _reduces_twice(pair):
        _replace(pair)


# -- before a step --------------------------------------------------------------------------------


def _pick(pair: Pair) -> str:
    return pair.rng.choice([name for name, _ in pair.oracle.model.named_parameters()])


def _reload(pair: Pair) -> None:
    """Save a state dict, damage the model and load it again.

    Not if a step that a scaler skipped left state in one optimizer only, as torch's fused ones do:
    torch's ``get_state_dict`` steps an optimizer without state, which counts.
    """
    if len({bool(each.state) for each in pair.optimizers}) > 1:
        return
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        saved = copy.deepcopy(get_state_dict(model, optimizer))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0).add_(7)
        model_state, optim_state = saved
        set_state_dict(
            model,
            optimizer,
            model_state_dict=model_state,
            optim_state_dict=optim_state,
            options=SOME,
        )
    pair.oracle.norm = None


def _reload_optimizer(pair: Pair) -> None:
    """Load the optimizer's own state dict."""
    optimizer = pair.run.optimizer
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pair.oracle.norm = None


def _write_full(pair: Pair) -> None:
    """Change full parameters."""
    name = _pick(pair)
    mine, theirs = pair.models
    with unsharded(mine, writeback=True):
        _change(mine, name)
    _change(theirs, name)


def _write_shards(pair: Pair) -> None:
    """Change shards; after an error, which leaves full parameters, first as the docs say."""
    pair.run.model.reset_iter_state()
    name = _pick(pair)
    for model in pair.models:
        _change(model, name)


def _change(model: nn.Module, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).mul_(0.5)


def _freeze(pair: Pair) -> None:
    """Freeze a parameter of the optimizer, or train one that was frozen by this.

    The bias of the stem is never frozen: inputs under reentrant checkpointing need gradients.
    """
    name = _pick(pair)
    if name == "stem.bias":
        return
    chosen = pair.oracle.model.get_parameter(name)
    known = [each for group in pair.optimizers[-1].param_groups for each in group["params"]]
    if any(chosen is each for each in known):
        trains = not chosen.requires_grad
        for model in pair.models:  # after an error, modules may hold full parameters
            model.get_parameter(name).requires_grad_(trains)
        if trains:
            pair.forget_averages()  # which may have been made while it was frozen


def _change_reshard(pair: Pair) -> None:
    """Change whether parameters are freed after forward."""
    for each in pair.run.model.modules():
        if isinstance(each, FSDPModule):
            each.set_reshard_after_forward(pair.rng.random() < 0.5, recurse=False)


def _change_placements(pair: Pair) -> None:
    """Change placements to those with the same shards."""
    for family in (ONE_AXIS, TWO_LEVELS):
        if pair.run.around.case.placements in family:
            chosen = PLACED[pair.rng.choice(family)]
            if not (pair.case.canonical and chosen.compute == ()):
                pair.run.model.set_placements(chosen)


def _fail(pair: Pair, kind: type[BaseException] | None = None) -> None:
    """Raise in a forward, or in a backward, on all ranks; drop the gradients.

    In the canonical order ranks raise in different modules, and a forward follows.
    """
    _raise_somewhere(pair, kind or _PlannedError)
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    if pair.case.canonical:
        with torch.no_grad():
            pair.run.model(_ones(), 0)


def _drop_earlier(pair: Pair, kind: type[BaseException]) -> None:
    """Raise after other micro-batches of a step, whose gradients the program drops."""
    _raise_somewhere(pair, kind)
    with warnings.catch_warnings():  # there may be gradients that no backward has reduced
        warnings.filterwarnings("ignore", message="gradients of earlier backwards")
        pair.run.model.reset_iter_state()
    for optimizer in pair.optimizers:
        optimizer.zero_grad()


def _raise_somewhere(pair: Pair, kind: type[BaseException]) -> None:
    """Raise in a module that runs, in a forward or in its backward."""
    part = pair.rng.choice(_running(pair.oracle.model))
    if pair.case.canonical:
        part = ("stem", "tree", "head")[(len(part) + dist.get_rank()) % 3]
    backward = pair.rng.random() < 0.5

    def fail(*_: Any) -> None:
        raise kind

    def fail_in_backward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if not out.requires_grad:
            raise kind
        out.register_hook(fail)

    hook = fail_in_backward if backward else fail
    handle = pair.run.model.get_submodule(part).register_forward_hook(hook)
    try:
        pair.run.model(_ones(), 0).sum().backward()
    except (_PlannedError, _Interrupt):
        return
    finally:
        handle.remove()
    raise AssertionError(f"{part} did not run")


def _running(model: nn.Module) -> list[str]:
    """Return the modules that a forward runs, the root left out."""
    names: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: names.append(name))
        for name, module in model.named_modules()
        if name
    ]
    with torch.no_grad():
        model(_ones(), 0)
    for hook in hooks:
        hook.remove()
    return names


def _ones() -> torch.Tensor:
    return torch.ones(3, 4, dtype=torch.float64)


class _PlannedError(Exception):
    """What ``_raise_somewhere`` raises."""


class _Interrupt(BaseException):
    """What Ctrl-C raises: torch calls no hooks of a module for it."""


def _interrupt(pair: Pair) -> None:
    """Do what ``_fail`` does, by an interrupt, after which modules hold full parameters."""
    _fail(pair, _Interrupt)
    pair.run.model.reset_iter_state()


def _replace(pair: Pair) -> None:
    """Put a new parameter into the place of one that trains, with the state of the old one."""
    name = _pick(pair)
    places = [each.get_parameter(name) for each in pair.models]
    held = [list(each.named_parameters(remove_duplicate=False)) for each in pair.models]
    tied = sum(param is places[1] for _, param in held[1]) > 1
    if tied or pair.run.around.case.optimizer != "plain" or not places[1].requires_grad:
        return
    for module in pair.run.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        old = model.get_parameter(name)
        new = nn.Parameter(old.detach() * 0.5)
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, new)
        for group in optimizer.param_groups:
            group["params"] = [new if each is old else each for each in group["params"]]
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
    pair.forget_averages()


def _reduces_twice(pair: Pair) -> bool:
    """Whether results of a first reduction may wait, which a new parameter makes void."""
    around = pair.run.around
    placed = around.case.placements
    return around.has_replicas or (bool(placed) and placed not in ONE_AXIS)


def _average(pair: Pair) -> None:
    """Compare a forward with the averages in the place of the weights."""
    if pair.averages is not None and pair.averages.count:
        with pair.averages.swapped():
            pair.compare_evaluations(9)


def _evaluate(pair: Pair) -> None:
    """Compare a forward without gradients, in evaluation mode, with full parameters."""
    model, computing = pair.run.model, pair.oracle.computing()
    x = _ones()
    with torch.no_grad(), unsharded(model):
        dtype = torch.float32 if pair.drawn.mixed else torch.float64
        torch.testing.assert_close(model.eval()(x, 0), computing(x.to(dtype), 0))
    model.train()


def _keep_zeros(pair: Pair) -> None:
    """Give all parameters that train gradients of zeros, as a first ``zero_grad`` of some do."""
    for optimizer in pair.optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    param.grad = torch.zeros_like(param)


_BEFORE: dict[str, Callable[[Pair], None]] = {
    "reload": _reload,
    "reload the optimizer": _reload_optimizer,
    "write full parameters": _write_full,
    "write shards": _write_shards,
    "freeze": _freeze,
    "change the reshard": _change_reshard,
    "change placements": _change_placements,
    "fail": _fail,
    "evaluate": _evaluate,
    "keep zeros": _keep_zeros,
    "interrupt": _interrupt,
    "replace a parameter": _replace,
    "average": _average,
}
assert tuple(_BEFORE) == MORE_BEFORE

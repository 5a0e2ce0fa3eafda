"""State of a run in the middle of training, moved into a run with other places for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from fullshard.checkpoint import (
    load_safetensors,
    optim_state_dict,
    optim_state_dict_to_load,
    save_safetensors,
)
from support.fuzz.around import MOVES, Norm
from support.fuzz.events import SOME
from support.fuzz.model import Root, optimizer_of
from support.fuzz.pair import Pair, ShardedRun
from support.parity.compare import Tolerance, assert_equal, full

__all__ = ["move_before_step"]

_FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)


def move_before_step(pair: Pair) -> None:
    """Save the state of both runs, and go on with new runs that load it."""
    way = pair.drawn.moves[pair.step] if pair.drawn.moves else ""
    if not way:
        return
    old, new = pair.run, pair.build(pair.drawn.moved[pair.step])
    plain = pair.oracle.model, pair.oracle.optimizer
    wanted = pair.oracle.norm
    model = Root(pair.case)
    fresh = model, optimizer_of(model, pair.case, pair.drawn)
    for before, after in ((old.model, new.model), (plain[0], fresh[0])):
        for param, copied in zip(before.parameters(), after.parameters(), strict=True):
            copied.requires_grad_(param.requires_grad)
    _WAYS[way](pair, old, new, plain, fresh)
    pair.run = new
    pair.oracle.model, pair.oracle.optimizer = fresh
    pair.oracle.norm = None
    if old.around.case.norm is new.around.case.norm is Norm.PREVIOUS:
        new.optimizer.total_norm = old.optimizer.total_norm
        pair.oracle.norm = wanted
    pair.oracle.clips_as(new.around.case)
    pair.forget_averages()


def _states(model: Any, optimizer: Any, options: StateDictOptions | None = None) -> Any:
    found = get_state_dict(model, optimizer, options=options)
    return {"model": found[0], "optimizer": found[1]}


def _load(
    model: Any, optimizer: Any, states: dict[str, Any], options: StateDictOptions = SOME
) -> None:
    states = copy.deepcopy(states)  # an optimizer's state becomes what it loads
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
        options=options,
    )


def _compared(pair: Pair, got: dict[str, Any], want: dict[str, Any]) -> None:
    """Compare whole state dicts of a sharded run and of the unsharded one."""
    one, other = (
        {f"{key}": value for key, value in _flat(each) if isinstance(value, torch.Tensor)}
        for each in (got, want)
    )
    tolerance = Tolerance(units=4 * pair.tolerance.units, overrides=pair.tolerance.overrides)
    assert_equal(one, other, tolerance, f"state before step {pair.step}")


def _flat(states: Any, path: str = "") -> Any:
    if isinstance(states, dict):
        for key, value in states.items():
            yield from _flat(value, f"{path}/{key}")
    elif not isinstance(states, list):  # options, which runs of one case share
        yield path, states


def _by_torch(pair: Pair, old: ShardedRun, plain: Any, fresh: Any) -> dict[str, Any]:
    """Move the unsharded run by torch's functions, and return its state."""
    states: dict[str, Any] = _states(*plain)
    _load(fresh[0], fresh[1], states)
    return states


def _as_dtensors(pair: Pair, old: ShardedRun, new: ShardedRun, plain: Any, fresh: Any) -> None:
    whole = tree_map_only(torch.Tensor, full, _states(old.model, old.optimizer))
    _compared(pair, whole, _by_torch(pair, old, plain, fresh))
    likes = _states(new.model, new.optimizer)
    _load(new.model, new.optimizer, _placed(likes, whole))


def _placed(likes: Any, whole: Any) -> Any:
    """Return whole tensors cut as the tensors of another state dict, where it has these keys."""
    if isinstance(likes, dict) and isinstance(whole, dict):
        return {key: _placed(likes.get(key), value) for key, value in whole.items()}
    if isinstance(likes, DTensor):
        return distribute_tensor(whole, likes.device_mesh, likes.placements)
    return whole


def _as_full(pair: Pair, old: ShardedRun, new: ShardedRun, plain: Any, fresh: Any) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = _states(old.model, old.optimizer, options)
    want = _by_torch(pair, old, plain, fresh)
    if dist.get_rank() == 0:
        _compared(pair, whole, want)
    # torch sends memory in the order of a contiguous tensor; torch 2.11 gathers others for dim 1
    whole = tree_map_only(torch.Tensor, torch.Tensor.contiguous, whole)
    # not by ``set_state_dict``, which sends nothing where a rank has an empty state dict
    set_model_state_dict(new.model, whole["model"], options=_FULL)
    set_optimizer_state_dict(new.model, new.optimizer, whole["optimizer"], options=_FULL)
    _drop_invented(new, want)


def _from_plain(pair: Pair, old: ShardedRun, new: ShardedRun, plain: Any, fresh: Any) -> None:
    options = StateDictOptions(full_state_dict=True, strict=False)
    states = _by_torch(pair, old, plain, fresh)
    _load(new.model, new.optimizer, states, options)
    _drop_invented(new, states)


def _drop_invented(new: ShardedRun, states: dict[str, Any]) -> None:
    """Drop the state that torch makes of a step with zeros, where it loads none over it."""
    for name, param in new.model.named_parameters():
        if name not in states["optimizer"]["state"]:
            new.optimizer.state.pop(param, None)


def _through_files(pair: Pair, old: ShardedRun, new: ShardedRun, plain: Any, fresh: Any) -> None:
    folder = pair.shared_folder(f"dcp-{pair.step}")
    states = _states(old.model, old.optimizer)
    dcp.save(states, checkpoint_id=folder)
    loaded = _states(new.model, new.optimizer)
    loaded["optimizer"]["state"] = {
        name: value
        for name, value in loaded["optimizer"]["state"].items()
        if name in states["optimizer"]["state"]
    }
    dcp.load(loaded, checkpoint_id=folder)
    _load(new.model, new.optimizer, loaded)
    _by_torch(pair, old, plain, fresh)


def _by_ours(pair: Pair, old: ShardedRun, new: ShardedRun, plain: Any, fresh: Any) -> None:
    folder = pair.shared_folder(f"safetensors-{pair.step}")
    save_safetensors(old.model, folder)
    load_safetensors(new.model, folder)
    found = optim_state_dict(old.model, old.optimizer)
    optim_state_dict_to_load(new.model, new.optimizer, found, load_directly=True)
    fresh[0].load_state_dict(plain[0].state_dict())
    fresh[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))


_WAYS: dict[str, Callable[[Pair, ShardedRun, ShardedRun, Any, Any], None]] = {
    "dtensors": _as_dtensors,
    "full": _as_full,
    "files": _through_files,
    "plain": _from_plain,
    "ours": _by_ours,
}
assert {*_WAYS} == {*MOVES} - {""}

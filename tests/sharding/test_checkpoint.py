"""Checkpoints through ``torch.distributed.checkpoint``: saved on some ranks, loaded on others."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from support.checkpoints import load, save, whole_values
from support.products import few
from support.ranks import distributed, run_on_ranks
from support.surface.model import batch, build, sharded, train
from support.surface.ranks import assert_equal_state, full_parameters


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05)


def _start_and_save(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Trains and saves; returns the whole parameters and moments."""
    net = sharded(build())
    optimizer = _adam(net)
    train(net, optimizer, range(steps))
    save(folder, net, optimizer)
    return whole_values(net, optimizer)


def _load_and_go_on(
    folder: Path, first: int, save_to: Path | None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Loads into another model; returns what was loaded and the losses of two more steps."""
    net = sharded(build(99))
    optimizer = _adam(net)
    load(folder, net, optimizer)
    loaded = whole_values(net, optimizer)
    if save_to is not None:
        save(save_to, net, optimizer)
    return loaded, train(net, optimizer, range(first, first + 2))


@pytest.mark.parametrize(
    "worlds", few([(2, 4), (4, 2), (2, 1), (2, 2)], (4, 2)), ids="{0[0]} to {0[1]}".format
)
def test_a_checkpoint_loads_on_another_number_of_ranks_and_back(
    worlds: tuple[int, int], tmp_path: Path
) -> None:
    saved_on, loaded_on = worlds
    values = run_on_ranks(_start_and_save, saved_on, tmp_path / "first", 3)[0]
    reference = build()
    optimizer = _adam(reference)
    train(reference, optimizer, range(3))
    torch.testing.assert_close(values, whole_values(reference, optimizer))
    assert {key.split("/")[-1] for key in values} >= {"exp_avg", "exp_avg_sq", "step"}
    expected = train(reference, optimizer, range(3, 5))

    for ranks, folder, save_to in (
        (loaded_on, tmp_path / "first", tmp_path / "second"),
        (saved_on, tmp_path / "second", None),
    ):
        for its_values, losses in run_on_ranks(_load_and_go_on, ranks, folder, 3, save_to):
            assert_equal_state(its_values, values)
            torch.testing.assert_close(losses, expected)


def test_a_checkpoint_saved_on_two_ranks_loads_into_a_plain_model_without_ranks(
    tmp_path: Path,
) -> None:
    values = run_on_ranks(_start_and_save, 2, tmp_path, 2)[0]
    plain = build(99)
    state = {"model": plain.state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    plain.load_state_dict(state["model"])
    weights = full_parameters(plain)
    assert_equal_state(weights, {name: values[name] for name in weights})


@pytest.mark.cross
@pytest.mark.parametrize("reshard", [True, False])
@distributed(2, 4, matrix=[4])
def test_training_goes_on_bit_for_bit_after_saving_and_loading(
    reshard: bool, tmp_path: Path
) -> None:
    straight = sharded(build(), reshard_after_forward=reshard)
    optimizer = _adam(straight)
    train(straight, optimizer, range(3))
    save(tmp_path, straight, optimizer)
    losses = train(straight, optimizer, range(3, 7))

    resumed = sharded(build(99), reshard_after_forward=reshard)
    its_optimizer = _adam(resumed)
    with torch.no_grad():
        resumed(batch())  # whatever this left unsharded must not survive the load
    load(tmp_path, resumed, its_optimizer)
    assert train(resumed, its_optimizer, range(3, 7)) == losses
    assert_equal_state(full_parameters(resumed), full_parameters(straight))


@pytest.mark.parametrize("from_rank0", [False, True])
@distributed(2, 4)
def test_a_full_optimizer_state_is_the_unsharded_optimizers_and_loads_back(
    from_rank0: bool,
) -> None:
    reference, net = build(), sharded(build())
    optimizer, its_optimizer = _adam(net), _adam(reference)
    train(net, optimizer, range(2))
    train(reference, its_optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=from_rank0)
    weights = get_model_state_dict(net, options=options)
    # torch hands out and takes in the very tensors that count the steps
    state: Any = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options))
    if from_rank0 and dist.get_rank() != 0:
        assert weights == {}
        assert state == {}
    else:
        expected: Any = get_optimizer_state_dict(reference, its_optimizer)
        assert state["state"].keys() == expected["state"].keys()
        for name, entry in expected["state"].items():
            for key, value in entry.items():
                torch.testing.assert_close(state["state"][name][key], value)

    fresh = sharded(build(99))
    fresh_optimizer = _adam(fresh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
    set_model_state_dict(fresh, weights, options=options)
    set_optimizer_state_dict(fresh, fresh_optimizer, state, options=options)
    assert train(fresh, fresh_optimizer, range(2, 4)) == train(net, optimizer, range(2, 4))

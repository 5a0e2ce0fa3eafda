"""FairScale 0.4.13 itself beside our door: one script, the same numbers, each loads the other's.

FairScale is run on the CPU by ``support.fairscale.on_cpu``. A norm over flat tensors adds in
another order, and steps follow it: what was clipped is equal up to rounding, all else to the bit.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.wrappers import fairscale as ours
from support.fairscale.on_cpu import fairscale_on_cpu
from support.parity.compare import full
from support.ranks import distributed
from support.surface.ranks import everyone

pytest.importorskip("fairscale")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # FairScale is older than what torch deprecates
]


class Net(nn.Module):
    """Batch norm has buffers; the inner linear and the head have weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.body = nn.Sequential(nn.Linear(7, 7), nn.ReLU(), nn.BatchNorm1d(7))
        self.head = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(torch.tanh(self.stem(x))))
        return y


def _theirs() -> Any:
    """The names of FairScale's that are ours, with a wrapper that computes on the CPU."""
    from fairscale import nn as fairscale_nn
    from fairscale.internal.reduce_scatter_bucketer import ReduceScatterBucketer
    from fairscale.nn.data_parallel.fully_sharded_data_parallel import get_fsdp_instances

    class Wrapper(fairscale_nn.FullyShardedDataParallel):  # type: ignore[misc]  # untyped
        def __init__(self, module: nn.Module, **arguments: Any) -> None:
            super().__init__(module, compute_device=torch.device("cpu"), **arguments)

    names = ("auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "wrap")
    return SimpleNamespace(
        FullyShardedDataParallel=Wrapper,
        ReduceScatterBucketer=ReduceScatterBucketer,
        checkpoint_wrapper=fairscale_nn.checkpoint_wrapper,
        enable_wrap=fairscale_nn.enable_wrap,
        get_fsdp_instances=get_fsdp_instances,
        **{name: getattr(fairscale_nn, name) for name in names},
    )


def _both(program: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What ``program`` gives with our names and with FairScale's."""
    mine = program(ours)
    with fairscale_on_cpu():
        return mine, program(_theirs())


def _wrapped(door: Any, **arguments: Any) -> Any:
    torch.manual_seed(0)
    net: Any = Net()
    net.body = door.FullyShardedDataParallel(net.body, **arguments)
    return door.FullyShardedDataParallel(net, **arguments)


def _rows(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 5, generator=generator)


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    """Losses and norms; every second micro-batch is not reduced."""
    found = []
    for step in steps:
        with model.no_sync():
            model(_rows(100 + step)).float().square().mean().backward()
        loss = model(_rows(step)).float().square().mean()
        loss.backward()
        found += [loss.detach(), full(model.clip_grad_norm_(0.05))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _adam(model: Any) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def _sgd(model: Any) -> torch.optim.SGD:
    """FairScale makes numbers of Adam's steps, which torch's Adam no longer takes."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def _copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in state.items()}


ARGUMENTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "kept": {"reshard_after_forward": False},
    "not flat": {"flatten_parameters": False, "bucket_cap_mb": 0},
    "predivided": {"gradient_predivide_factor": 2.0},
    "half": {"mixed_precision": True, "fp32_reduce_scatter": True},
    "half all along": {"mixed_precision": True},
    "grads on the CPU": {"move_grads_to_cpu": True},
}


@pytest.mark.parametrize("name", ARGUMENTS)
@distributed(2)
def test_losses_norms_parameters_and_buffers_are_fairscales(name: str) -> None:
    def program(door: Any) -> Any:
        model = _wrapped(door, **ARGUMENTS[name])
        losses = _train(model, _adam(model), range(3))
        return losses, _copied(model.state_dict())

    mine, theirs = _both(program)
    assert list(mine[1]) == list(theirs[1])
    rounding: Any = {"rtol": 1e-3, "atol": 1e-4} if name.startswith("half") else {}
    torch.testing.assert_close(mine, theirs, **rounding)


@distributed(2)
def test_other_gradient_divide_factors_give_fairscales_gradients() -> None:
    def program(door: Any) -> Any:
        model = _wrapped(door)
        model.set_gradient_divide_factors(2.0, 3.0, recursive=True)
        model(_rows(0)).square().mean().backward()
        return full(model.clip_grad_norm_(1e6))

    mine, theirs = _both(program)
    assert mine > 0
    torch.testing.assert_close(mine, theirs)  # norms: ours is summed in float64, FairScale's not


@distributed(2)
def test_apply_and_summoning_see_and_change_full_parameters_as_fairscales() -> None:
    def double(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            assert not isinstance(module.weight, DTensor)
            with torch.no_grad():
                module.weight.view(module.out_features, module.in_features).mul_(2)

    def program(door: Any) -> Any:
        model = _wrapped(door)
        model.apply(double)
        with model.summon_full_params():
            shapes = [tuple(param.shape) for _, param in model.named_parameters()]
        return shapes, _copied(model.state_dict())

    mine, theirs = _both(program)
    assert sorted(mine[0]) == sorted(theirs[0])
    torch.testing.assert_close(mine[1], theirs[1], rtol=0, atol=0)


@distributed(2)
def test_a_run_that_fairscale_saved_goes_on_here_and_one_from_here_goes_on_there() -> None:
    steps = range(2), range(2, 4)

    def first(door: Any) -> Any:
        model = _wrapped(door)
        optimizer = _sgd(model)
        _train(model, optimizer, steps[0])
        saved = _copied(model.state_dict()), model.gather_full_optim_state_dict(optimizer)
        everywhere = [saved[1]]
        dist.broadcast_object_list(everywhere)
        return saved[0], everywhere[0], _train(model, optimizer, steps[1])

    def going_on(weights: Any, state: Any) -> Callable[[Any], Any]:
        def program(door: Any) -> Any:
            model = _wrapped(door)
            optimizer = _sgd(model)
            model.load_state_dict(weights)
            if state is not None:
                optimizer.load_state_dict(model.get_shard_from_optim_state_dict(state))
            return _train(model, optimizer, steps[1])

        return program

    mine, theirs = _both(first)
    weights, state, expected = copy.deepcopy(theirs)
    assert "param_id_map" in state
    here, there = _both(going_on(weights, state))
    torch.testing.assert_close(here, expected)
    torch.testing.assert_close(there, expected)
    here, there = _both(going_on(mine[0], None))  # a fresh optimizer
    torch.testing.assert_close(here, there)


@distributed(2)
def test_local_state_dicts_of_all_ranks_become_one_whole_as_with_fairscale() -> None:
    def program(door: Any) -> Any:
        model = _wrapped(door)
        _train(model, _adam(model), range(1))
        local = _copied(model.local_state_dict()), model.local_metadata_dict()
        parts = everyone((*local, _copied(model.state_dict())))
        weights, metadata, whole = zip(*parts, strict=True)
        return (weights, metadata), whole[0]  # buffers are the first rank's

    consolidate = ours.FullyShardedDataParallel.consolidate_shard_weights
    for (weights, metadata), expected in _both(program):
        whole = consolidate(weights, metadata)
        torch.testing.assert_close(whole, {name: expected[name] for name in whole}, rtol=0, atol=0)
        assert whole.keys() == expected.keys()
        assert consolidate(weights, metadata, with_module_buffers=False).keys() < whole.keys()
    with pytest.raises(ValueError, match="1 state dicts and 2 metadata"):
        consolidate(weights[:1], metadata)


@distributed(2)
def test_what_is_wrapped_is_what_fairscale_wraps() -> None:
    def program(door: Any) -> Any:
        kind = door.FullyShardedDataParallel

        def paths(model: nn.Module) -> list[str]:
            found = (name for name, each in model.named_modules() if isinstance(each, kind))
            return [
                ".".join(part for part in name.split(".") if not part.startswith("_f"))
                for name in found
            ]

        found = []
        sizes = functools.partial(door.default_auto_wrap_policy, min_num_params=50)
        with door.enable_wrap(sizes, wrapper_cls=kind):
            found.append(paths(door.auto_wrap(Net())))
            root = functools.partial(sizes, min_num_params=100, skip_params_check_for_root=True)
            found.append(paths(door.auto_wrap(Net(), root)))
        net: Any = Net()
        net.body.wrapper_config = {"bucket_cap_mb": 3, "reshard_after_forward": False}
        config = door.config_auto_wrap_policy
        with door.enable_wrap(config, wrapper_cls=kind, bucket_cap_mb=5):
            wrapped = door.auto_wrap(net)
            found += [paths(wrapped), wrapped.body.bucket_cap_mb]
            found.append(door.wrap(nn.Linear(3, 3)).bucket_cap_mb)
        leaves = door.default_auto_wrap_policy.FORCE_LEAF_MODULES
        leaves.add(Net)
        try:
            with door.enable_wrap(sizes, wrapper_cls=kind):
                found.append(paths(door.auto_wrap(nn.Sequential(Net()))))
        finally:
            leaves.remove(Net)
        return found, len(door.get_fsdp_instances(_wrapped(door)))

    mine, theirs = _both(program)
    assert mine == theirs


@pytest.mark.parametrize("offload", [False, True])
@distributed(2)
def test_a_checkpointed_module_trains_as_with_fairscales_and_counts_a_batch_once(
    offload: bool,
) -> None:
    def program(door: Any) -> Any:
        torch.manual_seed(0)
        net: Any = Net()
        net.body = door.FullyShardedDataParallel(door.checkpoint_wrapper(net.body, offload))
        model = door.FullyShardedDataParallel(net)
        losses = _train(model, _adam(model), range(2))
        return losses, _copied(model.state_dict())

    mine, theirs = _both(program)
    torch.testing.assert_close(mine, theirs)
    assert mine[1]["body.2.num_batches_tracked"] == 4


@pytest.mark.parametrize("cap", [25, 0.001, 0])
@distributed(2)
def test_the_bucketer_gives_what_fairscales_gives_in_its_order(cap: float) -> None:
    def program(door: Any) -> Any:
        bucketer = door.ReduceScatterBucketer(bucket_cap_mb=cap)
        group, found = dist.group.WORLD, []
        for index, size in enumerate((3, 400, 7, 90, 3, 2)):
            generator = torch.Generator().manual_seed(index + 10 * dist.get_rank())
            inputs = list(torch.randn(2, size, generator=generator))
            note = functools.partial(lambda index, result: found.append((index, result)), index)
            bucketer.reduce_scatter_async(inputs, group, callback_fn=note if index else None)
        bucketer.flush()
        bucketer.teardown()
        with pytest.raises((AssertionError, ValueError)):
            bucketer.reduce_scatter_async([torch.ones(3)], group)
        if cap:  # else nothing ever waits
            bucketer.reduce_scatter_async([torch.ones(3)] * 2, group=group)
            with pytest.raises((AssertionError, RuntimeError)):
                bucketer.teardown()
        bucketer.flush()
        return bucketer.bucket_cap_mb, found

    mine, theirs = _both(program)
    assert [index for index, _ in mine[1]] == [index for index, _ in theirs[1]]
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)

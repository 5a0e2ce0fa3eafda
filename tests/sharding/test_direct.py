"""``fully_shard`` with direct layouts between ranks that do not share memory.

Bit for bit what packed layouts give, for the exchange adds in rank order either way; and the
parameters lie where the gather wrote them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import (
    DefaultAllGather,
    DefaultReduceScatter,
    EventKind,
    EventLog,
    ExchangeTransport,
    debug_collectives,
    observe,
    set_shared_memory,
)
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.sharding import FSDPModule, fully_shard
from support.layout_tables import between_hosts, layouts
from support.parity_compare import EXACT, assert_equal, gradients_of, parameters_of
from support.parity_engines import shard
from support.parity_models import CASES
from support.parity_reference import compare, my_rows, train
from support.ranks import cpu_mesh, distributed

EXCHANGE = ExchangeTransport()


def exchange(model: nn.Module) -> nn.Module:
    """Every collective of ``model`` as between hosts, whatever its table."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(DefaultAllGather(transport=EXCHANGE))
            module.set_custom_reduce_scatter(DefaultReduceScatter(transport=EXCHANGE))
    return model


def both(name: str, *, steps: int = 3, **options: Any) -> list[Any]:
    """The same training with direct layouts and with packed ones."""
    if name == "many-dtypes":
        options["dtype"] = None  # those it has
    histories = []
    for each in ("direct", "packed"):
        with layouts(each):
            model = exchange(shard(CASES[name], **options))
            histories.append(train(model, CASES[name], my_rows(), steps=steps))
    return histories


@pytest.mark.parametrize("name", sorted(CASES))
@distributed(2, 4, matrix=[4])
def test_no_bit_differs_from_packed_layouts(name: str) -> None:
    direct, packed = both(name)
    compare(direct, packed, EXACT, average=False)


@pytest.mark.parametrize(
    "options",
    [
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, keep_casts=True)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
    ],
    ids=["bf16-fp32", "bf16", "casts-kept", "fp16", "offload", "kept"],
)
@distributed(2)
def test_options_differ_in_no_bit(options: dict[str, Any]) -> None:
    direct, packed = both("transformer", **options)
    compare(direct, packed, EXACT, average=False)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(lambda: {"mesh": cpu_mesh((2, 2), ("replicate", "shard"))}, id="hybrid"),
        pytest.param(lambda: {"reshard_after_forward": 2}, id="smaller world"),
    ],
)
@distributed(4)
def test_meshes_and_smaller_worlds_differ_in_no_bit(
    options: Callable[[], dict[str, Any]],
) -> None:
    direct, packed = both("transformer", **options())
    compare(direct, packed, EXACT, average=False)


def _wide() -> nn.Sequential:
    """Large weights and small biases; the last weight has a row too few for two ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 39))


def _sharded() -> nn.Sequential:
    model = _wide()
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return model


def _step(model: Any, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    loss: torch.Tensor = model(torch.randn(8, 16, generator=generator)).square().mean()
    loss.backward()
    return loss.detach()


@distributed(2)
def test_large_tensors_travel_alone_and_only_small_ones_are_copied() -> None:
    with between_hosts("large ones direct"):
        model: Any = _sharded()
        weights = [2048, 20 * 2 * 32 * 4]  # bytes; of 39 rows, 20 on each rank
        log = EventLog()
        with observe(log):
            _step(model)
    gathered = [each.nbytes for each in log.of(EventKind.ALL_GATHER)]
    reduced = [each.nbytes for each in log.of(EventKind.REDUCE_SCATTER)]
    assert [each for each in gathered if each in weights] == [weights[1], weights[0], weights[0]]
    assert sorted(each for each in reduced if each in weights) == sorted(weights)
    assert sum(each.nbytes for each in log.of(EventKind.COPY_OUT)) == (39 + 2 * 32) * 4


@distributed(2)
def test_what_modules_see_is_what_gathers_filled_and_goes_with_reshard() -> None:
    with between_hosts("direct"):
        model: Any = _sharded()
        whole = dict(_wide().named_parameters())
        places = set()
        for _ in range(2):
            model.unshard()
            model[0].unshard()
            seen = dict(model.named_parameters())
            assert all(torch.equal(seen[name], whole[name]) for name in whole)
            places.add(id(seen["0.weight"]))
            storage = seen["0.weight"].untyped_storage()
            assert storage.nbytes() > 0
            model.reshard()
            model[0].reshard()
            assert storage.nbytes() == 0
        assert len(places) == 1


@distributed(2)
def test_an_optimizer_step_waits_for_gathers_that_read_its_parameters() -> None:
    with between_hosts("direct"):
        model: Any = _sharded()
        _step(model)
        before = parameters_of(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        handles = [module.unshard(async_op=True) for module in (model, model[0])]
        optimizer.step()
        for handle in handles:
            handle.wait()
        seen = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert_equal(seen, before, EXACT, "gathered before the step")
        model.reshard()
        model[0].reshard()
        changed = parameters_of(model)
        assert not torch.equal(changed["0.weight"], before["0.weight"])  # type: ignore[arg-type]


@distributed(2)
def test_a_users_own_collectives_are_called_once_for_each_group() -> None:
    class Own(DefaultAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("gather")
            return super().__call__(*args, **kwargs)

    class OwnReduce(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("reduce")
            return super().__call__(*args, **kwargs)

    calls: list[str] = []
    with between_hosts("direct"):
        model: Any = _sharded()
        for module in (model, model[0]):
            module.set_custom_all_gather(Own())
            module.set_custom_reduce_scatter(OwnReduce())
            module.set_reduce_bucket_cap(0)
        _step(model)
    # Each group is gathered for forward, and once more for backward unless it is the root's.
    assert calls == ["gather", "gather", "gather", "reduce", "reduce"]


def _swap_before_backward(swap: Callable[[nn.Module], object]) -> None:
    """Gradients are the same whether or not ``swap`` comes between forward and backward."""
    results = []
    for each in (lambda model: None, swap):
        with layouts("direct"):
            model: Any = _sharded()
            generator = torch.Generator().manual_seed(dist.get_rank())
            loss = model(torch.randn(8, 16, generator=generator)).square().mean()
            each(model)
            loss.backward()
            results.append(gradients_of(model))
            _step(model)
    assert_equal(results[1], results[0], EXACT, "gradients")


@distributed(2)
def test_a_collective_replaced_between_forward_and_backward_changes_nothing() -> None:
    def swap(model: Any) -> None:
        for module in (model, model[0]):
            module.set_custom_all_gather(DefaultAllGather())
            module.set_custom_reduce_scatter(DefaultReduceScatter())

    with between_hosts("direct"):
        _swap_before_backward(swap)


@distributed(2)
def test_memory_shared_in_forward_and_not_in_backward_changes_nothing() -> None:
    _swap_before_backward(exchange)


@distributed(2)
def test_memory_may_be_shared_again_in_the_middle_of_training() -> None:
    results = []
    for switch in (False, True):
        with between_hosts("direct"):
            model: Any = _sharded()
            _step(model)
            model.zero_grad()
            if switch:
                set_shared_memory(True)
            _step(model, 1)
            set_shared_memory(False)
            _step(model, 2)
            results.append(gradients_of(model))
    assert_equal(results[1], results[0], EXACT, "gradients")


@distributed(2)
def test_accumulation_and_a_hook_on_the_reduced_buffer_differ_in_no_bit() -> None:
    results = []
    for name in ("direct", "packed"):
        with between_hosts(name):
            model: Any = _sharded()
            seen: list[torch.Tensor] = []
            model.set_all_reduce_hook(lambda buffer, seen=seen: seen.append(buffer.clone()))
            for step in range(3):
                model.set_requires_gradient_sync(step == 2)
                _step(model, step)
            results.append((gradients_of(model), dict(enumerate(seen))))
    assert results[0][1]
    for direct, packed in zip(*results, strict=True):
        assert_equal(direct, packed, EXACT, "gradients, and what the hook saw")


@distributed(2)
def test_debug_mode_sees_direct_collectives_and_changes_no_bit() -> None:
    results = []
    for debug in (True, False):
        with between_hosts("direct"):
            model: Any = _sharded()
            if debug:
                with debug_collectives(timeout=20):
                    _step(model)
            else:
                _step(model)
            results.append(gradients_of(model))
    assert_equal(results[0], results[1], EXACT, "gradients")


@distributed(2)
def test_a_gather_that_nobody_uses_leaves_no_memory() -> None:
    with between_hosts("direct"):
        model: Any = _sharded()
        _step(model)
        model.unshard(async_op=True)
        model.reshard()
        first = _step(model)
        other: Any = _sharded()
        _step(other)
        assert torch.equal(first, _step(other))

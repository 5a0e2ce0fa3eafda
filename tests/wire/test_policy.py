"""The policy of what travels: its rules, and training under it beside training without."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecision
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard.comm import EventKind, EventLog, TensorSpec, observe
from fullshard.sharding import RankMismatchError, fully_shard, unsharded
from fullshard.wire import ErrorFeedback, Quantised, WirePolicy
from support.modules import Assembled
from support.narrow import WIDTH, Net, assert_replicas_equal, batch, full, sharded, train
from support.ranks import cpu_mesh, distributed

BF16 = WirePolicy(gathers=torch.bfloat16, reductions=torch.bfloat16)
INT8 = WirePolicy(gathers=Quantised(torch.int8, 16), reductions=Quantised(torch.int8, 16))
CPU = torch.device("cpu")

both = pytest.mark.parametrize("policy", [BF16, INT8], ids=["bf16", "int8"])


@pytest.mark.device(paces=True)
@distributed(2, 3)
def test_a_policy_without_arguments_changes_no_bit() -> None:
    (losses, params), (ours, other) = train(sharded()), train(sharded(wire_policy=WirePolicy()))
    assert losses == ours
    assert all(torch.equal(params[name], other[name]) for name in params)


@distributed(2, 3)
def test_a_pattern_that_matches_no_parameter_of_the_model_is_warned_of() -> None:
    """Of the whole model: a pattern may match nothing in most of its groups."""
    rules = {"blocks.0.*": torch.bfloat16, "block.1.*": torch.float16}
    policy = WirePolicy(exact=("*.wieght", "*.bias", "*router*"), gather_rules=rules)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(sharded(wire_policy=policy))
    (said,) = [str(each.message) for each in caught if "wire policy" in str(each.message)]
    assert said.startswith("the wire policy names '*.wieght', 'block.1.*', which matches no")


@pytest.mark.parametrize(
    ("exact", "wrong"),
    [
        (("*nrom*",), ["*nrom*"]),
        (("*nrom*", "*bias"), ["*nrom*"]),
        (("*router*",), ["*router*"]),
        (("*router*", "*norm*"), []),
        (("*norm*", "*bias", "blocks.1.norm_2.weight"), []),
        ((), []),
    ],
    ids=str,
)
def test_exact_may_list_what_this_model_has_not(exact: tuple[str, ...], wrong: list[str]) -> None:
    names = ["blocks.0.norm_1.weight", "blocks.0.norm_1.bias", "head.weight"]
    assert list(WirePolicy(exact=exact).unmatched(names)) == wrong


@both
@distributed(2)
def test_what_a_block_did_not_change_keeps_its_exact_value(policy: WirePolicy) -> None:
    net = sharded(wire_policy=policy)
    exact = {name: param.detach().clone() for name, param in Net().named_parameters()}
    with torch.no_grad(), unsharded(net, writeback=True):
        net.blocks[1][0].weight[3, 5] = 7.0
    exact["blocks.1.0.weight"][3, 5] = 7.0
    for name, param in net.named_parameters():
        assert torch.equal(full(param), exact[name])


@distributed(2)
def test_half_the_bytes_travel_but_of_what_is_exact() -> None:
    def sent(**options: Any) -> dict[EventKind, int]:
        net = sharded(**options)
        net(batch()).square().mean().backward()
        log = EventLog()
        with observe(log):
            net(batch()).square().mean().backward()
        kinds = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER)
        return {kind: sum(event.nbytes for event in log.of(kind)) for kind in kinds}

    plain, narrow = sent(), sent(wire_policy=BF16)
    half = sent(wire_policy=WirePolicy(gathers=torch.bfloat16, exact=("*.1.*",)))
    for kind, nbytes in plain.items():
        assert 0.5 <= narrow[kind] / nbytes < 0.53
    norms = 2 * 3 * (2 * 2 * WIDTH) * 4  # gathered twice
    assert half[EventKind.REDUCE_SCATTER] == plain[EventKind.REDUCE_SCATTER]
    assert half[EventKind.ALL_GATHER] >= narrow[EventKind.ALL_GATHER] + norms // 4


@pytest.mark.cross
@both
@pytest.mark.parametrize("reshard", [2, True])
@distributed(4)
def test_forward_and_backward_of_a_step_see_the_same_weights(
    policy: WirePolicy, reshard: bool | int
) -> None:
    net, seen = sharded(wire_policy=policy, reshard_after_forward=reshard), []
    linear = net.blocks[1][0]
    linear.register_forward_hook(lambda *_: seen.append(linear.weight.detach().clone()))
    linear.register_full_backward_hook(lambda *_: seen.append(linear.weight.detach().clone()))
    net(batch().requires_grad_()).square().mean().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


@pytest.mark.device(paces=True)
@both
@distributed(4)
def test_replicas_stay_equal_to_the_last_bit(policy: WirePolicy) -> None:
    mesh = cpu_mesh((2, 2), ("replicate", "shard"))
    net = sharded(mesh=mesh, wire_policy=policy)
    train(net)
    assert_replicas_equal(net, mesh)


@distributed(2)
def test_what_was_accumulated_without_communication_is_rounded_once() -> None:
    net, alone = sharded(wire_policy=WirePolicy(reductions=torch.bfloat16)), Net()
    net.set_requires_gradient_sync(False)
    for step in range(3):
        net.set_requires_gradient_sync(step == 2)
        net(batch(step)).square().mean().backward()
        alone(batch(step)).square().mean().backward()
    for name, param in alone.named_parameters():
        assert param.grad is not None
        wanted = param.grad.bfloat16().float()
        dist.all_reduce(wanted)
        grad = full(net.get_parameter(name).grad)
        torch.testing.assert_close(grad, wanted / 2, rtol=3e-7, atol=0)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    squares = [full(param.grad).square().sum() for param in net.parameters()]
    assert full(norm) > 1e-3
    torch.testing.assert_close(torch.stack(squares).sum().sqrt().item(), 1e-3, rtol=1e-3, atol=0)


@both
@distributed(2)
def test_a_parameter_that_no_rank_used_has_no_gradient_beside_small_ones(
    policy: WirePolicy,
) -> None:
    def run(model: Any, x: torch.Tensor) -> Any:
        return (model.one if dist.get_rank() else model.two)(x) * 1e-5

    torch.manual_seed(0)
    layers = {name: nn.Linear(8, 8) for name in ("one", "two", "none")}

    net: Any = fully_shard(Assembled(run, **layers), wire_policy=policy)
    net(torch.ones(2, 8)).mean().backward()
    assert net.none.weight.grad is None
    for layer in (net.one, net.two):
        assert 0 < full(layer.weight.grad).abs().max().item() < 1e-4


@distributed(2)
def test_ours_is_nearer_to_fp32_than_torchs_own_bf16() -> None:
    _, exact = train(sharded(), steps=8)
    _, ours = train(sharded(wire_policy=BF16), steps=8)
    torchs = TorchMixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    net: Any = Net()
    net.scale = nn.Parameter(net.scale.detach().view(1))  # torch shards no tensor without a dim
    for block in net.blocks:
        torch_fully_shard(block, mp_policy=torchs)
    _, theirs = train(torch_fully_shard(net, mp_policy=torchs), steps=8)

    def off(params: dict[str, torch.Tensor]) -> float:
        return sum((params[name].view(-1) - exact[name].view(-1)).norm().item() for name in exact)

    assert 0 < off(ours) < off(theirs)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"exact": ("blocks.1.0.weight",)}, r"blocks\.1\.0\.weight: .* sent as torch\."),
        ({"gathers": Quantised(torch.int8, 32)}, r"weight: .* sent as torch\.int8 in blocks of"),
        (
            {"reductions": Quantised(torch.int8, 16, feedback=ErrorFeedback())},
            r"weight: .* with error feedback in torch\.",
        ),
    ],
)
@distributed(2)
def test_ranks_that_disagree_are_told_the_parameter_on_every_rank(
    difference: dict[str, Any], message: str
) -> None:
    policy = dataclasses.replace(INT8, **difference) if dist.get_rank() else INT8
    with pytest.raises(RankMismatchError, match=message):
        sharded(wire_policy=policy)(batch())


@distributed(1)
def test_a_rank_by_itself_rounds_nothing() -> None:
    (losses, _), (ours, _) = train(sharded()), train(sharded(wire_policy=BF16))
    assert losses == ours


def test_the_first_rule_that_matches_counts_and_narrow_or_whole_numbers_stay() -> None:
    policy = WirePolicy(
        gathers=torch.bfloat16,
        exact=("*norm*",),
        gather_rules={"head.*": torch.float16, "router*": None},
        reduction_rules=[("head.*", torch.bfloat16)],
    )
    wide = TensorSpec(shape=(4,), dtype=torch.float32)

    def dtype(name: str, spec: TensorSpec = wide) -> torch.dtype:
        return policy.gathered_as(name, spec, 2, CPU).dtype

    assert dtype("body.weight") is torch.bfloat16
    assert dtype("head.weight") is torch.float16
    for exact in ("router.weight", "norm.weight", "head.norm.weight"):
        assert dtype(exact) is torch.float32
    assert policy.reduced_as("head.weight", wide, 2, CPU).dtype is torch.bfloat16
    assert policy.reduced_as("body.weight", wide, 2, CPU) is wide
    for stays in (torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        assert dtype("body.weight", TensorSpec(shape=(4,), dtype=stays)) is stays


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"gathers": torch.int8},
            ValueError,
            r"gathers is torch\.int8; .* Quantised\(torch\.int8\)",
        ),
        ({"gathers": Quantised(torch.int8, seed=1)}, ValueError, r"seed 1; leave the seed away"),
        ({"reductions": "bf16"}, TypeError, r"reductions is 'bf16'; pass torch\.bfloat16"),
        ({"exact": "*norm*"}, TypeError, r"exact is '\*norm\*'; pass a tuple of patterns"),
        ({"exact": ("",)}, ValueError, r"exact holds an empty pattern"),
        ({"gather_rules": 3}, TypeError, r"gather_rules is 3; pass a dict from patterns"),
        ({"gather_rules": [3]}, TypeError, r"gather_rules holds 3; pass patterns"),
        ({"reduction_rules": {"a": torch.int8}}, ValueError, r"reduction_rules\['a'\] is torch"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        WirePolicy(**arguments)

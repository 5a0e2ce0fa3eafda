"""A dtype per parameter inside one group: which rule counts, what ranks agree on, what comes out.

The definition of right is the same model with each parameter cast by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fullshard.comm import EventKind, EventLog, observe
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import RankMismatchError, fully_shard
from support.modules import Assembled
from support.ranks import cpu_mesh, distributed

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def _run(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = F.linear(x.to(model.up.weight.dtype), model.up.weight, model.up.bias)
    hidden = model.norm(hidden.to(model.norm.weight.dtype))
    down: torch.Tensor = model.down(hidden.to(model.down.weight.dtype))
    return down


def _block() -> nn.Module:
    """A norm that computes in its weight's dtype, between layers that compute in theirs."""
    return Assembled(_run, up=nn.Linear(6, 6), norm=nn.LayerNorm(6), down=nn.Linear(6, 5))


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(_block(), nn.Linear(5, 6), _block())


def _sharded(policy: MixedPrecisionPolicy, *units: int) -> nn.Sequential:
    model = _model()
    for unit in units:
        fully_shard(model[unit], mesh=cpu_mesh(), mp_policy=policy)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
    return model


# -- which rule counts ----------------------------------------------------------------------------


def test_the_first_rule_that_matches_counts_and_none_means_its_own() -> None:
    rules: dict[Any, torch.dtype | None] = {
        "*norm*": F32,
        "blocks.?.*": torch.float16,
        lambda name, dtype: dtype is F64: None,
    }
    policy = MixedPrecisionPolicy(
        BF16,
        F32,
        param_dtypes=rules,
        reduce_dtypes=[("*norm.weight", BF16), ("*norm*", None)],
    )
    expected = {
        ("blocks.0.norm.weight", F32): (F32, BF16),
        ("blocks.0.norm.bias", F32): (F32, F32),
        ("blocks.0.up.weight", F32): (torch.float16, F32),
        ("blocks.10.up.weight", F32): (BF16, F32),
        ("head.weight", F64): (F64, F32),
        ("head.weight", torch.int64): (torch.int64, torch.int64),
    }
    for (name, stored), (gathered, reduced) in expected.items():
        assert policy.gathered_dtype(name, stored) is gathered, name
        assert policy.reduced_dtype(name, stored) is reduced, name


def test_patterns_tell_capitals_apart_and_match_the_whole_name() -> None:
    policy = MixedPrecisionPolicy(BF16, param_dtypes={"Norm.*": F32, "norm": F32})
    assert policy.gathered_dtype("norm.weight", F32) is BF16
    assert policy.gathered_dtype("a.norm", F32) is BF16
    assert policy.gathered_dtype("Norm.weight", F32) is F32


def test_a_policy_with_rules_is_equal_by_value_hashable_and_does_not_follow_its_dict() -> None:
    rules: dict[Any, Any] = {"*norm*": F32}
    policy = MixedPrecisionPolicy(BF16, param_dtypes=rules)
    assert policy == MixedPrecisionPolicy(BF16, param_dtypes=[("*norm*", F32)])
    assert hash(policy) == hash(MixedPrecisionPolicy(BF16, param_dtypes=[("*norm*", F32)]))
    assert policy != MixedPrecisionPolicy(BF16)
    rules["*"] = torch.float16
    assert policy.gathered_dtype("up.weight", F32) is BF16


@pytest.mark.parametrize("field", ["param_dtypes", "reduce_dtypes"])
@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (F32, TypeError, "pass a dict from patterns"),
        ("*norm*", TypeError, "pass a dict from patterns"),
        (["*norm*"], TypeError, "pass pairs"),
        ({3: F32}, TypeError, "holds 3; pass a pattern"),
        ({"": F32}, ValueError, "empty pattern"),
        ({"*norm*": "float32"}, TypeError, r"\['\*norm\*'\] is 'float32'; pass a floating-point"),
        ({"*norm*": torch.int8}, TypeError, "floating-point"),
    ],
)
def test_what_is_no_rule_is_an_error_that_names_the_field(
    field: str, wrong: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=rf"^{field}.*{said}"):
        MixedPrecisionPolicy(**{field: wrong})


# -- what ranks do with it ------------------------------------------------------------------------

NORMS = {"*norm*": F32}


def _dtypes_inside(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of the parameters that the model computes with."""
    model.unshard()  # type: ignore[operator]  # a sharded module has it
    found = {name: param.dtype for name, param in model.named_parameters()}
    model.reshard()  # type: ignore[operator]  # the same
    return found


@distributed(2)
def test_full_names_begin_at_the_root() -> None:
    policy = MixedPrecisionPolicy(BF16, param_dtypes={"2.norm.*": F32, "norm.*": torch.float16})
    model = _sharded(policy, 0, 2)
    model(torch.ones(2, 6))
    for unit, expected in ((0, BF16), (2, F32)):
        found = _dtypes_inside(model[unit])
        assert found["norm.weight"] is found["norm.bias"] is expected
        assert found["up.weight"] is BF16


def _by_hand(rank: int, world_size: int) -> tuple[torch.Tensor, nn.Module]:
    """The mean over the ranks' gradients, each from a model cast parameter by parameter."""
    whole = _model()
    total: dict[str, torch.Tensor] = {}
    mine = torch.tensor(0.0)
    for each in range(world_size):
        cast = _model()
        for name, param in cast.named_parameters():
            param.data = param.data.to(F32 if "norm" in name else BF16)
        loss = cast(_inputs(each)).float().square().mean()
        loss.backward()
        mine = loss.detach() if each == rank else mine
        for name, param in cast.named_parameters():
            assert param.grad is not None
            total[name] = total.get(name, torch.tensor(0.0)) + param.grad.float()
    for name, param in whole.named_parameters():
        param.grad = total[name] / world_size
    return mine, whole


def _inputs(rank: int) -> torch.Tensor:
    # 0.5, 1, ...: exact in bf16, so that casting the inputs once or twice is the same
    return torch.randint(-4, 4, (4, 6), generator=torch.Generator().manual_seed(rank)) / 2


@pytest.mark.parametrize("units", [(), (0, 2)])
@distributed(2)
def test_losses_and_gradients_are_those_of_casting_by_hand(
    units: tuple[int, ...], world_size: int
) -> None:
    policy = MixedPrecisionPolicy(BF16, F32, param_dtypes=NORMS)
    model = _sharded(policy, *units)
    loss = model(_inputs(dist.get_rank())).float().square().mean()
    loss.backward()
    expected, whole = _by_hand(dist.get_rank(), world_size)
    assert torch.equal(loss.detach(), expected)
    for (name, param), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        grad: Any = param.grad
        expected_grad: Any = other.grad
        assert grad.dtype is F32
        assert torch.equal(grad.full_tensor(), expected_grad), name


@distributed(2)
def test_a_mixed_group_gathers_once_and_reduces_once_per_reduce_dtype() -> None:
    policy = MixedPrecisionPolicy(BF16, None, param_dtypes=NORMS)
    model = _sharded(policy)
    model(_inputs(0)).float().square().mean().backward()  # plans
    log = EventLog()
    with observe(log):
        model(_inputs(0)).float().square().mean().backward()
    assert log.kinds().count(EventKind.ALL_GATHER) == 1
    assert log.kinds().count(EventKind.REDUCE_SCATTER) == 2


@distributed(2)
def test_a_reduce_rule_rounds_the_gradients_of_its_parameters_only() -> None:
    coarse = MixedPrecisionPolicy(reduce_dtypes={"*up*": BF16})
    models = [_sharded(coarse), _sharded(MixedPrecisionPolicy())]
    for model in models:
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(5))).sum().backward()
    for (name, param), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        grad: Any = param.grad
        fine: Any = other.grad
        local, exact = grad.to_local(), fine.to_local()
        if "up" not in name:
            assert torch.equal(local, exact), name
            continue
        assert torch.equal(local, local.to(BF16).float()), name
        assert torch.allclose(local, exact, rtol=2**-6, atol=1e-6), name


@distributed(2)
def test_ranks_whose_rules_differ_all_raise_and_name_the_parameter() -> None:
    mine = F32 if dist.get_rank() == 0 else BF16
    model = _sharded(MixedPrecisionPolicy(BF16, F32, param_dtypes={"2.norm.weight": mine}))
    with pytest.raises(RankMismatchError, match=r"2\.norm\.weight: .*gathered in torch\."):
        model(_inputs(0))


@distributed(2)
def test_a_module_that_ran_by_itself_takes_its_new_name_into_account() -> None:
    policy = MixedPrecisionPolicy(BF16, param_dtypes={"2.norm.*": F32})
    model = _model()
    block = fully_shard(model[2], mesh=cpu_mesh(), mp_policy=policy)
    block(torch.ones(2, 6))  # its own root: norm.weight
    fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
    model(torch.ones(2, 6))
    assert _dtypes_inside(block)["norm.weight"] is F32
    assert _dtypes_inside(block)["up.weight"] is BF16

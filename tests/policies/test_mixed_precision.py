"""Mixed precision: torch's fields and defaults, what is cast, and what never is."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from support.modules import Assembled
from support.ranks import distributed
from support.surface.model import WIDTH, batch, build, sharded

BF16 = torch.bfloat16


def test_the_fields_their_order_and_their_defaults_are_torchs_and_ours_are_keywords() -> None:
    ours, theirs = (
        [
            (field.name, field.default, field.kw_only, field.init, field.compare)
            for field in dataclasses.fields(policy)
            if field.name != "param_dtype_override_fn"  # of torch 2.15; docs/features.md names it
        ]
        for policy in (MixedPrecisionPolicy, torch_fsdp.MixedPrecisionPolicy)
    )
    assert ours[: len(theirs)] == theirs
    assert ours[len(theirs) :] == [
        ("param_dtypes", (), True, True, True),
        ("reduce_dtypes", (), True, True, True),
    ]


def test_the_policy_is_frozen_and_equal_by_value_as_torchs_is() -> None:
    for kind in (MixedPrecisionPolicy, torch_fsdp.MixedPrecisionPolicy):
        policy: Any = kind(BF16)
        assert policy == kind(param_dtype=BF16)
        assert hash(policy) == hash(kind(param_dtype=BF16))
        with pytest.raises(dataclasses.FrozenInstanceError):
            policy.param_dtype = None


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", torch.int8, torch.float32.itemsize, True])
def test_what_is_no_floating_point_dtype_is_an_error_that_names_the_field(
    field: str, value: Any
) -> None:
    with pytest.raises(TypeError, match=rf"^{field} is .*floating-point"):
        MixedPrecisionPolicy(**{field: value})


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_a_flag_that_is_no_bool_is_an_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^cast_forward_inputs is .*True or False"):
        MixedPrecisionPolicy(cast_forward_inputs=value)


@pytest.mark.parametrize(
    ("param", "reduce", "stored", "gathered", "reduced"),
    [
        (None, None, torch.float32, torch.float32, torch.float32),
        (BF16, None, torch.float32, BF16, BF16),
        (BF16, torch.float32, torch.float32, BF16, torch.float32),
        (None, BF16, torch.float32, torch.float32, BF16),
        (BF16, torch.float32, torch.int64, torch.int64, torch.int64),
    ],
)
def test_what_is_gathered_and_reduced(
    param: torch.dtype | None,
    reduce: torch.dtype | None,
    stored: torch.dtype,
    gathered: torch.dtype,
    reduced: torch.dtype,
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    assert policy.gathered_dtype("w", stored) is gathered
    assert policy.reduced_dtype("w", stored) is reduced


# -- inputs and outputs ---------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    note: str


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    length: int = 3


def _take(model: Any, x: torch.Tensor, *rest: Any, **named: Any) -> dict[str, Any]:
    model.came = {"x": x, "rest": rest, **named}
    return {"y": model.linear(x.to(model.linear.weight.dtype)), "rows": torch.arange(2)}


def _takes() -> Any:
    """Notes the dtypes of all that it is given."""
    return Assembled(_take, linear=nn.Linear(WIDTH, WIDTH))


def _call(model: Any) -> dict[str, Any]:
    x = torch.ones(2, WIDTH)
    result: dict[str, Any] = model(
        x,
        (x, [x, "text"]),
        Pair(x, "pair"),
        mask=torch.ones(2, dtype=torch.bool),
        tokens=torch.arange(2),
        half=x.half(),
        record=Record(x),
        nested={"a": {"b": x}, "n": None},
    )
    return result


@distributed(2)
def test_floating_point_inputs_are_cast_however_nested_and_no_others() -> None:
    net: Any = fully_shard(_takes(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    _call(net)
    came = net.came
    (pair_of, listed), named = came["rest"][0], came["rest"][1]
    assert came["x"].dtype is BF16
    assert pair_of.dtype is BF16
    assert listed[0].dtype is BF16
    assert listed[1] == "text"
    assert type(named) is Pair
    assert named.x.dtype is BF16
    assert named.note == "pair"
    assert type(came["record"]) is Record
    assert came["record"].x.dtype is BF16
    assert came["record"].length == 3
    assert came["half"].dtype is BF16
    assert came["nested"]["a"]["b"].dtype is BF16
    assert came["nested"]["n"] is None
    assert came["mask"].dtype is torch.bool
    assert came["tokens"].dtype is torch.int64


@distributed(2)
def test_casting_leaves_the_callers_own_containers_alone() -> None:
    net: Any = fully_shard(_takes(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    x = torch.ones(2, WIDTH)
    listed, record = [x], Record(x)
    net(x, listed, record)
    assert listed[0] is x
    assert record.x is x


@distributed(2)
def test_inputs_are_left_alone_where_the_policy_says_so() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    net: Any = fully_shard(_takes(), mp_policy=policy)
    _call(net)
    assert net.came["x"].dtype is torch.float32
    assert net.came["record"].x.dtype is torch.float32


@distributed(2)
def test_inputs_are_left_alone_without_a_param_dtype() -> None:
    net: Any = fully_shard(_takes(), mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    _call(net)
    assert net.came["x"].dtype is torch.float32
    assert net.came["half"].dtype is torch.float16


@pytest.mark.parametrize(
    ("output_dtype", "expected"), [(None, BF16), (torch.float32, torch.float32)]
)
@distributed(2)
def test_outputs_are_cast_to_the_output_dtype_and_integers_never(
    output_dtype: torch.dtype | None, expected: torch.dtype
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=output_dtype)
    net: Any = fully_shard(_takes(), mp_policy=policy)
    output = _call(net)
    assert output["y"].dtype is expected
    assert output["rows"].dtype is torch.int64


@distributed(2)
def test_the_module_computes_with_parameters_in_the_param_dtype() -> None:
    seen: dict[str, torch.dtype] = {}

    def note(module: nn.Linear, args: Any) -> None:
        seen.update({name: param.dtype for name, param in module.named_parameters()})

    net = build()
    net.head.register_forward_pre_hook(note)
    sharded(net, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    net(batch())
    assert seen == {"weight": BF16, "bias": BF16}
    assert net.head.weight.dtype is torch.float32


@distributed(2)
def test_each_module_follows_its_own_policy_and_gradients_reach_the_inputs_in_their_dtype() -> None:
    net = build()
    fully_shard(net.blocks[0], mp_policy=MixedPrecisionPolicy(BF16, output_dtype=torch.float32))
    fully_shard(net)
    x = batch().requires_grad_()
    output = net(x)
    assert output.dtype is torch.float32
    output.sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32
    for param in net.parameters():
        assert param.grad is not None and param.grad.dtype is torch.float32


@distributed(2)
def test_the_values_are_those_of_the_parts_applied_by_hand() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, 3)
    reference = nn.Linear(WIDTH, 3)
    reference.load_state_dict(linear.state_dict())
    policy = MixedPrecisionPolicy(BF16, torch.float32, torch.float32)
    fully_shard(linear, mp_policy=policy)
    output = linear(batch())
    half = reference.bfloat16()
    expected = half(batch().bfloat16()).float()
    assert torch.equal(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    grad: Any = linear.weight.grad
    assert half.weight.grad is not None
    assert torch.equal(grad.full_tensor(), half.weight.grad.float())

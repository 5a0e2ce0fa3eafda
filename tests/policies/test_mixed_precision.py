"""Mixed precision: torch's fields and defaults, what is cast, and what never is."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard, map_tensors
from support.modules import Assembled
from support.ranks import distributed
from support.surface.model import WIDTH, batch, build, sharded

BF16 = torch.bfloat16


def test_the_fields_their_order_and_their_defaults_are_torchs_and_ours_are_keywords() -> None:
    ours, theirs = (
        [
            (field.name, field.default, field.kw_only, field.init, field.compare)
            for field in dataclasses.fields(policy)
        ]
        for policy in (MixedPrecisionPolicy, torch_fsdp.MixedPrecisionPolicy)
    )
    override = ("param_dtype_override_fn", None, True, True, True)  # torch has it since 2.15
    assert ours[: len(theirs)] == theirs
    assert [each for each in ours[4:] if each != override] == [
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


NO_DTYPES = ["bfloat16", torch.int8, torch.float32.itemsize, True]


@pytest.mark.parametrize(
    ("field", "values", "wanted"),
    [
        ("param_dtype", NO_DTYPES, "floating-point"),
        ("reduce_dtype", NO_DTYPES, "floating-point"),
        ("output_dtype", NO_DTYPES, "floating-point"),
        ("cast_forward_inputs", [None, 1, "yes"], "True or False"),
        ("param_dtype_override_fn", [BF16, "bfloat16", 1], "function"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(
    field: str, values: list[Any], wanted: str
) -> None:
    for value in values:
        with pytest.raises(TypeError, match=rf"^{field} is .*{wanted}"):
            MixedPrecisionPolicy(**{field: value})


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


# -- a dtype for each parameter -------------------------------------------------------------------


def _keeps_norms(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.ndim == 1 else None


def _run_normed(model: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = model.norm(x.to(model.norm.weight.dtype)).to(model.linear.weight.dtype)
    out: torch.Tensor = model.linear(hidden)
    return out


def _normed() -> Any:
    torch.manual_seed(0)
    return Assembled(
        _run_normed, norm=nn.LayerNorm(WIDTH), linear=nn.Linear(WIDTH, WIDTH, bias=False)
    )


@pytest.mark.parametrize("reduce", [None, torch.float32, BF16])
@distributed(2)
def test_a_function_keeps_the_dtype_of_single_parameters(reduce: torch.dtype | None) -> None:
    """Right is the module with its linear in bf16 by hand; a reduction follows the computation."""
    asked: list[nn.Parameter] = []

    def choose(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param)
        return _keeps_norms(param)

    net, reference = _normed(), _normed()
    given = list(net.parameters())
    policy = MixedPrecisionPolicy(BF16, reduce, param_dtype_override_fn=choose)
    fully_shard(net, mp_policy=policy)
    assert len(asked) == 3 and all(one is other for one, other in zip(asked, given, strict=True))
    state = net._fullshard_state
    params = state.own_groups[0].params
    reference.linear.to(BF16)
    for _ in range(2):
        assert torch.equal(net(batch()), reference(batch().bfloat16()))
    assert len(asked) == 3
    assert [p.gather_spec.dtype for p in params] == [torch.float32, torch.float32, BF16]
    assert [p.reduce_dtype for p in params] == [reduce or p.gather_spec.dtype for p in params]
    net(batch()).float().square().sum().backward()
    reference(batch().bfloat16()).float().square().sum().backward()
    for param, whole in zip(net.parameters(), reference.parameters(), strict=True):
        rounded = whole.grad.to(reduce or whole.grad.dtype)  # both ranks have the same batch
        assert torch.equal(param.grad.full_tensor(), rounded.to(torch.float32))


@distributed(2)
def test_the_function_may_answer_the_param_dtype() -> None:
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda param: BF16)
    assert fully_shard(nn.Linear(WIDTH, 3), mp_policy=policy)(batch()).dtype is BF16


@distributed(2)
def test_a_rule_by_name_comes_before_the_function() -> None:
    policy = MixedPrecisionPolicy(
        BF16, param_dtypes={"bias": BF16}, param_dtype_override_fn=lambda param: param.dtype
    )
    linear: Any = nn.Linear(WIDTH, 3)
    fully_shard(linear, mp_policy=policy)
    linear.unshard()
    assert (linear.weight.dtype, linear.bias.dtype) == (torch.float32, BF16)


@pytest.mark.parametrize("answer", [torch.float16, torch.int32, "bfloat16", 16])
@distributed(2)
def test_another_answer_of_the_function_is_an_error_before_anything_changed(answer: Any) -> None:
    linear = nn.Linear(WIDTH, 3)
    weight = linear.weight
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda param: answer)
    with pytest.raises(ValueError, match=r"_override_fn returned .*float32.*bfloat16") as caught:
        fully_shard(linear, mp_policy=policy)
    assert "weight" in "".join(caught.value.__notes__)
    assert type(linear) is nn.Linear and linear.weight is weight


@pytest.mark.skipif(
    not hasattr(torch_fsdp.MixedPrecisionPolicy(), "param_dtype_override_fn"),
    reason="torch's own has no param_dtype_override_fn before 2.15",
)
@distributed(2)
def test_torchs_own_computes_in_the_same_dtypes() -> None:
    results = []
    pairs: list[tuple[Any, Any]] = [
        (fully_shard, MixedPrecisionPolicy),
        (torch_fsdp.fully_shard, torch_fsdp.MixedPrecisionPolicy),
        (fully_shard, torch_fsdp.MixedPrecisionPolicy),
    ]
    for shard, policy in pairs:
        net = _normed()
        made = policy(BF16, torch.float32, param_dtype_override_fn=_keeps_norms)
        shard(net, mp_policy=made)
        out = net(batch())
        out.float().square().sum().backward()
        results.append([out, *(param.grad.full_tensor() for param in net.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# -- inputs and outputs ---------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    note: str


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    length: int = 3


def _take(model: Any, x: torch.Tensor, *rest: Any, **named: Any) -> dict[str, Any]:
    came = {"x": x, "rest": rest, **named}
    model.came = map_tensors(torch.clone, came)  # as they are while forward runs
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
    nested, record = came["nested"]["a"]["b"], came["record"]
    for cast in (came["x"], pair_of, listed[0], named.x, record.x, came["half"], nested):
        assert cast.dtype is BF16
    assert (type(named), named.note, listed[1]) == (Pair, "pair", "text")
    assert (type(record), record.length, came["nested"]["n"]) == (Record, 3, None)
    assert (came["mask"].dtype, came["tokens"].dtype) == (torch.bool, torch.int64)


@pytest.mark.parametrize(
    "policy",
    [
        MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False),
        MixedPrecisionPolicy(reduce_dtype=BF16),
    ],
)
@distributed(2)
def test_inputs_are_left_alone_where_the_policy_says_so(policy: MixedPrecisionPolicy) -> None:
    net: Any = fully_shard(_takes(), mp_policy=policy)
    _call(net)
    assert net.came["x"].dtype is net.came["record"].x.dtype is torch.float32
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

"""The protocols of sharding: ``require``, the identity answers, an offload policy of a user's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fullshard.policies import MixedPrecisionPolicy, OffloadPolicy
from fullshard.sharding import (
    FixedReshard,
    FullPrecision,
    NoOffload,
    Offload,
    PrecisionPolicy,
    PrefetchPolicy,
    ReshardPolicy,
    ReverseOrderPrefetch,
    require,
)

MEMBERS = {
    PrecisionPolicy: {
        "for_parameter",
        "gathered_dtype",
        "reduced_dtype",
        "cast_input",
        "cast_output",
    },
    Offload: {
        "home",
        "store",
        "stage_in",
        "stage_out",
        "accumulate",
        "stage_step",
        "arrived",
    },
    ReshardPolicy: {"after_forward", "after_backward"},
    PrefetchPolicy: {"in_forward", "in_backward"},
}


class _Partial:
    """Has the methods named at construction and no other."""

    def __init__(self, *names: str) -> None:
        for name in names:
            setattr(self, name, lambda *args: None)


@pytest.mark.parametrize("protocol", MEMBERS, ids=lambda protocol: protocol.__name__)
def test_require_returns_the_very_object_that_has_every_member(protocol: type[Any]) -> None:
    policy = _Partial(*MEMBERS[protocol])
    assert require(protocol, policy, "policy") is policy


@pytest.mark.parametrize(
    ("protocol", "missing"),
    [(protocol, name) for protocol, names in MEMBERS.items() for name in sorted(names)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_require_names_the_one_member_that_is_missing(protocol: type[Any], missing: str) -> None:
    others = MEMBERS[protocol] - {missing}
    with pytest.raises(TypeError) as caught:
        require(protocol, _Partial(*others), "my_argument")
    message = str(caught.value)
    assert "my_argument is a _Partial, which lacks " + missing + ";" in message
    assert protocol.__name__ in message
    with pytest.raises(TypeError, match=missing):
        require(protocol, object(), "my_argument")  # lacks all


def test_require_takes_a_member_that_is_no_method_for_missing() -> None:
    policy = _Partial("after_forward")
    policy.after_backward = True  # type: ignore[attr-defined]  # the point
    with pytest.raises(TypeError, match="lacks after_backward;"):
        require(ReshardPolicy, policy, "reshard_after_forward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_identity_precision_changes_nothing(dtype: torch.dtype) -> None:
    policy = FullPrecision()
    assert policy.gathered_dtype("w", dtype) is dtype
    assert policy.reduced_dtype("w", dtype) is dtype
    tensor = torch.ones(1, dtype=dtype)
    assert policy.cast_input(tensor) is tensor
    output = (tensor,)
    assert policy.cast_output(output) is output


@pytest.mark.parametrize("policy", [NoOffload(), OffloadPolicy()], ids=["ours", "torch's name"])
def test_the_identity_offload_changes_nothing(policy: Offload) -> None:
    device = torch.device("cpu")
    tensor = torch.ones(2)
    assert policy.home(device) is device
    assert policy.store(tensor) is tensor
    assert policy.stage_in(tensor, device) is tensor
    assert policy.stage_out(tensor) is tensor
    assert policy.stage_step(tensor, device) is tensor


@pytest.mark.parametrize(
    ("forward", "of_root", "of_others"),
    [(True, True, True), (False, False, False), (None, False, True)],
)
def test_fixed_reshard_answers_what_the_argument_means_in_torch(
    forward: bool | None, of_root: bool, of_others: bool
) -> None:
    policy = FixedReshard(forward=forward)
    assert policy.after_forward(True) is of_root
    assert policy.after_forward(False) is of_others
    assert policy.after_backward(True) is policy.after_backward(False) is True
    assert FixedReshard(backward=False).after_backward(True) is False


def test_reverse_order_prefetch_asks_for_the_module_before_and_nothing_in_forward() -> None:
    policy, order = ReverseOrderPrefetch(), ("a", "b", "c")
    assert [tuple(policy.in_backward(order, i)) for i in range(3)] == [(), (0,), (1,)]
    assert [tuple(policy.in_forward(order, i)) for i in range(3)] == [(), (), ()]


@pytest.mark.parametrize("kind", [FixedReshard, FullPrecision, NoOffload, ReverseOrderPrefetch])
def test_the_default_policies_are_frozen_and_equal_by_value(kind: type[Any]) -> None:
    assert kind() == kind()
    assert hash(kind()) == hash(kind())
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().anything = 1


# -- offload --------------------------------------------------------------------------------------


def test_a_precision_that_casts_nothing_says_so_unless_a_subclass_answers_for_itself() -> None:
    class Own(MixedPrecisionPolicy):
        def cast_output(self, output: Any) -> Any:
            return output

    assert FullPrecision().casts_nothing and MixedPrecisionPolicy().casts_nothing
    assert MixedPrecisionPolicy(reduce_dtype=torch.float32).casts_nothing
    for policy in (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(output_dtype=torch.bfloat16),
        Own(),
    ):
        assert not policy.casts_nothing

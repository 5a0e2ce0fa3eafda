"""``clip_grad_norm_`` and ``grad_norm``: the unsharded model's norm, by one all-reduce."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fullshard.comm import EventKind, EventLog, observe
from fullshard.optim import clip_grad_norm_, grad_norm
from fullshard.samehost import set_shared_memory
from fullshard.sharding import fully_shard
from support.parity.compare import EXACT, assert_equal, full, gradients_of, rounding
from support.parity.engines import shard, tell
from support.parity.models import CASES, Case, build
from support.parity.reference import my_rows, rows_of
from support.ranks import distributed
from support.surface.errors import says
from support.surface.ranks import everyone


def after_backward(
    name: str, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A sharded model and the unsharded one, with the gradients of the whole batch."""
    case = CASES[name]
    model, whole = shard(case, dtype=dtype, **options), build(case, dtype)
    backward(case, model, dtype, my_rows())
    backward(case, whole, dtype, slice(None))
    return model, whole


def backward(case: Case, model: nn.Module, dtype: torch.dtype, rows: slice) -> None:
    """One backward on these rows of batch 0."""
    inputs, targets = rows_of(case.batch(0, dtype), rows)
    case.loss(model(inputs), targets).backward()


def collectives(mode: CommDebugMode) -> dict[str, int]:
    return {str(kind).split(".")[-1]: n for kind, n in mode.get_comm_counts().items() if n}


NORMS = [
    ("empty", 2.0),
    ("uneven", 0.5),
    ("lora", 1.0),
    ("tied-across-groups", 2.0),
    ("tied-across-groups", 3.0),
    ("tied-across-groups", math.inf),
]
EMPTY = ("empty", math.inf)  # where torch's own raises: an empty shard has no largest element


@pytest.mark.cross
@pytest.mark.parametrize(
    ("torchs", "name", "order"),
    [(torchs, *norm) for torchs in (False, True) for norm in [*NORMS, EMPTY][: 7 - torchs]],
)
@distributed(2, 4, matrix=[4])
def test_norm_and_clipped_gradients_equal_the_unsharded(
    torchs: bool, name: str, order: float, world_size: int
) -> None:
    clip = torch.nn.utils.clip_grad_norm_ if torchs else clip_grad_norm_
    model, whole = after_backward(name)
    counted = [param for param in whole.parameters() if param.numel() > 0]
    allowed = rounding(world_size, steps=5)
    # limits that leave gradients alone, and those that do not
    for limit, foreach in ((1e6, None), (0.05, True), (0.02, False), (0.01, None)):
        got = full(clip(model.parameters(), limit, order, foreach=foreach))
        want = torch.nn.utils.clip_grad_norm_(counted, limit, order)
        assert want > 0.005
        assert_equal({"norm": got}, {"norm": want}, allowed, "norm")
        assert_equal(gradients_of(model), gradients_of(whole), allowed, "gradients")


@pytest.mark.parametrize("order", [2.0, math.inf])
@distributed(2)
def test_it_is_one_all_reduce_and_a_plain_tensor_that_is_equal_on_all_ranks(order: float) -> None:
    model, _ = after_backward("transformer", torch.float32)
    log = EventLog()
    for shared in (False, True):  # through the process group, and through the ranks' own memory
        set_shared_memory(shared)
        try:
            with CommDebugMode() as mode, observe(log):
                norm = clip_grad_norm_(model, 0.1, order)
        finally:
            set_shared_memory(True)
        assert collectives(mode) == ({} if shared else {"allreduce_": 1})
    assert [event.kind for event in log.events] == [EventKind.ALL_REDUCE] * 2
    assert type(norm) is torch.Tensor
    assert norm.shape == () and norm.dtype is torch.float32
    assert all(torch.equal(each, norm) for each in everyone(norm))


@distributed(2)
def test_nothing_reads_a_value_back_to_the_host() -> None:
    model, _ = after_backward("uneven")
    asked = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            if name in ("item", "__bool__", "__float__", "tolist", "cpu", "nonzero"):
                asked.append(name)
            return func(*args, **(kwargs or {}))

    with Watch():
        clip_grad_norm_(model, 0.1)
        clip_grad_norm_(model, 0.1, math.inf)
        assert asked == []
        clip_grad_norm_(model, 0.1, error_if_nonfinite=True)
    assert "tolist" in asked


@distributed(2)
def test_a_module_its_parameters_and_a_norm_without_clipping_agree() -> None:
    model, whole = after_backward("uneven")
    before = gradients_of(model)
    norms = [
        grad_norm(model),
        grad_norm(model.parameters()),
        grad_norm([*model.parameters(), *model.parameters()]),
        clip_grad_norm_(model, 1e6),
    ]
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    assert_equal(gradients_of(model), before, rounding(2), "gradients are left alone")
    one = model.get_parameter("first.weight")
    want = whole.get_parameter("first.weight").grad
    assert want is not None
    torch.testing.assert_close(grad_norm(one), want.norm())


@distributed(2)
def test_parameters_left_unsharded_after_backward_stand_for_their_shards() -> None:
    case = CASES["uneven"]
    model, whole = shard(case, dtype=torch.float64), build(case, torch.float64)
    tell(model, "set_reshard_after_backward", False)
    backward(case, model, torch.float64, my_rows())
    backward(case, whole, torch.float64, slice(None))
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    got = clip_grad_norm_(model.parameters(), 0.02)
    want = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.02)
    torch.testing.assert_close(got, want)
    for module in model.modules():
        tell(module, "reshard")
    assert_equal(gradients_of(model), gradients_of(whole), rounding(2, steps=5), "gradients")


@pytest.mark.parametrize("order", [2.0, math.inf])
@distributed(2)
def test_without_any_gradient_or_parameter_the_norm_is_zero(order: float) -> None:
    model = shard(CASES["uneven"])
    assert clip_grad_norm_(model, 1.0, order).item() == 0
    assert clip_grad_norm_([], 1.0, order).item() == 0
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("order", [2.0, math.inf])
@distributed(2)
def test_a_norm_that_is_not_finite_on_one_rank_is_so_on_all(order: float, bad: float) -> None:
    model, _ = after_backward("uneven", torch.float32)
    weight = model.get_parameter("first.weight")
    assert isinstance(weight.grad, DTensor)
    if dist.get_rank() == 1:
        weight.grad.to_local()[0, 0] = bad
    before = gradients_of(model)
    with pytest.raises(RuntimeError, match=says("norm of order", "error_if_nonfinite=False")):
        clip_grad_norm_(model, 1.0, order, error_if_nonfinite=True)
    after = gradients_of(model)
    of_another = {"last.weight": before["last.weight"]}
    assert_equal({"last.weight": after["last.weight"]}, of_another, EXACT, "nothing was scaled")
    norm = clip_grad_norm_(model, 1.0, order)
    assert norm.isnan() if math.isnan(bad) else norm.isinf()


@distributed(2)
def test_gradients_of_16_bits_are_added_in_more() -> None:
    model = fully_shard(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    weight = model.weight
    assert isinstance(weight, DTensor)
    generator = torch.Generator().manual_seed(5)
    full = torch.randn(64, 64, generator=generator).to(torch.bfloat16)
    local = full.chunk(2)[dist.get_rank()].clone()
    weight.grad = DTensor.from_local(local, weight.device_mesh, weight.placements)
    norm = grad_norm(model)
    assert norm.dtype is torch.float32
    torch.testing.assert_close(norm, full.double().norm().float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("limit", [-1.0, -math.inf, math.nan])
@distributed(2)
def test_a_limit_that_would_turn_gradients_round_is_refused_and_they_stay(limit: float) -> None:
    model, _ = after_backward("uneven")
    before = gradients_of(model)
    log = EventLog()
    with observe(log), pytest.raises(ValueError, match=says("max_norm", "0 or more")):
        clip_grad_norm_(model, limit)
    assert not log.kinds()
    assert_equal(gradients_of(model), before, EXACT, "gradients")


@pytest.mark.parametrize("limit", [0, 0.05, math.inf, torch.tensor(0.05)])
@pytest.mark.parametrize("order", [2, "inf"])
@distributed(2)
def test_limits_and_orders_of_any_kind_of_number_clip_as_torchs_own(limit: Any, order: Any) -> None:
    model, whole = after_backward("uneven")
    got = clip_grad_norm_(model, limit, order)
    want = torch.nn.utils.clip_grad_norm_(whole.parameters(), limit, float(order))
    assert_equal({"norm": got}, {"norm": want}, rounding(2, steps=5), "norm")
    assert_equal(gradients_of(model), gradients_of(whole), rounding(2, steps=5), "gradients")


@distributed(2)
def test_an_order_that_is_no_norm_and_things_that_are_no_tensors_are_refused() -> None:
    model = shard(CASES["uneven"])
    for order in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match=says("norm_type", "above 0")):
            clip_grad_norm_(model, 1.0, order)
    for name in ("max_norm", "norm_type"):
        for value in ("1", None, True, [1.0]):
            with pytest.raises(TypeError, match=says(f"{name} is {value!r}", "pass a number")):
                arguments: dict[str, Any] = {"max_norm": 1.0, name: value}
                clip_grad_norm_(model, **arguments)
    with pytest.raises(TypeError, match=says("str", "parameters()")):
        clip_grad_norm_(["weight"], 1.0)  # type: ignore[list-item]  # what is tested
    outside, _ = (dist.new_group([rank]) for rank in range(2))  # as many groups on each rank
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=says("lacks ranks [1]")):
            clip_grad_norm_(model, 1.0, process_group=outside)

"""Offload in every combination trains as the unsharded model, and as torch's own where it has it.

Without an accelerator everything is on the CPU, so these show that nothing else changes;
``tests/gpu/test_offload.py`` shows where things are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed import fsdp as torch_fsdp

from fullshard.policies import CPUOffloadPolicy
from fullshard.sharding import NoOffload, fully_shard
from support.apart import private_memory
from support.parity.compare import EXACT, assert_equal, rounding
from support.parity.engines import TORCH, shard, tell
from support.parity.models import CASES, build
from support.parity.reference import Pair, compare, my_rows, rows_of, train, whole_batch
from support.products import few
from support.ranks import cpu_mesh, distributed

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


@pytest.mark.cross
@pytest.mark.parametrize("parameters", [True, False])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("name", ["uneven", "tied-across-groups", "lora"])
@distributed(2)
def test_every_combination_trains_as_the_unsharded_model(
    name: str, state: bool, parameters: bool, world_size: int
) -> None:
    case, dtype = CASES[name], torch.float64
    policy = CPUOffloadPolicy(parameters=parameters, optimizer_state=state)
    model = shard(case, dtype=dtype, offload_policy=policy)
    found = train(model, case, my_rows(), steps=3, dtype=dtype)
    expected = train(build(case, dtype), case, whole_batch, steps=3, dtype=dtype)
    compare(found, expected, rounding(world_size))


@pytest.mark.device(paces=True)
@pytest.mark.cross
@pytest.mark.parametrize("memory", [nullcontext, private_memory])
@pytest.mark.parametrize("reshard", few([True, False, None], True, False))
@distributed(2)
def test_torchs_policy_gives_what_it_gives_under_torchs_own(
    reshard: bool | None, memory: Any
) -> None:
    case = CASES["transformer"]
    ours = shard(case, offload_policy=CPUOffloadPolicy(), reshard_after_forward=reshard)
    theirs = shard(
        case,
        TORCH,
        offload_policy=torch_fsdp.CPUOffloadPolicy(pin_memory=False),  # pins without a device
        reshard_after_forward=reshard,
    )
    with memory():
        runs = [train(model, case, my_rows(), steps=3) for model in (ours, theirs)]
    compare(runs[0], runs[1], EXACT, average=False, grow=False)


@dataclass(frozen=True, kw_only=True)
class Recorded(NoOffload):
    """Copies each way on this device, as an accelerator would, and notes what it did.

    A gradient is wrong until ``arrived`` was called, as one that is still on its way is.

    Attributes:
        done: what was asked, in order.
        stored: where the shards are that it stored.
        homes: for which devices it was asked where parameters live.
    """

    done: list[str] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    homes: list[torch.device] = field(default_factory=list)
    travelling: list[Callable[[], object]] = field(default_factory=list)

    def home(self, device: torch.device) -> torch.device:
        self.homes.append(device)
        return device

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        if shard.is_meta or shard.data_ptr() in self.stored:
            return shard
        stored = shard.clone()
        self.stored.append(stored.data_ptr())
        return stored

    def stage_in(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert shard.numel() == 0 or shard.data_ptr() in self.stored, "not where the policy put it"
        self.done.append("in")
        return shard.clone()

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        self.done.append("out")
        home = torch.full_like(gradient, float("nan"))
        self.travelling.append(lambda: home.copy_(gradient))
        return home

    def stage_step(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor

    def arrived(self, device: torch.device) -> None:
        self.done.append("arrived")
        for each in self.travelling:
            each()
        self.travelling.clear()


NAME = "uneven"


def _pair(policy: Any, **options: Any) -> Pair:
    model = shard(CASES[NAME], dtype=torch.float64, offload_policy=policy, **options)
    return Pair(CASES[NAME], model)


@pytest.mark.cross
@pytest.mark.parametrize("reshard", [True, False])
@distributed(2, 1, 4, matrix=[4])
def test_each_gather_has_a_copy_of_its_own_and_gradients_of_a_backward_travel_together(
    reshard: bool,
) -> None:
    policy = Recorded()
    pair = _pair(policy, reshard_after_forward=reshard)
    params: list[Any] = list(pair.model.parameters())
    count = len(params)
    shards = [param.to_local().data_ptr() for param in params if param.to_local().numel()]
    assert list(filter(None, policy.stored)) == shards  # each was stored once, and lives there
    assert set(policy.homes) == {params[0].to_local().device}
    for step in range(5):  # every second one adds to a gradient that is there
        policy.done.clear()
        pair.backward(step)
        # once for a gather: in forward, and in backward if it gathers again
        assert policy.done.count("in") == (2 if reshard else 1) * count
        assert [each for each in policy.done if each != "in"] == ["out"] * count + ["arrived"]
        if step % 2:
            pair.step()
    tell(pair.model, "set_requires_gradient_sync", False)
    policy.done.clear()
    pair.backward(5)
    assert "out" not in policy.done, "of what is only accumulated"
    tell(pair.model, "set_requires_gradient_sync", True)
    pair.backward(6)
    pair.check()


@distributed(2)
def test_a_hook_on_a_sharded_gradient_sees_one_that_has_arrived() -> None:
    model = shard(CASES[NAME], dtype=torch.float64, offload_policy=Recorded())
    seen: list[bool] = []

    def hook(param: torch.Tensor) -> None:
        assert param.grad is not None
        seen.append(bool(param.grad.to_local().isfinite().all()))  # type: ignore[attr-defined]  # a DTensor

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook)
    inputs, targets = rows_of(CASES[NAME].batch(0, torch.float64), my_rows())
    CASES[NAME].loss(model(inputs), targets).backward()
    assert seen == [True] * len(list(model.parameters()))


@distributed(2)
def test_a_state_dict_that_is_loaded_travels_with_the_next_gather() -> None:
    policy = Recorded()
    model = shard(CASES[NAME], dtype=torch.float64, offload_policy=policy)
    inputs, _ = CASES[NAME].batch(0, torch.float64)
    before = model(inputs)
    zeros = {name: torch.zeros_like(p) for name, p in build(CASES[NAME]).state_dict().items()}
    model.load_state_dict({name: zero.double() for name, zero in zeros.items()})
    assert before.abs().max() > 0
    assert model(inputs).abs().max() == 0


@distributed(2)
def test_shards_that_were_replaced_are_stored_anew() -> None:
    """As on the meta device, whose parameters are replaced by real ones after sharding."""
    with torch.device("meta"):
        model = build(CASES[NAME], torch.float64)
    policy = Recorded()
    for unit in (*model.children(), model):
        fully_shard(unit, mesh=cpu_mesh(), offload_policy=policy)
    model.to_empty(device="cpu")
    model.load_state_dict(build(CASES[NAME], torch.float64).state_dict())
    inputs, _ = CASES[NAME].batch(0, torch.float64)
    assert_equal(
        {"output": model(inputs)}, {"output": build(CASES[NAME], torch.float64)(inputs)}, EXACT, ""
    )
    assert policy.done


class Wrapped:
    """A user's policy in front of another: it notes what is staged, and passes the rest on."""

    def __init__(self, inner: NoOffload) -> None:
        self.inner, self.done = inner, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def stage_in(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.done.append("in")
        return self.inner.stage_in(shard, device)

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        self.done.append("out")
        return self.inner.stage_out(gradient)


def _set_by_hand() -> tuple[Any, list[str]]:
    """An identity policy whose methods were set on the object, and what they note."""
    policy, done = NoOffload(), list[str]()

    def stage_in(shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        done.append("in")
        return shard

    def stage_out(gradient: torch.Tensor) -> torch.Tensor:
        done.append("out")
        return gradient

    vars(policy).update(stage_in=stage_in, stage_out=stage_out)
    return policy, done


@pytest.mark.parametrize("kind", ["wrapped", "set by hand"])
@distributed(2)
def test_a_policy_before_the_identity_is_asked_each_time(kind: str) -> None:
    wrapped = Wrapped(NoOffload())
    policy, done = (wrapped, wrapped.done) if kind == "wrapped" else _set_by_hand()
    pair = _pair(policy, reshard_after_forward=True)
    params = len(list(pair.whole.parameters()))
    for step in range(2):
        done.clear()
        pair.backward(step)
        assert done.count("in") >= params
        assert done.count("out") == params
    pair.check()

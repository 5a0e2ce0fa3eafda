"""Shards that are cast once per parameter generation: the same training, fewer casts, no more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.sharding import NoOffload, debug_mode, fully_shard
from support.dispatch import CastCounter, StorageCounter
from support.gather_hooks import BFloat16Travel, calls_of_hooks
from support.ranks import cpu_mesh, distributed
from support.surface.model import WIDTH, batch, build, sharded

F32, BF16 = torch.float32, torch.bfloat16


def policy(*, keep: bool = True, **fields: Any) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(BF16, F32, keep_casts=keep, **fields)


def rows(step: int = 0) -> torch.Tensor:
    """Other rows on each rank, in the dtype of the computation."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator, dtype=BF16)


def model_of(*, keep: bool = True, **arguments: Any) -> Any:
    return sharded(build(), mp_policy=policy(keep=keep), **arguments)


def step(model: Any, optimizer: Any, number: int) -> float:
    loss = model(rows(number)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(model: Any, steps: int = 3) -> list[Any]:
    """The losses of some steps, and the shards after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = [step(model, optimizer, number) for number in range(steps)]
    return [losses, [shard.tolist() for shard in shards_of(model)]]


def shards_of(model: Any) -> list[torch.Tensor]:
    return [param.to_local().detach() for param in model.parameters()]


def casts_in(run: Callable[[], object]) -> int:
    """How many tensors ``run`` casts to the dtype in which parameters are gathered."""
    with CastCounter(F32, BF16) as counter:
        run()
    return counter.casts.total()


def count_of_shards(model: Any) -> int:
    return sum(1 for shard in shards_of(model) if shard.numel())


CASES: dict[str, dict[str, Any]] = {
    "as by default": {},
    "gathered once": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "offload, staged copies kept": {"offload_policy": CPUOffloadPolicy(parameters=False)},
}


@pytest.mark.parametrize("case", CASES)
@distributed(2)
def test_training_is_bit_equal_to_that_without_kept_casts(case: str) -> None:
    assert trained(model_of(**CASES[case])) == trained(model_of(keep=False, **CASES[case]))


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@distributed(4)
def test_training_is_bit_equal_on_other_meshes_and_post_forward_ones(
    shape: tuple[int],
) -> None:
    options: dict[str, Any] = {"mesh": cpu_mesh(shape, ("r", "s")[: len(shape)])}
    if shape == (4,):
        options["reshard_after_forward"] = 2
    assert trained(model_of(**options)) == trained(model_of(keep=False, **options))


@distributed(2)
def test_each_shard_is_cast_once_per_step_and_without_the_policy_at_every_gather() -> None:
    kept, cast_anew = model_of(), model_of(keep=False)
    count = count_of_shards(kept)
    in_blocks = sum(count_of_shards(block) for block in kept.blocks)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (kept, cast_anew)]
    for number in range(3):
        assert casts_in(lambda: step(kept, optimizers[0], number)) == count  # noqa: B023  # called at once
        # the root is not gathered again for backward
        found = casts_in(lambda: step(cast_anew, optimizers[1], number))  # noqa: B023  # the same
        assert found == count + in_blocks


@distributed(2)
def test_forwards_and_accumulating_backwards_between_two_steps_share_a_cast() -> None:
    model = model_of()
    count = count_of_shards(model)

    def several() -> None:
        with torch.no_grad():
            model(rows())
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            model(rows(number)).sum().backward()
        with torch.inference_mode():
            model(rows())

    assert casts_in(several) == count
    assert casts_in(several) == 0  # nothing changed


@distributed(2)
def test_memory_first_cast_into_in_inference_mode_serves_training() -> None:
    model, other = model_of(), model_of()
    with torch.inference_mode():
        model(rows())
    assert trained(model) == trained(other)


@distributed(2)
def test_what_is_kept_is_each_shard_in_the_smaller_dtype_in_memory_used_again() -> None:
    model = model_of()
    wanted = sum(shard.numel() * BF16.itemsize for shard in shards_of(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = []
    for number in range(3):
        with StorageCounter() as counter:
            step(model, optimizer, number)
        made.append(sum(n for what, n in counter.made.items() if what.startswith("inputs.")))
    assert made == [wanted, 0, 0]


CHANGES: dict[str, Callable[[Any], object]] = {
    "a state dict": lambda model: model.load_state_dict(
        {name: 2 * value for name, value in model.state_dict().items()}
    ),
    "the user": lambda model: (
        model.reshard(),
        [param.mul_(2) for param in model.parameters()],
        model.parameters_changed(),
    ),
    "assignment": lambda model: model.load_state_dict(
        {name: 2 * value for name, value in model.state_dict().items()}, assign=True
    ),
    "another dtype": lambda model: model.to(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES)
@distributed(2)
def test_what_else_changes_parameters_is_seen(change: str) -> None:
    results = []
    for keep in (True, False):
        model = model_of(keep=keep)
        with torch.no_grad():
            before = model(rows())
            CHANGES[change](model)
            results.append(model(rows()))
        assert change == "another dtype" or not torch.equal(before, results[-1])
    assert torch.equal(*results)


@distributed(2)
def test_a_dtype_that_the_policy_answers_otherwise_is_cast_to_anew() -> None:
    rules = policy(param_dtypes={"root.*": torch.float16})
    inner = nn.Linear(WIDTH, WIDTH)
    reference = nn.Linear(WIDTH, WIDTH)
    reference.load_state_dict(inner.state_dict())
    fully_shard(inner, mp_policy=rules)
    with torch.no_grad():
        assert torch.equal(inner(rows()), reference.bfloat16()(rows().bfloat16()))
    seen = []
    holder = nn.ModuleDict({"root": inner})
    holder.forward = lambda x: holder["root"](x.half())
    inner.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    fully_shard(nn.Sequential(holder))  # from now on its parameters have longer names
    with torch.no_grad():
        inner(rows())
    assert seen == [BF16]  # "0.root.weight" is no match


@pytest.mark.parametrize("how", ["while unsharded", "with a gradient by hand"])
@distributed(2)
def test_a_parameter_that_was_thawed_for_one_step_is_cast_anew(how: str) -> None:
    results = []
    for keep in (True, False):
        model = model_of(keep=keep)
        layer = model.blocks[0]
        sharded_ones = list(layer.parameters())
        optimizer = torch.optim.SGD(sharded_ones, lr=0.5)
        layer.requires_grad_(False)
        if how == "while unsharded":
            layer.unshard()
            layer.requires_grad_(True)
            model(rows()).square().mean().backward()
            layer.reshard()
        else:
            with torch.no_grad():
                model(rows())
            for param in sharded_ones:
                param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()
        layer.requires_grad_(False)
        with torch.no_grad():
            results.append(model(rows()))
    assert torch.equal(*results)


@distributed(2)
def test_several_optimizers_share_the_cast_of_a_step() -> None:
    model = model_of()
    first, second = list(model.blocks.parameters()), list(model.head.parameters())
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (first, second)]

    def both() -> None:
        model(rows()).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        assert casts_in(both) == count_of_shards(model)


@distributed(2)
def test_a_closure_sees_what_the_step_that_calls_it_has_done_so_far() -> None:
    results = []
    for keep in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2))  # LBFGS: even
        fully_shard(model, mp_policy=policy(keep=keep))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        seen: list[float] = []

        def closure(model: Any = model, seen: Any = seen, optimizer: Any = optimizer) -> float:
            optimizer.zero_grad()
            loss = model(batch()).square().mean()
            loss.backward()
            seen.append(loss.item())
            return seen[-1]

        for _ in range(2):
            optimizer.step(closure)
        results.append(seen)
    assert results[0][0] != results[0][1]  # both in the first step
    assert results[0] == results[1]


# -- what is not kept -----------------------------------------------------------------------------


@distributed(2)
def test_a_dtype_that_is_not_smaller_is_cast_by_the_gather() -> None:
    results = []
    for keep in (True, False):
        wide = MixedPrecisionPolicy(torch.float64, torch.float64, keep_casts=keep)
        model = sharded(build(), mp_policy=wide)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with StorageCounter() as counter:
            results.append([step(model, optimizer, number) for number in range(2)])
        assert not [what for what in counter.made if what.startswith("inputs.")]
    assert results[0] == results[1]


@distributed(2)
def test_hooks_around_a_gather_are_given_the_shard_itself() -> None:
    calls_of_hooks()
    results = []
    for keep in (True, False):
        torch.manual_seed(0)
        linear = nn.Linear(WIDTH, WIDTH)
        linear.weight = nn.Parameter(BFloat16Travel(linear.weight.detach()))
        fully_shard(linear, mp_policy=policy(keep=keep))
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        results.append([step(linear, optimizer, number) for number in range(3)])
    assert results[0] == results[1]
    assert calls_of_hooks()


class _Copies(NoOffload):
    """Copies shards on their way in, as to another device, and notes their dtypes."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def stage_in(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.dtypes.append(shard.dtype)
        return shard.clone()


@distributed(2)
def test_with_offload_shards_travel_in_the_smaller_of_both_dtypes() -> None:
    for param_dtype, travels in ((BF16, BF16), (torch.float64, F32)):
        offload = _Copies()
        mixed = MixedPrecisionPolicy(param_dtype, F32, keep_casts=True)
        model = sharded(build(), mp_policy=mixed, offload_policy=offload)
        trained(model)
        assert set(offload.dtypes) == {travels}


# -- debug mode -----------------------------------------------------------------------------------

STALE = r"blocks\.0\.fc1\.weight changed while .* cast copy .* call parameters_changed\(\)"


def quiet() -> AbstractContextManager[None]:
    return debug_mode(timeout=30)


@distributed(2)
def test_debug_mode_finds_a_cast_that_is_stale() -> None:
    model = model_of()
    weight: Any = model.blocks[0].fc1.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet():
        step(model, optimizer, 0)
        with torch.no_grad():
            model(rows())
            weight.to_local().mul_(-1)
        with pytest.raises(RuntimeError, match=STALE):
            model(rows())
        model.reset_iter_state()
        model.parameters_changed()
        step(model, optimizer, 1)
        step(model, optimizer, 2)


@distributed(2)
def test_debug_mode_finds_nothing_wrong_with_training() -> None:
    with quiet():
        watched = trained(model_of())
    assert watched == trained(model_of())

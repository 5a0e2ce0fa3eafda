"""Programs with a function for the whole step: several losses, and an optimizer for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus

from fullshard.optim import clip_grad_norm_
from fullshard.preflight import Phase, Verdict, plan, verify
from fullshard.sharding import fully_shard
from support.ranks import distributed
from support.verification import fault
from support.verification.fault import is_sharded

NOISE, WIDTH, ROWS = 4, 8, 6
Optimizers = Sequence[torch.optim.Optimizer]


def build() -> nn.Module:
    """A generator, a mean of its parameters over steps, and a discriminator."""

    def generator() -> nn.Module:
        return nn.Sequential(nn.Linear(NOISE, 9), nn.Tanh(), nn.Linear(9, WIDTH))

    parts = {"generator": generator(), "averaged": generator().requires_grad_(False)}
    discriminator = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 1))
    return nn.ModuleDict({**parts, "discriminator": discriminator})


def shard(model: Any, mesh: Any = None) -> None:
    for each in model.values():
        fully_shard(each, mesh=mesh)


def batch(step: int) -> dict[str, torch.Tensor]:
    seed = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return {
        "noise": torch.randn(ROWS, NOISE, generator=seed),
        "real": torch.randn(ROWS, WIDTH, generator=seed),
    }


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    trained = [model["discriminator"].parameters(), model["generator"].parameters()]
    return [torch.optim.Adam(params, lr=1e-2) for params in trained]


def step(model: Any, optimizers: Optimizers, given: Any) -> Iterator[torch.Tensor]:
    """Both losses; clips between backward and step, and averages parameters without optimizer."""
    fake = model["generator"](given["noise"])
    scores = model["discriminator"](given["real"]), model["discriminator"](fake.detach())
    yield softplus(-scores[0]).mean() + softplus(scores[1]).mean()
    clip_grad_norm_(list(model["discriminator"].parameters()), 0.1)
    optimizers[0].step()
    optimizers[0].zero_grad()
    yield softplus(-model["discriminator"](fake)).mean()
    optimizers[1].step()
    with torch.no_grad():
        pairs = [model[name].parameters() for name in ("averaged", "generator")]
        for mean, param in zip(*pairs, strict=True):
            mean.lerp_(param, 0.1)
    for each in optimizers:
        each.zero_grad()


def verdict_of(**changes: Any) -> Verdict:
    program = {"build_model": build, "shard": shard, "batch": batch}
    return verify(**{**program, "step": step, "optimizers": optimizers, **changes})


@distributed(1, 2)
def test_a_gan_is_equal() -> None:
    verdict = verdict_of()
    assert verdict.equal, str(verdict)
    assert verdict.steps == 3
    assert verdict.largest is not None


def _changed(change: Callable[[int, torch.Tensor], torch.Tensor]) -> Any:
    """The step with other losses when sharded."""

    def changed(model: Any, optimizers: Optimizers, given: Any) -> Iterator[torch.Tensor]:
        wrong = is_sharded(model)
        for number, loss in enumerate(step(model, optimizers, given)):
            yield change(number, loss) if wrong else loss

    return changed


def _doubled(number: int, loss: torch.Tensor) -> torch.Tensor:
    return loss * (1 + number)


def _doubled_backward(number: int, loss: torch.Tensor) -> torch.Tensor:
    return loss + number * (loss - loss.detach())


def _other_rate(model: Any) -> list[torch.optim.Optimizer]:
    made = optimizers(model)
    made[0].param_groups[0]["lr"] *= 2 if is_sharded(model) else 1
    return made


def _averaging_twice(model: Any, optimizers: Optimizers, given: Any) -> Iterator[torch.Tensor]:
    wrong = is_sharded(model)
    yield from step(model, optimizers, given)
    if wrong:
        with torch.no_grad():
            for param in model["averaged"].parameters():
                param.mul_(0.9)


@pytest.mark.parametrize(
    ("program", "phase", "name", "cause"),
    [
        (
            {"step": _changed(_doubled)},
            Phase.LOSS,
            "loss 2",
            "a loss function that is not the same",
        ),
        (
            {"step": _changed(_doubled_backward)},
            Phase.GRADIENT,
            "generator.0.weight",
            "gradients scaled by one factor",
        ),
        (
            {"optimizers": _other_rate},
            Phase.UPDATE,
            "discriminator.0.weight",
            "optimizer settings that are not the same",
        ),
        ({"step": _averaging_twice}, Phase.UPDATE, "averaged.0.weight", None),
    ],
    ids=["loss", "backward", "rate", "average"],
)
@distributed(2)
def test_a_fault_of_one_part_of_a_step_is_found_there(
    program: dict[str, Any], phase: Phase, name: str, cause: str | None
) -> None:
    verdict = verdict_of(**program)
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.phase, verdict.first.name) == (0, phase, name)
    assert [each.name for each in verdict.causes] == ([] if cause is None else [cause])


def _plain(model: nn.Module, optimizers: Optimizers, given: Any) -> Iterator[torch.Tensor]:
    yield fault.loss(model, given)
    optimizers[0].step()
    optimizers[0].zero_grad()


def _adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3)]


def test_a_step_of_one_loss_is_planned_as_that_loss() -> None:
    given = torch.empty(4, fault.WIDTH), torch.empty(4, fault.WIDTH)
    wanted = plan(fault.build, given, fault.loss, mesh=2, shard=fault.shard, device="h100")
    found = plan(
        fault.build, given, step=_plain, optimizers=_adamw, mesh=2, shard=fault.shard, device="h100"
    )
    assert (found.peak, found.categories) == (wanted.peak, wanted.categories)
    assert found.step_time == wanted.step_time


def test_a_plan_of_a_gan_has_the_state_of_both_optimizers() -> None:
    given = {"noise": torch.empty(ROWS, NOISE), "real": torch.empty(ROWS, WIDTH)}

    def held(*names: str) -> int:
        def made(model: Any) -> list[torch.optim.Optimizer]:
            both = zip(("discriminator", "generator"), optimizers(model), strict=True)
            return [each if name in names else _Still(each) for name, each in both]

        return plan(build, given, step=step, optimizers=made, mesh=2, shard=shard).held

    one, other = held("discriminator"), held("generator")
    assert one > held() and other > held()
    assert held("discriminator", "generator") - held() == one + other - 2 * held()


class _Still(torch.optim.SGD):
    """Has the parameters of another, no state, and makes no step."""

    def __init__(self, other: torch.optim.Optimizer) -> None:
        super().__init__(other.param_groups[0]["params"], lr=0.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"loss": lambda model, given: 0}, "loss and step= are both given; pass loss and"),
        ({"optimizer": torch.optim.Adam}, "optimizer and step= are both given; pass loss and"),
        ({"optimizers": None}, "optimizers is a NoneType; pass a function"),
        ({"step": None}, r"loss is a NoneType; pass a function, or step= and optimizers="),
        ({"step": None, "loss": fault.loss}, "optimizers= is given without step=; pass optimizer="),
        ({"step": lambda *given: None}, r"step returned a NoneType; write `yield loss` in it in"),
        ({"step": lambda *given: iter(())}, "step yielded no loss; write `yield loss`"),
        ({"step": lambda *given: iter([2.0])}, "step yielded a float; it must be a scalar tensor"),
        ({"optimizers": lambda model: None}, "optimizers returned a NoneType; return a list"),
        ({"optimizers": lambda model: [3]}, "optimizers returned a int; return a torch.optim"),
    ],
)
@distributed(1)
def test_a_wrong_function_of_a_step_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        verdict_of(**wrong)


def test_a_plan_names_a_wrong_function_of_a_step_too() -> None:
    with pytest.raises(TypeError, match="loss and step= are both given"):
        plan(build, None, fault.loss, step=step, optimizers=optimizers, mesh=2)


@distributed(2)
def test_layers_and_a_meta_device_are_refused_with_a_step() -> None:
    with pytest.raises(ValueError, match="layers= and step= are both given"):
        verdict_of(layers=True)

    def on_meta() -> nn.Module:
        return build().to("meta")

    with pytest.raises(ValueError, match=r"on the meta device; .* leave out step="):
        verdict_of(build_model=on_meta)


@distributed(2)
def test_ranks_that_yield_another_number_of_losses_are_told_so() -> None:
    def longer(model: Any, optimizers: Optimizers, given: Any) -> Iterator[torch.Tensor]:
        wrong = not is_sharded(model)
        yield from step(model, optimizers, given)
        if wrong:
            yield model["generator"](given["noise"]).mean()

    with pytest.raises(RuntimeError, match=r"last loss on ranks \[0, 1\], and unsharded"):
        verdict_of(step=longer)


@distributed(1)
def test_a_loss_that_is_yielded_inside_a_context_is_refused() -> None:
    def inside(model: Any, optimizers: Optimizers, given: Any) -> Iterator[torch.Tensor]:
        with torch.autocast("cpu"):
            yield from step(model, optimizers, given)

    with pytest.raises(ValueError, match="yielded loss 1 inside a `with` block"):
        verdict_of(step=inside)


def test_micro_batches_of_a_plan_are_refused_with_a_step() -> None:
    given = {"noise": torch.empty(ROWS, NOISE), "real": torch.empty(ROWS, WIDTH)}
    with pytest.raises(ValueError, match="micro_batches is 2 and step= is given; yield"):
        plan(build, given, step=step, optimizers=optimizers, mesh=2, shard=shard, micro_batches=2)

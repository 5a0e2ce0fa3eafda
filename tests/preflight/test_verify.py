"""``verify`` finds and names faults that are planted, and calls nothing else a fault."""

from __future__ import annotations

import os
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.comm import CollectiveMismatchError
from fullshard.policies import MixedPrecisionPolicy
from fullshard.preflight import Verdict, verify
from fullshard.preflight.compat import default_store
from fullshard.preflight.verification import agree, room
from fullshard.sharding import fully_shard
from support.parity.models import CASES, Case
from support.parity.models import build as build_case
from support.parity.reference import my_rows, rows_of
from support.products import few
from support.ranks import RanksFailed, distributed, run_on_ranks
from support.verification.fault import batch, build, loss, shard
from support.verification.faults import FAULTS

BY_NAME = {fault.name: fault for fault in FAULTS}
DROPOUT = BY_NAME["dropout"]
UNEQUAL = BY_NAME["means over unequal numbers of rows"]


def verdict_of(**changes: Any) -> Verdict:
    """What it says of the program without faults, but for ``changes``."""
    program = {"build_model": build, "shard": shard, "batch": batch, "loss": loss}
    return verify(**{**program, "steps": 2, **changes})


NO_LAYERS = ("batch-norm", "many-dtypes")  # the one differs, the other has parameters alone
PLAIN = [(name, None) for name in CASES if name != "batch-norm"]
BY_LAYER = [(name, True) for name in CASES if name not in NO_LAYERS]
FIRST = [(name, layers) for name in ("uneven", "partly-used", "lora") for layers in (None, True)]


@pytest.mark.parametrize(("name", "layers"), few([*PLAIN, *BY_LAYER], *FIRST, together=True))
@distributed(2)
def test_the_models_of_the_parity_tests_raise_no_alarm(name: str, layers: bool | None) -> None:
    case: Case = CASES[name]

    def shard_case(model: nn.Module) -> None:
        for unit in case.units_of(model):
            fully_shard(unit)
        fully_shard(model)

    verdict = verify(
        lambda: build_case(case, None),
        shard_case,
        lambda step: rows_of(case.batch(step, torch.float32), my_rows()),
        lambda model, rows: case.loss(model(rows[0]), rows[1]),
        layers=layers,
    )
    assert verdict.equal, str(verdict)
    assert verdict.largest is not None


@distributed(4)
def test_four_ranks_agree_and_say_how_nearly() -> None:
    verdict = verdict_of()
    assert verdict.equal, str(verdict)
    said = str(verdict)
    assert "equal over 2 steps" in said
    assert "tolerance: 1.5e-05 of a tensor's norm" in said
    assert "rank 0 (cpu), on the batches of 4 ranks in turn" in said


@pytest.mark.parametrize("layers", [None, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@distributed(2)
def test_the_tolerance_follows_the_dtype_that_the_policy_computes_in(
    dtype: torch.dtype, layers: bool | None
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    verdict = verdict_of(shard=lambda model: shard(model, mp_policy=policy), layers=layers)
    assert verdict.equal, str(verdict)
    assert verdict.tolerance.dtype is dtype


@distributed(2)
def test_torchs_own_is_verified_alike() -> None:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    def shard_by_torch(model: Any) -> None:
        for module in (model.up, model.down, model):
            torch_fully_shard(module)

    assert verdict_of(shard=shard_by_torch, layers=True).equal
    assert verdict_of(shard=shard_by_torch).equal
    verdict = verdict_of(shard=shard_by_torch, **DROPOUT.program)
    assert [cause.name for cause in verdict.causes] == list(DROPOUT.causes)


@distributed(2)
def test_what_ddp_wraps_keeps_its_names() -> None:
    for layers in (False, True):
        verdict = verdict_of(shard=DistributedDataParallel, layers=layers)
        assert verdict.equal, str(verdict)
    verdict = verdict_of(shard=DistributedDataParallel, **DROPOUT.program)
    assert verdict.first is not None
    assert verdict.first.module == DROPOUT.at


@distributed(2)
def test_dropout_is_equal_once_seeds_are_aligned() -> None:
    assert verdict_of(**DROPOUT.program, aligned_seeds=True).equal


@pytest.mark.parametrize("layers", [False, True])
@distributed(2)
def test_dropout_of_ranks_that_are_seeded_alike_gets_a_remark(layers: bool) -> None:
    def remarks(seed: int, **changes: Any) -> list[str]:
        torch.manual_seed(seed)
        notes = verdict_of(steps=1, aligned_seeds=True, layers=layers, **changes).notes
        return [note for note in notes if "the same masks of dropout" in note]

    def seeded(model: nn.Module, given: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return loss(model, given)

    assert remarks(3, **DROPOUT.program)
    assert remarks(dist.get_rank(), **DROPOUT.program, loss=seeded)
    assert not remarks(dist.get_rank(), **DROPOUT.program)
    assert not remarks(3)


@distributed(2)
def test_weights_by_tokens_make_unequal_batches_equal() -> None:
    weighted = UNEQUAL.program["batch"]
    everyone = 2 + 5

    def weighed(model: nn.Module, given: Any) -> torch.Tensor:
        mean = loss(model, given)
        is_sharded = any(hasattr(each, "to_local") for each in model.parameters())
        return mean * len(given[0]) * dist.get_world_size() / everyone if is_sharded else mean

    assert verdict_of(batch=weighted, tokens=UNEQUAL.program["tokens"], loss=weighed).equal


@distributed(2)
def test_a_model_that_is_built_otherwise_each_time_is_told_so_before_anything_runs() -> None:
    calls: list[None] = []

    def drawn() -> nn.Module:
        model = build()
        calls.append(None)
        nn.init.constant_(model.up.bias, len(calls))
        return model

    with pytest.raises(ValueError, match=r"not deterministic: up\.bias .* built a second time"):
        verdict_of(build_model=drawn)

    def by_rank() -> nn.Module:
        model = build()
        nn.init.constant_(model.up.bias, dist.get_rank())
        return model

    with pytest.raises(ValueError, match=r"not deterministic: up\.bias .* on rank [01]"):
        verdict_of(build_model=by_rank)


@distributed(2)
def test_batches_of_other_shapes_are_refused_on_every_rank() -> None:
    with pytest.raises(ValueError, match=r"rank 1's batch has shapes .*\(5, 6\).* pass tokens="):
        verdict_of(batch=UNEQUAL.program["batch"])


@distributed(2)
def test_a_loss_that_is_no_scalar_is_refused_on_every_rank() -> None:
    with pytest.raises(
        (ValueError, RuntimeError), match=r"loss returned a tensor of shape \(4, 6\)"
    ):
        verdict_of(loss=lambda model, given: model(given[0]) - given[1])
    with pytest.raises((TypeError, RuntimeError), match=r"loss returned a float"):
        verdict_of(loss=lambda model, given: 1.0)


@pytest.mark.parametrize("what", ["batch", "shard", "optimizer"])
@distributed(2)
def test_an_error_of_one_rank_ends_all(what: str) -> None:
    def fails() -> bool:
        if dist.get_rank() == 1:
            raise OSError("no luck")
        return False

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            fails()

    wrong: dict[str, Any] = {
        "batch": lambda step: fails() or batch(step),
        "shard": lambda model: fails() or shard(model),
        "optimizer": lambda params: Fails(params, lr=0.1),
    }
    with pytest.raises((OSError, RuntimeError), match="no luck"):
        verdict_of(**{what: wrong[what]})


class Failing(torch.autograd.Function):
    """Fails in backward if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.fails:
            raise OSError("no luck")
        return grads[0], None


def fails_on_rank_1(where: str, layers: bool) -> str:
    """What `verify` says if rank 1 fails in the sharded model; that rank's process then ends."""
    fails = False

    def shard_it(model: Any) -> None:
        nonlocal fails
        shard(model)
        fails = dist.get_rank() == 1

    def failing(model: nn.Module, given: Any) -> torch.Tensor:
        if fails and where == "loss":
            raise OSError("no luck")
        found: torch.Tensor = Failing.apply(  # type: ignore[no-untyped-call]
            loss(model, given), fails and where == "backward"
        )
        return found

    with (
        mock.patch.object(agree, "PATIENCE", 0.5),
        pytest.raises((OSError, RuntimeError), match="no luck") as caught,
    ):
        verdict_of(shard=shard_it, loss=failing, layers=layers)
    if dist.get_rank() == 1:
        os._exit(3)
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "layers"), [pytest.param("loss", False, marks=pytest.mark.matrix), ("backward", True)]
)
def test_an_error_of_one_rank_between_collectives_leaves_none_waiting(
    where: str, layers: bool
) -> None:
    with pytest.raises(RanksFailed) as ended:
        run_on_ranks(fails_on_rank_1, 2, where, layers, fresh=True)
    assert ended.value.exit_codes == {1: 3}
    assert ended.value.results[0] == "rank 1 stopped the verification: OSError: no luck"


@distributed(2)
def test_ranks_that_fail_at_once_all_raise_and_stay_in_step() -> None:
    for each in range(20):
        alike = each % 2 == 0
        mine = OSError("on all" if alike else f"on rank {dist.get_rank()}")

        def fails(mine: OSError = mine) -> None:
            raise mine

        with pytest.raises((OSError, RuntimeError)) as caught:
            agree.jointly(fails)
        said = agree.everyones(str(caught.value))  # the next collective is the same on both
        if alike:
            assert said == ["on all"] * 2
        else:
            first = next(rank for rank in (0, 1) if said[rank] == f"on rank {rank}")
            assert (
                said[1 - first]
                == f"rank {first} stopped the verification: OSError: on rank {first}"
            )


@distributed(2)
def test_an_error_that_only_repeats_the_error_of_another_rank_is_not_the_cause() -> None:
    fail, store, rank = agree._Part.fail, default_store(), dist.get_rank()

    def fail_and_say(self: Any, text: str, **kwargs: Any) -> None:
        fail(self, text, **kwargs)
        store.set(f"failed/{rank}", "")

    def fails() -> None:
        if rank == 0:
            raise CollectiveMismatchError("rank 1 raised OSError: no luck")
        store.wait(["failed/0"])
        raise OSError("no luck")

    with (
        mock.patch.object(agree._Part, "fail", fail_and_say),
        pytest.raises((OSError, RuntimeError)) as caught,
    ):
        agree.jointly(fails)
    assert (
        str(caught.value) == ["rank 1 stopped the verification: OSError: no luck", "no luck"][rank]
    )


@distributed(2)
def test_random_numbers_go_on_as_if_it_had_not_run() -> None:
    torch.manual_seed(3)
    random.seed(3)
    wanted = torch.rand(2), random.random()
    torch.manual_seed(3)
    random.seed(3)
    verdict_of(**DROPOUT.program)
    assert torch.equal(torch.rand(2), wanted[0])
    assert random.random() == wanted[1]


@distributed(2)
def test_nan_in_one_of_the_runs_is_a_difference_and_in_both_is_none() -> None:
    def spoilt(model: Any) -> None:
        with torch.no_grad():
            model.up.weight[0, 0] = float("nan")
        shard(model)

    def spoilt_model() -> nn.Module:
        model = build()
        torch.nn.init.constant_(model.down.bias, float("nan"))
        return model

    verdict = verdict_of(shard=spoilt)
    assert verdict.first is not None
    assert verdict.first.name == "up.weight"
    assert verdict_of(build_model=spoilt_model, steps=1).equal


@distributed(2)
def test_losses_that_cancel_are_compared_by_their_size() -> None:
    def signed(model: nn.Module, given: Any) -> torch.Tensor:
        return 1e3 * model(given[0]).sum()

    assert verdict_of(loss=signed, steps=1).equal


@distributed(2)
def test_too_little_memory_is_said_with_both_numbers() -> None:
    with (
        mock.patch.object(room, "free_memory", return_value=100),
        pytest.raises((MemoryError, RuntimeError), match=r"takes .* KiB to train .* has .* KiB"),
    ):
        verdict_of()


@distributed(2)
def test_other_names_and_meta_parameters_are_refused() -> None:
    def renamed(model: Any) -> nn.Module:
        return nn.Sequential(shard(model))

    with pytest.raises((ValueError, RuntimeError), match="changed the names of parameters"):
        verdict_of(shard=renamed)

    def on_meta() -> nn.Module:
        return nn.Linear(2, 2, device="meta")

    with pytest.raises((ValueError, RuntimeError), match=r"weight .* is on the meta device"):
        verdict_of(build_model=on_meta, layers=False)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": 0}, "steps is 0; pass a positive int"),
        ({"steps": 1.5}, "steps is 1.5, a float"),
        ({"loss": None}, "loss is a NoneType; pass a function"),
        ({"tokens": 3}, "tokens is a int"),
    ],
)
@distributed(2)
def test_a_wrong_argument_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        verdict_of(**wrong)


def test_without_a_process_group_it_says_how_to_start() -> None:
    with pytest.raises(RuntimeError, match="start with torchrun"):
        verify(build, shard, None, loss)

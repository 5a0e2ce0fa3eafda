"""`--verify`: whether a contestant trains as the unsharded model, tensor by tensor.

Owns how a contestant becomes a program for `fullshard.preflight.verify`, and which cannot be one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight import Verdict, verify
from fullshard_bench.arena import Arena
from fullshard_bench.contestants import build_contestant
from fullshard_bench.errors import BenchError
from fullshard_bench.result import Verification
from fullshard_bench.rounds import Batches
from fullshard_bench.settings import Settings
from fullshard_bench.training import Trainee, empty_model, make_optimizer, materialise
from fullshard_bench.workload import Workload

__all__ = ["DEFINITION", "verify_contestant"]

DEFINITION = (
    "verified (--verify): before anything is measured, fullshard.preflight.verify trains the"
    " contestant and the unsharded model on all ranks' batches for as many steps as are checked,"
    " without clipping, and compares losses, gradients, buffers and updated parameters by name; a"
    " contestant that differs is wrong, whatever its losses"
)


class _Unfit(Exception):
    """Why a contestant cannot be verified."""


def verify_contestant(
    name: str, workload: Workload, settings: Settings, arena: Arena, batches: Batches
) -> Verification:
    """Return the verdict of `verify` on the contestant called `name`, or why it has none.

    All ranks call it together, and it is the same on all.

    Raises:
        BenchError: a user's function returned an object that is not a `Trainee`.
    """
    if arena.size < dist.get_world_size():
        why = f"verify takes all {dist.get_world_size()} ranks, and this mesh has {arena.size}"
        return Verification(outcome="not run", reason=why)

    def build() -> nn.Module:
        model = empty_model(workload, arena.device, settings.seed)
        materialise(model, workload, settings, arena.device, real=True)
        return model

    def shard(model: nn.Module) -> nn.Module:
        trainee = build_contestant(name, workload, settings, arena)
        if why := _unfit(trainee):
            raise _Unfit(why)
        return trainee.model

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer(list(parameters))

    try:
        verdict = verify(
            build,
            shard,
            lambda step: batches[step % len(batches)],
            workload.loss,
            steps=settings.checked,
            optimizer=optimizer,
            seed=settings.seed,
        )
    except BenchError:
        raise
    except _Unfit as error:
        return Verification(outcome="not run", reason=str(error))
    except Exception as error:  # a rival may fail in any way; so it will when it is measured
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return Verification(outcome="not run", reason=text)
    finally:
        gc.collect()  # models are in reference cycles, and memory is measured next
    return _told(verdict)


def _unfit(trainee: Trainee) -> str:
    """Why a trainee's model, with its backward, is not all of its training; "" if it is."""
    if not trainee.shares_gradients:
        return "its ranks train apart, so it is not the model trained on all batches"
    if trainee.combine is not None:
        return "it combines gradients itself after backward, where verify looks at them"
    if trainee.masters is not None:
        return "its optimizer steps on float32 copies of the parameters, which verify does not know"
    return ""


def _told(verdict: Verdict) -> Verification:
    if not verdict.equal:
        causes = "".join(f"; {cause.name}" for cause in verdict.causes[:1])
        return Verification(outcome="different", reason=f"{verdict.first}{causes}")
    steps = f"{verdict.steps} step{'s' * (verdict.steps > 1)}"
    largest = verdict.largest
    if largest is None or largest.error == 0:
        return Verification(outcome="equal", reason=f"{steps}, no difference to the last bit")
    return Verification(outcome="equal", reason=f"{steps}, largest difference: {largest}")

"""Ranks that talk through a process group when one of them ends: the others name it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import DefaultAllGather, PeerLostError, TensorSpec, all_gather_tensors
from fullshard.comm.runtime import process_watch
from fullshard.optim.norm.all_reduce import all_reduce_numbers
from fullshard.samehost import set_shared_memory
from support.ranks import RanksFailed, distributed, run_on_ranks, world


def _gather() -> None:
    spec = TensorSpec(shape=(dist.get_world_size(),), dtype=torch.float32)
    all_gather_tensors([torch.ones(1)], [spec], world())


def _reduce_numbers() -> None:
    all_reduce_numbers(torch.ones(1), world(), name="the norm of gradients")


def _exit() -> None:
    os._exit(3)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _one_ends(collective: Callable[[], None], end: Callable[[], None]) -> str:
    set_shared_memory(False)
    _gather()  # by which each rank's process is known
    if dist.get_rank() == 1:
        end()
    with pytest.raises(PeerLostError, match="rank 1 has ended") as caught:
        collective()
    assert (caught.value.rank, "Connection" in str(caught.value.__cause__)) == (1, True)
    return str(caught.value)


@pytest.mark.parametrize("end", [_exit, pytest.param(_kill, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("collective", "where"),
    [
        (_gather, "This rank was in the gather of all_gather_tensors."),
        (_reduce_numbers, "This rank was in the all-reduce of the norm of gradients."),
    ],
)
def test_the_error_names_the_rank_and_the_collective(
    collective: Callable[[], None], where: str, end: Callable[[], None]
) -> None:
    with pytest.raises(RanksFailed) as ended:
        run_on_ranks(_one_ends, 2, collective, end, fresh=True)
    assert ended.value.results[0].endswith(where), str(ended.value)


class _OtherError(RuntimeError):
    pass


class _Failing(DefaultAllGather):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        raise RuntimeError("the network is down")


class _FailingOtherwise(DefaultAllGather):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        raise _OtherError("the network is down")


@distributed(2)
def test_where_no_rank_has_ended_the_error_is_the_same_and_says_where_it_was() -> None:
    spec = TensorSpec(shape=(2,), dtype=torch.float32)
    for comm, notes in (_Failing(), 1), (_FailingOtherwise(), 0):
        with (
            mock.patch.object(process_watch, "_PATIENCE", 0.0),
            pytest.raises(RuntimeError, match="the network is down") as caught,
        ):
            all_gather_tensors([torch.ones(1)], [spec], world(), comm=comm)
        assert type(caught.value) is (RuntimeError if notes else _OtherError)
        found = getattr(caught.value, "__notes__", [])
        said = "This rank was in the gather of all_gather_tensors. No other rank"
        assert [each[: len(said)] for each in found] == [said] * notes

"""Two jobs that meet in one store: their ranks raise before anything is gathered."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.comm import EventLog, observe
from fullshard.sharding import RankMismatchError, fully_shard
from support.ranks import distributed
from support.surface.model import batch, build, sharded
from support.surface.ranks import everyone, never_gathered
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads

VARIABLES = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "a", "b"),
    "mpirun": ("PMIX_NAMESPACE", "prterun-1@1", "prterun-2@1"),
    "slurm": ("SLURM_JOB_ID", "17", "18"),
    "one's own": ("FULLSHARD_RUN_ID", "first", "second"),
}


def _environment(**variables: str) -> Any:
    """This rank's environment, as one launcher or none made it."""
    kept = {name: value for name, value in os.environ.items() if not _names_a_job(name)}
    return patch.dict(os.environ, {**kept, **variables}, clear=True)


def _names_a_job(name: str) -> bool:
    return name.startswith(("TORCHELASTIC", "PMIX", "SLURM", "PBS", "LSB", "FLUX", "FULLSHARD"))


@pytest.mark.parametrize("launcher", VARIABLES)
@distributed(2, timeout=20)
def test_ranks_of_two_jobs_raise_on_every_rank(launcher: str) -> None:
    name, *values = VARIABLES[launcher]
    log = EventLog()
    with _environment(**{name: values[dist.get_rank()]}), observe(log):
        net = sharded(build())
        with pytest.raises(RankMismatchError, match="ranks of different jobs have met") as caught:
            net(batch())
    assert never_gathered(log)
    (said,) = set(everyone(str(caught.value)))
    for rank, value in enumerate(values):
        assert f"rank {rank} has {name}={value}" in said
    assert "MASTER_PORT" in said and "set FULLSHARD_RUN_ID to the same text" in said


ONE_JOB: dict[str, list[dict[str, str]]] = {
    "no launcher": [{}, {}],
    "torchrun, without an id": [{"TORCHELASTIC_RUN_ID": "none"}] * 2,
    "torchrun over two jobs of slurm": [
        {"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "17"},
        {"TORCHELASTIC_RUN_ID": "a", "SLURM_JOB_ID": "18"},
    ],
    "a heterogeneous job of slurm": [
        {"SLURM_HET_JOB_ID": "17", "SLURM_JOB_ID": "17"},
        {"SLURM_HET_JOB_ID": "17", "SLURM_JOB_ID": "18"},
    ],
    "one rank by slurm, the other by hand": [{"SLURM_JOB_ID": "17"}, {}],
    "two launchers": [{"SLURM_JOB_ID": "17"}, {"PMIX_NAMESPACE": "x"}],
    "the user says that it is one": [
        {"FULLSHARD_RUN_ID": "a", "SLURM_JOB_ID": "17"},
        {"FULLSHARD_RUN_ID": "a", "SLURM_JOB_ID": "18"},
    ],
}


@pytest.mark.parametrize("started", ONE_JOB)
@distributed(2, timeout=20)
def test_ranks_of_one_job_agree_however_they_were_started(started: str) -> None:
    with _environment(**ONE_JOB[started][dist.get_rank()]):
        output = sharded(build())(batch())
    assert torch.equal(output, build()(batch()))


def test_ranks_that_are_threads_of_one_process_agree() -> None:
    def body(rank: ThreadRank) -> torch.Size:
        mesh = init_device_mesh("cpu", (2,))
        output: torch.Tensor = fully_shard(nn.Linear(2, 3), mesh=mesh)(torch.ones(1, 2))
        return output.shape

    with _environment(TORCHELASTIC_RUN_ID="a"):
        assert list(run_program_on_threads(body, 2)) == [(1, 3)] * 2


_RANK = """
import warnings; warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch import nn
from fullshard.sharding import fully_shard
dist.init_process_group("gloo")
try:
    fully_shard(nn.Linear(2, 2))(torch.ones(1, 2))
except RuntimeError as error:
    print(error)
dist.barrier()
"""


@pytest.mark.matrix
def test_the_second_job_on_a_port_takes_the_place_of_a_rank_of_the_first() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    started = []
    for rank, job in ("0", "first"), ("1", "second"):  # the first job's rank 1 comes too late
        own = {**address, "RANK": rank, "TORCHELASTIC_RUN_ID": job}
        with _environment(**own, PYTHONPATH=os.pathsep.join(sys.path)):
            command = [sys.executable, "-c", _RANK]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    for process in started:
        said, _ = process.communicate(timeout=120)
        assert "rank 0 has TORCHELASTIC_RUN_ID=first; rank 1 has TORCHELASTIC_RUN_ID=second" in said
        assert process.returncode == 0

"""The launch files start what they say: under stand-ins for SLURM, and the command of the pods."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.members import MEMBERS, ROOT

LAUNCH = ROOT / "examples" / "launch"
SLURM = LAUNCH / "slurm.sbatch"

# A rank that says where it is, then waits to be stopped as the trainer does.
WAITING = """
import os, signal, sys, time
from pathlib import Path

def stop(number, frame):
    Path(f"saved-{os.environ['RANK']}").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
Path(f"started-{os.environ['RANK']}").write_text(os.environ["WORLD_SIZE"])
time.sleep(60)
"""

STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" > scontrol.called; fi',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


def _path_with(folder: Path, programs: dict[str, str]) -> dict[str, str]:
    """An environment in which these programs come first; each is a line of bash."""
    for name, line in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/bash\n{line}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def _slurm(folder: Path, programs: dict[str, str], gpus: int = 2) -> dict[str, str]:
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "one", "SLURM_NNODES": "1"}
    environment = _path_with(folder, programs)
    return {**environment, **job, "SLURM_GPUS_ON_NODE": str(gpus), "SLURM_CPUS_PER_TASK": "4"}


def test_the_slurm_script_is_bash_and_starts_one_torchrun_per_host(tmp_path: Path) -> None:
    assert subprocess.run(["bash", "-n", SLURM], check=False).returncode == 0
    programs = {
        **STAND_INS,
        "torchrun": 'echo "$@" > torchrun.called; echo $OMP_NUM_THREADS; exit 3',
    }
    environment = _slurm(tmp_path, programs)
    ran = subprocess.run(
        ["bash", SLURM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 3, ran.stderr  # the step's own code: SLURM sees that it failed
    assert ran.stdout == "2\n"  # four cores for two ranks
    called = (tmp_path / "torchrun.called").read_text()
    port = 20000 + os.getpid() % 20000
    assert (
        f"--nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{port}"
        in called
    )
    assert f"-m fullshard_train --resume auto --out runs/{os.getpid()}" in called
    assert not (tmp_path / "scontrol.called").exists()  # what failed is not queued again


def test_before_the_time_is_over_ranks_save_and_the_job_is_queued_again(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    environment = _slurm(tmp_path, STAND_INS)
    with subprocess.Popen(
        ["bash", SLURM, "waiting.py"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE
    ) as job:
        _wait_for([tmp_path / f"started-{rank}" for rank in range(2)], job)
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) != 0
    assert (tmp_path / "started-0").read_text() == "2"
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()
    assert (tmp_path / "scontrol.called").read_text() == f"requeue {os.getpid()}\n"


@pytest.mark.matrix
def test_the_program_saves_when_slurm_warns_and_continues_when_it_is_queued_again(
    tmp_path: Path,
) -> None:
    out, sources = tmp_path / "run", [str(member.folder / "src") for member in MEMBERS]
    environment = {
        **_slurm(tmp_path, STAND_INS),
        "OUT": str(out),
        "PYTHONPATH": os.pathsep.join(sources),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = ["bash", str(SLURM), str(LAUNCH / "train.py")]
    endless = {**environment, "STEPS": "1000000"}
    with subprocess.Popen(command, cwd=tmp_path, env=endless, stderr=subprocess.PIPE) as job:
        _wait_for([out / "losses.jsonl"], job)  # it trains
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=120) != 0
    assert (tmp_path / "scontrol.called").read_text() == f"requeue {os.getpid()}\n"
    done = _steps(out)
    assert (out / f"step-{done[-1]:06}" / ".metadata").exists()
    longer = {**environment, "STEPS": str(done[-1] + 5)}
    subprocess.run(command, cwd=tmp_path, env=longer, check=True, timeout=120)
    assert _steps(out) == list(range(1, done[-1] + 6))


def _steps(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "losses.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("code", "queued"), [(0, False), (1, False), (137, False), (138, True), (143, True)]
)
def test_the_lines_for_a_script_of_ones_own_queue_a_job_again_that_saved(
    tmp_path: Path, code: int, queued: bool
) -> None:
    page = (ROOT / "docs" / "how-to" / "preemption.md").read_text()
    (lines,) = re.findall(
        r"^ *```sh\n((?:(?! *```).*\n)*.*scontrol requeue(?:.*\n)*?) *```$", page, re.M
    )
    programs = {**STAND_INS, "srun": f'echo "$@" > srun.called; exit {code}'}
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", textwrap.dedent(lines)],
        cwd=tmp_path,
        env=_slurm(tmp_path, programs),
        check=False,
    )
    assert ran.returncode == code
    called = (tmp_path / "srun.called").read_text()
    assert called == "--kill-on-bad-exit=1 python -m fullshard_train launch ...\n"
    requeued = tmp_path / "scontrol.called"
    assert requeued.exists() == queued
    assert not queued or requeued.read_text() == f"requeue {os.getpid()}\n"


def _wait_for(files: list[Path], job: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if all(file.exists() and file.read_text() for file in files):
            return
        if job.poll() is not None:
            break
        time.sleep(0.1)
    job.kill()
    pytest.fail(f"no ranks: {job.stderr.read().decode() if job.stderr else ''}")


@pytest.fixture
def parts() -> dict[str, Any]:
    """The documents of the Kubernetes file by their kind."""
    documents = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def _container(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def test_the_pods_of_the_job_are_those_that_the_service_names(parts: dict[str, Any]) -> None:
    service, job = parts["Service"], parts["Job"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    values = {each["name"]: each["value"] for each in _container(job)["env"]}
    assert values["MASTER"] == f"{name}-0.{service['metadata']['name']}"
    assert int(values["NNODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(values["GPUS"]) == _container(job)["resources"]["limits"]["nvidia.com/gpu"]
    port = service["spec"]["ports"][0]["port"]
    assert f'--rdzv-endpoint="$MASTER:{port}"' in _container(job)["command"][-1]
    mounted = {mount["name"] for mount in _container(job)["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


# In the example's place: writes down each start, and rank 1 is lost once.
LOSES_A_RANK = """
import os, signal
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, lost = dist.get_rank(), "lost"
with open(f"rank-{rank}", "a") as file:
    file.write(f"{dist.get_world_size()} ")
dist.barrier()
if rank == 1 and not os.path.exists(lost):
    open(lost, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


@pytest.mark.matrix
def test_pods_start_their_ranks_and_once_more_after_one_is_lost(
    parts: dict[str, Any], tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOSES_A_RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    container = _container(parts["Job"])
    *shell, command = container["command"]
    environment = _path_with(tmp_path, {"torchrun": STAND_INS["torchrun"]})
    environment |= {each["name"]: each["value"] for each in container["env"]}
    environment |= {"NNODES": "2", "GPUS": "1", "MASTER": "127.0.0.1", "OUT": "run"}
    pods = [
        subprocess.Popen(
            [*shell, command.replace("29500", str(port)).replace("/shared/train.py", str(program))],
            cwd=tmp_path,
            env={**environment, "JOB_COMPLETION_INDEX": str(index)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for pod in pods:
            errors = pod.communicate(timeout=240)[1]
            assert pod.returncode == 0, errors
    finally:
        for pod in pods:
            pod.kill()
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["2 2 ", "2 2 "]

"""The doctor: healthy ranks, and planted faults that it must find and name on every rank."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import json
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.preflight import Diagnosis, Finding, Level, diagnose
from fullshard.preflight.doctor import here, together
from fullshard.preflight.doctor.pairs import Pair, pairs_by_round
from fullshard_bench.launching.network import Hosts, check_network
from support.members import LIBRARIES
from support.python import environment, run_python
from support.ranks import distributed
from support.surface.ranks import everyone

COMMAND = importlib.import_module("fullshard.preflight.__main__")


def test_the_versions_of_all_packages_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"fullshard-{each.folder.name}" for each in LIBRARIES]
    found = [
        SimpleNamespace(name=name, version=str(len(name))) for name in (*names, "numpy", "pip")
    ]
    found += [SimpleNamespace(name="numpy", version="old"), SimpleNamespace(name=None)]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    versions = here.facts_here().versions
    assert {*versions} == {"Python", "torch", "numpy", *names}
    assert versions["numpy"] == "5"


def problems(diagnosis: Diagnosis) -> list[Finding]:
    """All findings but those with nothing to do, and those of a busy machine."""
    busy = ("speed of hosts", "links inside hosts", "threads")
    wrong = [each for each in diagnosis.findings if each.level is not Level.OK]
    return [each for each in wrong if each.subject not in busy]


@distributed(3)
def test_ranks_of_a_good_host_are_healthy_and_get_the_same_findings(tmp_path: Path) -> None:
    diagnosis = diagnose(tmp_path)
    assert diagnosis.healthy
    assert problems(diagnosis) == []
    assert len(set(everyone(str(diagnosis)))) == 1
    subjects = [each.subject for each in diagnosis.findings]
    assert {"versions", "all-gather", "reduce-scatter", "all-reduce", "clocks", "disk"} <= {
        *subjects
    }


def test_one_process_without_ranks_is_checked_alone(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    diagnosis = diagnose(tmp_path)
    assert diagnosis.healthy
    assert "all-gather" not in [each.subject for each in diagnosis.findings]
    assert list(tmp_path.iterdir()) == []


# -- faults of one rank ---------------------------------------------------------------------------


def _other_torch(patch: pytest.MonkeyPatch) -> None:
    facts = here.facts_here()
    changed = replace(facts, versions={**facts.versions, "torch": "2.11.0"})
    patch.setattr(together, "facts_here", lambda: changed)


def _flipped_bit(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = getattr(together, name)

        def wrong(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            result: list[torch.Tensor] = right(*args, **kwargs)
            result[0].view(torch.int32)[-1] ^= 1
            return result

        patch.setattr(together, name, wrong)

    return plant


def _clock(patch: pytest.MonkeyPatch) -> None:
    now = time.time
    patch.setattr(time, "time", lambda: now() - 90)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Level, str]] = {
    "another torch": (
        _other_torch,
        Level.FAIL,
        r"versions of torch: rank 2 \(.+\) 2\.11\.0; the other ranks have 2\..+; install the same",
    ),
    "gather": (_flipped_bit("all_gather_tensors"), Level.FAIL, "all-gather: rank 2 got wrong num"),
    "reduction": (
        _flipped_bit("reduce_scatter_tensors"),
        Level.FAIL,
        "reduce-scatter: rank 2 got wrong numbers; do not train",
    ),
    "clock": (_clock, Level.WARN, r"clocks: beside rank 0: rank 2 -\d+\.\d s; synchronise"),
    "shared memory": (
        lambda patch: patch.setattr(here, "LEAST_SHARED", 1 << 60),
        Level.WARN,
        "shared memory: rank 2: .* free in /dev/shm; give the container more",
    ),
    "open files": (
        lambda patch: patch.setattr(resource, "getrlimit", lambda _: (1024, 2048)),
        Level.WARN,
        r"open files: rank 2: at most 1024; `ulimit -n 4096`",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@distributed(3)
def test_a_fault_of_one_rank_is_named_on_every_rank(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, level, text = FAULTS[name]
    if dist.get_rank() == 2:
        plant(monkeypatch)
    found = problems(diagnose())
    monkeypatch.undo()
    assert [(each.level, each.ranks) for each in found] == [(level, (2,))]
    assert Diagnosis(found).healthy == (level is Level.WARN)
    assert re.search(text, str(found[0]))
    assert len(set(everyone(str(found[0])))) == 1


def _facts(host: str, **changes: Any) -> here.Facts:
    return replace(here.facts_here(), host=host, cores=4, threads=1, loopback=False, **changes)


MACHINES: dict[str, tuple[list[here.Facts], str]] = {
    "uneven": ([_facts("a"), _facts("a"), _facts("b")], "a has 2, b has 1; start the same number"),
    "threads": (
        [replace(_facts("a"), threads=4, device="cpu") for _ in range(2)],
        "a: 2 ranks have 8 threads on 4 cores; set OMP_NUM_THREADS=2",
    ),
    "loopback": (
        [_facts("a"), replace(_facts("b"), loopback=True)],
        "the host name of rank 1 is a loopback address; set GLOO_SOCKET_IFNAME",
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_machines_that_do_not_fit_are_named(name: str) -> None:
    facts, text = MACHINES[name]
    found = [each for each in together._compare_machines(facts) if each.level is not Level.OK]
    assert [text in str(each) for each in found] == [True]


def test_layers_of_several_versions_are_a_failure() -> None:
    facts = _facts("a")
    versions = {**facts.versions, "fullshard-comm": "0.1.0", "fullshard-wire": "0.2.0"}
    found = here.check_here(replace(facts, versions=versions))
    assert [str(each) for each in found if each.level is Level.FAIL] == [
        f"FAIL  layers: {', '.join(f'{n} {v}' for n, v in versions.items() if 'fullshard' in n)}; "
        "install one version of all fullshard packages"
    ]


def test_a_folder_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = here.check_disk(tmp_path / "file" / "below")
    assert found.level is Level.FAIL
    assert "Not a directory; choose a folder" in str(found)


# -- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(8))
def test_rounds_have_each_pair_once_and_no_rank_twice(count: int) -> None:
    rounds = pairs_by_round(range(count))
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == sorted((a, b) for b in range(count) for a in range(b))
    for each in rounds:
        ranks = [rank for pair in each for rank in pair]
        assert len(ranks) == len(set(ranks))


def _links(count: int, slow: Callable[[int, int], bool]) -> list[Pair]:
    return [
        Pair((a, b), 2e-3 if slow(a, b) else 1e-4, 1e8 if slow(a, b) else 1e9)
        for b in range(count)
        for a in range(b)
    ]


JUDGED: dict[str, tuple[list[Pair], list[tuple[int, ...]]]] = {
    "alike": (_links(4, lambda a, b: False), []),
    "one slow rank of three": (_links(3, lambda a, b: 2 in (a, b)), [(2,)]),
    "one slow rank of four": (_links(4, lambda a, b: 1 in (a, b)), [(1,)]),
    "one slow pair": (_links(4, lambda a, b: (a, b) == (0, 3)), [(0, 3)]),
    "a rank and a pair": (_links(6, lambda a, b: 2 in (a, b) or (a, b) == (4, 5)), [(2,), (4, 5)]),
    "two ranks": (_links(2, lambda a, b: True), []),
}


@pytest.mark.parametrize("name", JUDGED)
def test_a_slow_rank_is_told_from_a_slow_pair(name: str) -> None:
    links, expected = JUDGED[name]
    found = together._judged("links", links, [f"host{rank}" for rank in range(6)])
    assert [each.ranks for each in found if each.level is Level.WARN] == expected


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [False, True])
@distributed(2)
def test_the_command_prints_on_rank_0_and_ends_with_a_code(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken:
        _flipped_bit("all_gather_tensors")(monkeypatch)
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = COMMAND.main(["doctor", "--json"])
    assert code == int(broken)
    if dist.get_rank() == 0:
        result = json.loads(printed.getvalue())
        assert result["healthy"] is not broken
        levels = {each["subject"]: each["level"] for each in result["findings"]}
        assert levels["all-gather"] == ("fail" if broken else "ok")
    else:
        assert printed.getvalue() == ""


@pytest.mark.matrix
def test_the_command_starts_ranks_by_itself(tmp_path: Path) -> None:
    words = ["doctor", "--ranks", "2", "--folder", str(tmp_path)]
    printed = run_python("-m", "fullshard.preflight", *words)
    assert "2 ranks on 1 host" in printed
    assert printed.splitlines()[-1].endswith("0 failures")


@pytest.mark.matrix
def test_a_slow_link_and_a_wrong_library_are_named_between_hosts(tmp_path: Path) -> None:
    check_network("1gbit")
    assert shutil.which("tc")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from dataclasses import replace\n"
        "from fullshard.preflight.doctor import here, together\n"
        "import importlib\n"
        "if os.environ['RANK'] == '1':\n"
        "    facts = here.facts_here()\n"
        "    wrong = replace(facts, versions={**facts.versions, 'torch': '2.11.0'})\n"
        "    together.facts_here = lambda: wrong\n"
        "main = importlib.import_module('fullshard.preflight.__main__').main\n"
        "sys.exit(main(['doctor']))\n"
    )
    with Hosts(3, "1gbit") as hosts:
        slow = hosts._names[2]
        limit = ("root", "tbf", "rate", "50mbit", "burst", "131072", "latency", "50ms")
        tc = ["ip", "netns", "exec", slow, "tc", "qdisc", "replace", "dev", "cable", *limit]
        subprocess.run(tc, check=True)
        rendezvous = {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": "3"}
        given = environment(**hosts.environment, **rendezvous)
        ranks = [
            subprocess.Popen(
                [*hosts.prefix(rank), sys.executable, str(program)],
                env={**given, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        outputs = [rank.communicate(timeout=200) for rank in ranks]
    printed = outputs[0][0]
    assert [rank.returncode for rank in ranks] == [1, 1, 1], outputs
    assert "versions of torch: rank 1 (host1) 2.11.0; the other ranks have" in printed
    assert "links between hosts: slow at best: rank 2 (host2)" in printed

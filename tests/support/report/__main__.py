"""Runs everything that is worth knowing of a card: ``python -m support.report --out FOLDER``.

It writes ``report.md`` and ``report.json``; the first line of the former tells whether all held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from fullshard.preflight import plan
from fullshard.sharding import fully_shard
from support.chosen import CHOSEN
from support.report.measure import measure
from support.report.models import Model, models
from support.report.text import failed_parts, report_text

TESTS = Path(__file__).parents[2]
SANITIZED = ("gpu/test_streams.py", "gpu/test_world_of_one.py")
PLANNED_WITHIN = 0.1  # of the measured peak


def main() -> int:
    """Run all parts, write the report, and return 0 if all held."""
    parser = argparse.ArgumentParser(prog="nox -s gpu --", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "async"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-report"))
    parser.add_argument("--tests", nargs="*", default=["gpu"], help="paths below tests/")
    options = parser.parse_args()
    small = options.device == "async"
    if small:
        os.environ[CHOSEN] = "async"
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    found: dict[str, Any] = {"device": _device(small), "torch": torch.__version__}
    found["tests"] = _run_tests(options.tests, small, {})
    sanitized: dict[str, Any] = {"ran": False, "held": True}
    if not small:
        sanitized = _run_tests(SANITIZED, small, {"TORCH_CUDA_SANITIZER": "1"})
    found["sanitizer"] = sanitized
    world_size = 2 if small else min(2, torch.cuda.device_count())
    found["ranks"] = world_size
    found |= _measured(world_size, small, options.out)
    found["seconds"] = round(time.time() - started)
    found["failed"] = failed_parts(found)
    (options.out / "report.json").write_text(json.dumps(found, indent=1))
    text = report_text(found)
    (options.out / "report.md").write_text(text)
    print(text)
    print(f"written: {options.out}/report.md, report.json, trace.json")
    return 1 if found["failed"] else 0


def _device(small: bool) -> str:
    if small:
        return "the asynchronous device of tests/support/device"
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"


def _run_tests(paths: Any, small: bool, environment: dict[str, str]) -> dict[str, Any]:
    """Run tests marked gpu in a process of their own; return what passed, and what did not."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu"]
        command += [f"--junitxml={results}", *[str(TESTS / path) for path in paths]]
        command += ["--device", "async"] if small else []
        code = subprocess.run(command, env=os.environ | environment, cwd=TESTS.parent).returncode
        cases = ElementTree.parse(results).iter("testcase") if results.exists() else []
        outcomes = {"passed": 0, "skipped": 0}
        failed = []
        for case in cases:
            bad = case.find("failure") is not None or case.find("error") is not None
            if bad:
                failed.append(f"{case.get('classname')}.{case.get('name')}")
            else:
                outcomes["passed" if case.find("skipped") is None else "skipped"] += 1
    return {"ran": True, "held": code == 0, "failed": failed, **outcomes}


def _measured(world_size: int, small: bool, out: Path) -> dict[str, Any]:
    """Measure on all ranks, and plan each model; return both by model, and libraries' bytes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (world_size, folder, small), world_size)
        measured: dict[str, Any] = json.loads(Path(folder, "measured.json").read_text())
        (out / "trace.json").write_bytes(Path(folder, "trace.json").read_bytes())
    found = measured["models"]
    for name, model in models(small).items():
        ours, theirs = (found[name][engine] for engine in ("fullshard", "torch"))
        found[name]["planned_bytes"] = planned = _planned(model, world_size)
        ratio = ours["peak_bytes"] / theirs["peak_bytes"]
        found[name]["held"] = {
            "losses": ours["losses"] == theirs["losses"],
            "memory": not model.bar or world_size == 1 or ratio <= model.bar,
            "plan": abs(planned / ours["peak_bytes"] - 1) <= PLANNED_WITHIN,
        }
    return measured


def _planned(model: Model, world_size: int) -> int:
    def shard(module: Any, mesh: Any) -> None:
        for unit in model.units(module):
            fully_shard(unit, mesh=mesh)
        fully_shard(module, mesh=mesh)

    return plan(model.build, lambda: model.batch(0), model.loss, mesh=world_size, shard=shard).peak


if __name__ == "__main__":
    sys.exit(main())

"""Prove that an installed member works without those above it: ``prove_layer.py fullshard-comm``.

Run by ``nox -s build`` with ``python -I`` in an environment that holds one built wheel and the
layers below it. Owns what "works" means for each layer, at world size 1. It imports nothing of the
checkout.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["PROOFS", "main"]


def prove_comm() -> str:
    """Moves a list of tensors of two dtypes there and back."""
    from fullshard.comm import TensorSpec, all_gather_tensors, reduce_scatter_tensors

    full = [torch.arange(6.0).view(3, 2), torch.arange(5, dtype=torch.int64)]
    specs = [TensorSpec(shape=tuple(each.shape), dtype=each.dtype) for each in full]
    world = dist.group.WORLD
    assert world is not None, "main() started it"
    gathered = all_gather_tensors(full, specs, world)
    _require(all(map(torch.equal, gathered, full)), "a gather at world 1 changed a tensor")
    (mean,) = reduce_scatter_tensors([full[0]], None, world)
    _require(torch.equal(mean, full[0]), "a mean over one rank changed a gradient")
    return "gathered two tensors and reduced one"


def prove_wire() -> str:
    """Reduces one gradient whose parts travel in bf16, and finds its rounded value."""
    from fullshard.comm import (
        CommStreams,
        Layout,
        ReduceConfig,
        TensorSpec,
        default_reduce_scatter,
        reduction_scaling,
    )
    from fullshard.wire import WidenedReducePlan, WirePolicy

    world, full = dist.group.WORLD, torch.randn(5)
    assert world is not None
    spec = TensorSpec(shape=(5,), dtype=torch.float32)
    form = WirePolicy(reductions=torch.bfloat16).reduced_as("weight", spec, 1, full.device)
    config = ReduceConfig(
        comm=default_reduce_scatter(world),
        process_group=world,
        streams=CommStreams(full.device),
        device=full.device,
        scaling=reduction_scaling(1, torch.float32, averages=False),
    )
    plan = WidenedReducePlan(Layout([spec], 1), [form], config)
    (shard,) = plan.launch([full]).wait().shards
    _require(torch.equal(shard, full.bfloat16().float()), "a part was not rounded to bf16 once")
    return "reduced one gradient that travelled in bf16"


def prove_sharding() -> str:
    """Trains three steps with no policy at all, as plain torch does."""
    from fullshard.sharding import fully_shard

    return _train(lambda model: fully_shard(model))


def prove_policies() -> str:
    """Trains three steps, wrapped by class, in mixed precision that changes no dtype."""
    from fullshard.policies import ClassWrap, MixedPrecisionPolicy, wrap

    precision = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    return _train(lambda model: wrap(model, ClassWrap(nn.Linear), mp_policy=precision))


def prove_insight() -> str:
    """Counts the reductions of a step, and watches where its time goes."""
    from fullshard.insight import SlowRanks, statistics
    from fullshard.sharding import fully_shard

    model = fully_shard(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters())
    with SlowRanks() as watch:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    found = statistics(model, slow_ranks=watch)
    _require(found.total.reductions == 1, f"{found.total.reductions} reductions in a step of one")
    steps = found.slow_ranks.steps if found.slow_ranks else ()
    _require(steps == (1,), f"the steps that were watched are {steps}, not one")
    return "counted one reduction and watched one step"


def prove_checkpoint() -> str:
    """Saves an optimizer's state by names, and loads it into another optimizer."""
    from fullshard.checkpoint import full_optim_state_dict, shard_full_optim_state_dict
    from fullshard.sharding import fully_shard

    model = fully_shard(nn.Linear(4, 3))
    optimizer, other = (torch.optim.Adam(model.parameters()) for _ in range(2))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = full_optim_state_dict(model, optimizer)
    _require(state["state"].keys() == {"weight", "bias"}, "the state is not by names")
    other.load_state_dict(shard_full_optim_state_dict(state, model, optim=other))
    again = full_optim_state_dict(model, other)["state"]["weight"]["exp_avg"]
    same = torch.equal(again, state["state"]["weight"]["exp_avg"])
    _require(same, "a state that was loaded is not what was saved")
    return "carried an optimizer's state into another"


def prove_optim() -> str:
    """Steps a sharded matrix and the same one unsharded by Muon."""
    from fullshard.optim import Muon
    from fullshard.sharding import fully_shard

    models = [nn.Linear(4, 3, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fully_shard(models[0])
    for model in models:
        model(torch.ones(2, 4)).square().sum().backward()
        Muon(model.parameters()).step()
    sharded: Any = models[0].weight
    same = torch.equal(sharded.full_tensor(), models[1].weight)
    _require(same, "Muon on a shard is not Muon")
    return "stepped a sharded matrix by Muon as the whole one"


def prove_preflight() -> str:
    """Compares a sharded model with the unsharded one, in a world of one."""
    from fullshard.preflight import verify
    from fullshard.sharding import fully_shard

    verdict = verify(
        lambda: nn.Linear(4, 3),
        fully_shard,
        torch.ones(2, 4),
        lambda model, batch: model(batch).square().mean(),
    )
    verdict.require()
    return "found a sharded model equal to the unsharded one"


def prove_elastic() -> str:
    """Shards a model for a run of replica groups, and finds what is wrong with options."""
    from fullshard.elastic import ElasticOptions

    options = ElasticOptions(lighthouse="http://127.0.0.1:29510", group="a")
    _require(options.timeout == 60.0, "the default timeout is 60 seconds")
    try:
        ElasticOptions(lighthouse="127.0.0.1", group="a")
    except ValueError:
        return "took the options of a replica group; torchft is an extra"
    raise SystemExit("prove_layer: an address without a port was taken")


def prove_wrappers() -> str:
    """Trains three steps through the import line that users of torch's own FSDP change."""
    from fullshard.wrappers.fsdp import MixedPrecisionPolicy, fully_shard

    return _train(lambda model: fully_shard(model, mp_policy=MixedPrecisionPolicy()))


def prove_cli() -> str:
    """Runs the console script: it plans a script of its own."""
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(sysconfig.get_path("scripts"), "fullshard"))
        for words in (["init", "--yes"], ["plan", "train.py", "--mesh", "64", "--json"]):
            result = subprocess.run([script, *words], cwd=folder, capture_output=True, text=True)
            _require(result.returncode == 0, result.stderr)
        (planned,) = json.loads(result.stdout)
        _require(planned["mesh"] == [64], f"the mesh is {planned['mesh']}")
    return "the console script wrote a training script and planned it on 64 ranks"


def prove_all() -> str:
    """Imports each layer from one install."""
    for library in _LIBRARIES:
        importlib.import_module(library.replace("-", "."))
    return "brought every layer"


def prove_train() -> str:
    """Runs the console script for two steps on a text of its own."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("to be, or not to be, that is the question; " * 400)
        sizes = ("model.layers=1", "model.width=16", "model.heads=2", "model.context=16")
        settings = (*sizes, "data.block_bytes=256", "train.batch=2", "sample.length=8")
        script = Path(sysconfig.get_path("scripts"), "fullshard-train")
        command = [str(script), f"--data={text}", "--steps=2", f"--out={folder}/run"]
        for setting in settings:
            command += ["--set", setting]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        _require(result.returncode == 0, result.stderr)
        _require(Path(folder, "run", "checkpoints").is_dir(), "the trainer left no checkpoint")
    return "the console script trained two steps and left a checkpoint"


def prove_bench() -> str:
    """Runs the console script on one rank, and compares its result with itself."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(sysconfig.get_path("scripts"), "fullshard-bench")
        sizes = ("--model", "many:groups=2,width=8", "--tokens", "2", "--steps", "2")
        run = [str(script), "run", "--mesh", "1", *sizes, "--out", f"{folder}/result"]
        both = [str(script), "compare", f"{folder}/result.json", f"{folder}/result.json"]
        for command in (run, both):
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            _require(result.returncode == 0, result.stderr)
        (run_result,) = json.loads(Path(folder, "result.json").read_text())["runs"]
        statuses = {each["status"] for each in run_result["points"][0]["entries"]}
        _require(statuses == {"ok"}, f"the contestants' losses are {statuses}")
    return "the console script measured one rank and compared the result"


def _train(shard: Callable[[nn.Module], object]) -> str:
    """Compares three steps of a small model, sharded by ``shard``, with plain torch."""
    losses = []
    for sharder in (lambda model: model, shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        inputs = torch.randn(6, 4)
        sharder(model)
        optimizer = torch.optim.AdamW(model.parameters())
        run = []
        for _ in range(3):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.append(loss.item())
        losses.append(run)
    _require(losses[0] == losses[1], f"losses {losses[1]} are not plain torch's {losses[0]}")
    return "trained three steps to plain torch's losses, bit for bit"


def prove_samehost() -> str:
    """Is the default between several ranks, and moves nothing for one."""
    from fullshard.comm.spi import DEFAULTS
    from fullshard.samehost import AutomaticTransport, same_host_transport

    _require(DEFAULTS[-1] == AutomaticTransport(), f"the default is {DEFAULTS[-1]}")
    world = dist.group.WORLD
    assert world is not None
    said = str(same_host_transport(world))
    _require(said == "SelfTransport()", f"one rank has {said}")
    return "is the default between ranks"


PROOFS: dict[str, Callable[[], str]] = {
    "fullshard-comm": prove_comm,
    "fullshard-samehost": prove_samehost,
    "fullshard-wire": prove_wire,
    "fullshard-sharding": prove_sharding,
    "fullshard-policies": prove_policies,
    "fullshard-insight": prove_insight,
    "fullshard-checkpoint": prove_checkpoint,
    "fullshard-optim": prove_optim,
    "fullshard-preflight": prove_preflight,
    "fullshard-elastic": prove_elastic,
    "fullshard-wrappers": prove_wrappers,
    "fullshard-cli": prove_cli,
    "fullshard": prove_all,
    "fullshard-train": prove_train,
    "fullshard-bench": prove_bench,
}


def _check_installed(name: str) -> list[str]:
    """Returns the members installed here, after checking that they are ``name`` and its needs."""
    needed, todo = {name}, [name]
    while todo:
        for requirement in importlib.metadata.requires(todo.pop()) or []:
            match = re.match(r"fullshard-[\w-]+", requirement)
            if match and match[0] not in needed:
                needed.add(match[0])
                todo.append(match[0])
    found = {each.metadata["Name"] for each in importlib.metadata.distributions()}
    present = {each for each in found if each.startswith("fullshard")}
    _require(present == needed, f"installed are {sorted(present)}, needed are {sorted(needed)}")
    for library in (each.removeprefix("fullshard-") for each in _LIBRARIES):
        there = importlib.util.find_spec("fullshard") is not None and (
            importlib.util.find_spec(f"fullshard.{library}") is not None
        )
        _require(there == (f"fullshard-{library}" in needed), f"fullshard.{library}: {there}")
    return sorted(present)


def _check_metadata(name: str) -> None:
    """Checks what an installed member says of itself, and that it is typed."""
    distribution = importlib.metadata.distribution(name)
    metadata = distribution.metadata
    _require(metadata["License-Expression"] == "Apache-2.0", "no licence in the metadata")
    readme = str(metadata.json.get("description", ""))
    _require(bool(readme), "the README is not in the metadata")
    relative = re.findall(r"\]\((?!https://|#)([^)]*)\)", re.sub(r"(?s)```.*?```", "", readme))
    _require(not relative, f"the README links to {relative}, which a registry does not have")
    named = {each.partition(",")[0] for each in metadata.get_all("Project-URL") or []}
    wanted = {"Changelog", "Documentation", "Repository"}
    _require(named == wanted, f"[project.urls] names {sorted(named)}, not {sorted(wanted)}")
    files = [str(path) for path in distribution.files or []]
    typed = any(path.endswith("/py.typed") for path in files)
    _require(typed or name == _WHOLE, "py.typed is missing")
    _require("fullshard/__init__.py" not in files, "it owns the namespace; delete that file")
    for requirement in importlib.metadata.requires(name) or []:
        if requirement.startswith("fullshard-"):
            _require(
                requirement.endswith(f"=={distribution.version}"), f"{requirement} is no equal pin"
            )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SystemExit(f"prove_layer: {message}")


def main(name: str) -> None:
    """Checks the installed member ``name`` and prints one line about it."""
    present = _check_installed(name)
    _check_metadata(name)
    for each in (other for other in present if other != _WHOLE):
        package = each.replace("-", ".", 1) if each in _LIBRARIES else each.replace("-", "_")
        where = importlib.import_module(package).__file__ or ""
        _require(where.startswith(sys.prefix), f"{package} was imported from {where}")
    # The trainer starts a process group of its own.
    if name in _LIBRARIES:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    proof = PROOFS.get(name)
    said = proof() if proof else "imported; no proof of its own"
    if name in _LIBRARIES:
        dist.destroy_process_group()
    print(f"{name} {importlib.metadata.version(name)}, with {', '.join(present)} alone: {said}")


_WHOLE = "fullshard"  # holds no code

_LIBRARIES = (
    "fullshard-comm",
    "fullshard-samehost",
    "fullshard-wire",
    "fullshard-sharding",
    "fullshard-policies",
    "fullshard-insight",
    "fullshard-checkpoint",
    "fullshard-optim",
    "fullshard-preflight",
    "fullshard-elastic",
    "fullshard-wrappers",
    "fullshard-cli",
)

if __name__ == "__main__":
    main(*sys.argv[1:])

"""What fullshard changes in a process, beside the objects that it is given: what the page lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.optim import clip_grad_norm_
from fullshard.sharding import fully_shard, unsharded
from fullshard.wrappers.fsdp1 import FullyShardedDataParallel
from support.members import LIBRARIES
from support.process_state import ProcessState
from support.python import run_python
from support.ranks import cpu_mesh, distributed, run_on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "process.md"
# A child imports everything first, and tells what else that brings: importing torch's own modules
# may change torch. The parent imports these before it looks.
_PROGRAM = """
import importlib, os, pkgutil, sys
import torch
from support.process_state import ProcessState

def import_all():
    for package in sys.argv[1:]:
        found = importlib.import_module(package)
        for each in pkgutil.walk_packages(found.__path__, found.__name__ + "."):
            if not each.name.endswith("__main__"):
                importlib.import_module(each.name)

read, write = os.pipe()
if os.fork() == 0:
    import_all()
    others = [name for name in sys.modules if name.partition(".")[0] != "fullshard"]
    os.write(write, " ".join(others).encode())
    os._exit(0)
os.close(write)
with os.fdopen(read) as lines:
    others = lines.read().split()
os.wait()
assert others
for name in others:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
before = ProcessState()
import_all()
print(sorted(before.changed()))
"""


def test_importing_every_package_changes_nothing_in_torch_or_the_process() -> None:
    printed = run_python("-c", _PROGRAM, *(each.package for each in LIBRARIES))
    assert printed.strip() == "[]"


def _listed(by: str) -> set[str]:
    """What the page's table says that ``by`` changes."""
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    found = {name for name, causes in rows if f"`{by}`" in causes}
    assert found, f"{PAGE.name} has no row about {by}"
    return found


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def _train(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _changes() -> tuple[set[str], set[str]]:
    """What ``fully_shard`` and a program with it change, and then FSDP1's wrapper."""
    distribute_tensor(torch.ones(4), cpu_mesh(), [Shard(0)]).full_tensor()
    dist.all_reduce(torch.ones(1))
    foreign = _net()
    _train(foreign)  # torch imports modules of its own, which change it
    before, random = ProcessState(), torch.get_rng_state()
    model: Any = _net()
    fully_shard(model[0])
    fully_shard(model)
    _train(model)
    _train(foreign)
    model(torch.ones(2, 8)).sum().backward()
    clip_grad_norm_(model, 1.0)
    with unsharded(model):
        pass
    model.state_dict()
    torch.set_rng_state(random)
    first = before.changed()
    before = ProcessState()
    _train(FullyShardedDataParallel(_net()))
    torch.set_rng_state(random)
    return first, before.changed()


def test_a_program_changes_what_the_page_lists_and_nothing_else() -> None:
    for by_fully_shard, by_fsdp1 in run_on_ranks(_changes, 2, fresh=True):
        assert by_fully_shard == _listed("fully_shard")
        assert by_fsdp1 == set()


@distributed(2)
def test_an_optimizer_without_sharded_parameters_gets_no_hook() -> None:
    sharded = fully_shard(_net())
    foreign, optimizers = _net(), []
    for model in (foreign, sharded):
        model(torch.ones(2, 8)).sum().backward()
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        optimizers[-1].step()
    hooks = [len(each._optimizer_step_pre_hooks) for each in optimizers]
    assert hooks == [0, 1]


@pytest.mark.parametrize("how", ["hook", "closure"])
@distributed(2)
def test_a_parameter_that_a_hook_or_a_closure_adds_is_stepped_as_any(how: str) -> None:
    model: Any = fully_shard(_net())
    expected = _net()
    found = []
    for each in (model, expected):
        each(torch.ones(2, 8)).sum().backward()
        params = list(each.parameters())
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

        def add(*given: Any, params: Any = params, optimizer: Any = optimizer) -> None:
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": params})

        with torch.no_grad():
            each(torch.ones(2, 8))  # the root stays full
        if how == "hook":
            optimizer.register_step_pre_hook(add)
            optimizer.step()
        else:
            optimizer.step(add)
        found.append(each(torch.ones(2, 8)))
    torch.testing.assert_close(*found)

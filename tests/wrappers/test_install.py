"""``install()``: wherever torch's own FSDP is looked up, ours is found, until ``uninstall()``."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as helpers

import fullshard.wrappers
from fullshard.wrappers import fsdp, fsdp1, install, replicate, uninstall
from support.fsdp1_fronts import rows
from support.members import ROOT
from support.ranks import distributed
from support.surface.model import build

THEIRS = importlib.import_module("torch.distributed.fsdp")
COMPOSABLE = importlib.import_module("torch.distributed._composable.fsdp")
REPLICATE = importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
ENGINE: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
STATE: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_state")
COMMAND = importlib.import_module("fullshard.wrappers.install.__main__")
FSDP1 = importlib.import_module("torch.distributed.fsdp.fully_sharded_data_parallel")

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(4, 2))
model(torch.ones(2, 4)).sum().backward()
assert isinstance(model, FSDPModule)
if dist.get_rank() == 0:
    kinds = (FSDPModule.__module__, FullyShardedDataParallel.__module__)
    print(__name__, sys.argv[1:], *(kind.partition(".")[0] for kind in kinds))
dist.destroy_process_group()
"""


@contextmanager
def installed() -> Iterator[Any]:
    report = install()
    try:
        yield report
    finally:
        uninstall()


@pytest.fixture
def library() -> Iterator[ModuleType]:
    """A library that bound torch's names when it was imported, one under another name."""
    module: Any = ModuleType("a_library")
    module.fully_shard, module.FSDP = THEIRS.fully_shard, THEIRS.FullyShardedDataParallel
    module.torch_fsdp, module.unrelated = THEIRS, nn.Linear
    sys.modules["a_library"] = module
    yield module
    del sys.modules["a_library"]


def test_every_name_of_torchs_own_is_ours_where_libraries_look_and_torchs_again_afterwards(
    library: Any,
) -> None:
    places = (THEIRS, COMPOSABLE, REPLICATE, FSDP1, helpers, library)
    before = [dict(vars(place)) for place in places]
    with installed() as report:
        for door, place in ((fsdp, THEIRS), (fsdp1, THEIRS), (replicate, REPLICATE)):
            for name in set(door.__all__) & set(place.__dict__):
                assert vars(place)[name] is vars(door)[name], name
        assert FSDP1.FullyShardedDataParallel is fsdp1.FullyShardedDataParallel
        assert COMPOSABLE.fully_shard is library.fully_shard is fsdp.fully_shard
        assert library.FSDP is fsdp1.FullyShardedDataParallel
        assert (library.torch_fsdp, library.unrelated) == (THEIRS, nn.Linear)
        assert "  a_library: FSDP, fully_shard" in str(report).splitlines()
        assert install().bindings == report.bindings  # once is enough
    assert [dict(vars(place)) for place in places] == before


def test_a_name_that_somebody_gave_a_third_meaning_since_keeps_it(library: Any) -> None:
    with installed():
        library.fully_shard = nn.Linear
    assert library.fully_shard is nn.Linear
    assert library.FSDP is THEIRS.FullyShardedDataParallel


def test_torchs_pipeline_schedules_and_its_engine_keep_their_own() -> None:
    stage = importlib.import_module("torch.distributed.pipelining.stage")
    engine = ENGINE
    before = stage.FSDPModule, dict(vars(engine))
    with installed():
        assert stage.FSDPModule is before[0]
        own = vars(engine).copy()
        assert all(own[name] is value for name, value in before[1].items())  # what its code reads
        assert engine.FSDPModule is fsdp.FSDPModule  # what others do
    assert (stage.FSDPModule, dict(vars(engine)), type(engine)) == (*before, ModuleType)


@distributed(2)
def test_private_names_are_ours_for_libraries_and_torchs_for_its_engine() -> None:
    state_of, torchs_state_of = STATE._get_module_fsdp_state, STATE.FSDPState
    before = THEIRS.fully_shard(nn.Linear(4, 4))
    library = ModuleType("a_library_of_private_names")
    library.asked = state_of  # type: ignore[attr-defined]  # bound before
    sys.modules[library.__name__] = library
    try:
        with installed():
            ours: Any = THEIRS.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
            for asked in (STATE._get_module_fsdp_state, library.asked):
                assert isinstance(asked(ours), STATE.FSDPState)
                assert isinstance(asked(before), torchs_state_of)
                assert asked(nn.Linear(4, 4)) is None
            state = ours._get_fsdp_state()
            assert THEIRS.fully_shard.state(ours)._mp_policy == state._mp_policy
            assert state._mp_policy.param_dtype is None
            assert state._fsdp_param_group.mesh_info.mesh.size() == 2
            assert THEIRS.fully_shard.state(nn.ReLU()) is None
            with pytest.raises(AttributeError, match="_state_ctx"):
                _ = state._state_ctx
            ENGINE.FSDPModule, seen = nn.Linear, ENGINE.FSDPModule  # as verl does for a while
            before(torch.ones(2, 4)).sum().backward()
            ENGINE.FSDPModule = seen
            assert before.weight.grad is not None
            assert isinstance(before, vars(ENGINE)["FSDPModule"])
        assert (library.asked, STATE._get_module_fsdp_state) == (state_of, state_of)
        assert not hasattr(ours, "_get_fsdp_state")
    finally:
        del sys.modules[library.__name__]


@distributed(2)
def test_a_training_state_that_is_set_to_idle_ends_a_step_that_raised() -> None:
    states = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    with installed():
        model = THEIRS.fully_shard(build())
        group = model._get_fsdp_state()._fsdp_param_group
        assert group._training_state is states.TrainingState.IDLE

        def fail(*_: object) -> None:
            assert group._training_state is states.TrainingState.PRE_BACKWARD
            raise ArithmeticError

        handle = model.head.register_full_backward_hook(fail)
        with pytest.raises(ArithmeticError):
            model(rows(0)).sum().backward()
        assert group._training_state is not states.TrainingState.IDLE
        group._training_state = states.TrainingState.IDLE
        assert group._training_state is states.TrainingState.IDLE
        handle.remove()
        model.reshard()
        model(rows(0)).sum().backward()
        with pytest.raises(ValueError, match="expected IDLE"):
            group._training_state = states.TrainingState.FORWARD


def test_the_name_is_a_function_whoever_imports_the_package_of_that_name() -> None:
    importlib.import_module("fullshard.wrappers.install")
    assert callable(fullshard.wrappers.install)


def _fsdp1() -> Any:
    """A model wrapped as a library does: by the names that it finds in torch."""
    torch.manual_seed(0)
    model = build()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FSDP1.FullyShardedDataParallel(
            block, use_orig_params=True, device_id=torch.device("cpu")
        )
    return FSDP1.FullyShardedDataParallel(
        model,
        use_orig_params=True,
        device_id=torch.device("cpu"),
        sharding_strategy=FSDP1.ShardingStrategy.SHARD_GRAD_OP,
    )


def _saved_by_helpers(options: Any) -> tuple[Any, Any, torch.Tensor]:
    """State of model and optimizer by torch's helpers after two steps, and a loss when loaded."""
    trained, other = _fsdp1(), _fsdp1()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (trained, other)]
    for step in range(2):
        trained(rows(step)).square().sum().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
    state = helpers.get_state_dict(trained, optimizers[0], options=options)
    # What is loaded is changed in place: whole tensors are cut, steps are counted on.
    kept = copy.deepcopy(state) if options.full_state_dict else state
    helpers.set_state_dict(
        other,
        optimizers[1],
        model_state_dict=state[0],
        optim_state_dict=state[1],
        options=options,
    )
    other(rows(2)).square().sum().backward()
    optimizers[1].step()
    return (*kept, other(rows(3)).detach())


@pytest.mark.filterwarnings("ignore")  # torch's own FSDP1 warns of what it calls itself
@distributed(2)
def test_the_state_dict_helpers_of_torchs_checkpoints_take_a_model_wrapped_by_ours() -> None:
    """They ask for FSDP1's class, and for a state that only torch's own has."""
    for options in (
        helpers.StateDictOptions(),
        helpers.StateDictOptions(full_state_dict=True),
    ):
        right = _saved_by_helpers(options)
        with installed():
            got = _saved_by_helpers(options)
        assert got[0].keys() == right[0].keys()
        assert got[1]["state"].keys() == right[1]["state"].keys()
        assert got[1]["param_groups"] == right[1]["param_groups"]
        torch.testing.assert_close(got[2], right[2])
        if options.full_state_dict:
            torch.testing.assert_close(got[0], right[0])
            torch.testing.assert_close(got[1]["state"], right[1]["state"])


@pytest.mark.matrix
def test_a_module_runs_unchanged_behind_the_command(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(each) for each in ROOT.glob("*/*/src")),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "fullshard.wrappers.install", "-m", "program", "--lr", "1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n")[0] == "__main__ ['--lr', '1'] fullshard fullshard"
    assert "names in 15 places are ours" in ended.stderr
    assert "sharded no model" not in ended.stderr


def test_a_program_that_sharded_nothing_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    mixin = type("Mixin", (), {})
    monkeypatch.setattr(COMMAND, "FSDPModule", mixin)  # other tests of this process shard models
    replicated = type("Replicated", (mixin,), {})
    for classes in ((), (replicated, nn.Linear)):
        kept = type("Sharded", classes, {}) if classes else None
        try:
            COMMAND.main([str(script)])
        finally:
            uninstall()
        said = f"{script} sharded no model: each rank had a whole one; call fully_shard(model)"
        assert (said in capsys.readouterr().err) == (kept is None)


def test_so_does_a_script_with_its_folder_on_the_path_and_options_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text("from torch.distributed.fsdp import fully_shard")
    (tmp_path / "script.py").write_text(
        "import sys, beside; print(__name__, sys.argv[1:], beside.fully_shard.__module__)"
    )
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    try:
        COMMAND.main([str(tmp_path / "script.py"), "--help", "-m"])
    finally:
        uninstall()
    assert (
        capsys.readouterr().out == "__main__ ['--help', '-m'] fullshard.sharding.api.fully_shard\n"
    )

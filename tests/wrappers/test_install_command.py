"""``python -m fullshard.wrappers.install``: its options, and Accelerate on CPU ranks."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from fullshard.wrappers import install, uninstall
from fullshard.wrappers.install.__main__ import main

# What cpu_ranks relies on, as in Accelerate 1.15; nox -s clients has the library itself.
_STATE = """
import os

class DistributedType:
    MULTI_CPU, MULTI_GPU, FSDP = "cpus", "gpus", "fsdp"

class PartialState:
    _shared_state = {}

    def __init__(self, cpu=False):
        self._shared_state["distributed_type"] = DistributedType.MULTI_CPU

class AcceleratorState:
    _shared_state = {}

    def __init__(self, cpu=False, fsdp_plugin=None, **kwargs):
        if not PartialState._shared_state:
            PartialState(cpu, **kwargs)
        self.__dict__ = self._shared_state
        if not self._shared_state:
            self.distributed_type = PartialState._shared_state["distributed_type"]
            if self.distributed_type == DistributedType.MULTI_GPU and fsdp_plugin is not None:
                self.distributed_type = DistributedType.FSDP
"""


@pytest.fixture
def accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").touch()
    (tmp_path / "accelerate" / "state.py").write_text(_STATE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    for name in ("accelerate", "accelerate.state"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def _decided(shard_on_cpu: bool, plugin: object, *, import_first: bool) -> tuple[Any, list[str]]:
    """How the library would train, and the warnings."""
    if import_first:
        import accelerate.state
    install(shard_on_cpu=shard_on_cpu)
    try:
        import accelerate.state

        state = accelerate.state
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decided = state.AcceleratorState(cpu=True, fsdp_plugin=plugin)
            state.AcceleratorState()
        return decided.distributed_type, [str(each.message) for each in caught]
    finally:
        uninstall()
        sys.modules.pop("accelerate.state", None)
        sys.modules.pop("accelerate", None)


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("import_first", [False, True])
def test_accelerate_on_cpu_ranks_is_warned_of_once_or_made_to_shard(import_first: bool) -> None:
    decided, said = _decided(False, object(), import_first=import_first)
    assert decided == "cpus"
    assert len(said) == 1
    assert "--shard-on-cpu" in said[0]


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("import_first", [False, True])
def test_with_the_switch_accelerate_shards_on_cpu_ranks(import_first: bool) -> None:
    assert _decided(True, object(), import_first=import_first) == ("fsdp", [])


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("shard", [False, True])
def test_accelerate_without_a_plugin_is_left_alone(shard: bool) -> None:
    assert _decided(shard, None, import_first=False) == ("cpus", [])


@pytest.mark.usefixtures("accelerate")
def test_uninstall_leaves_neither_a_finder_nor_a_changed_class() -> None:
    before = list(sys.meta_path)
    install()
    uninstall()
    assert sys.meta_path == before
    import accelerate.state

    assert accelerate.state.AcceleratorState.__init__.__module__ == "accelerate.state"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--help", 0, "usage: python -m fullshard.wrappers.install"),
        ("--version", 0, "fullshard.wrappers.install 0."),
        ("", 2, "there is nothing to run"),
        ("-m", 2, "there is nothing to run"),
        ("--shard-on-cup train.py", 2, "did you mean --shard-on-cpu?"),
    ],
)
def test_help_is_no_error_and_a_mistake_is_one(
    words: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == code
    shown = capsys.readouterr()
    assert said in (shown.err if code else shown.out)

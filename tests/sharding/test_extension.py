"""The contract for extensions: where each method is called, and what an extension sees there."""

from __future__ import annotations

import ast
import contextlib
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import installed
from fullshard.sharding import (
    EXTENSIONS,
    ExtendedGroup,
    FSDPParamGroup,
    GroupExtension,
    OffloadToCPU,
    RootExtension,
    ShardedState,
    StepExtension,
    extend_groups,
    extension,
    fully_shard,
    unsharded,
)
from support.members import MEMBERS
from support.ranks import distributed

METHODS = [name for name in vars(GroupExtension) if not name.startswith("_")]
OF_ROOTS = [name for name in vars(RootExtension) if not name.startswith("_")]
OF_STEPS = [name for name in vars(StepExtension) if not name.startswith("_")]
CORE = ("fullshard-comm", "fullshard-sharding")
CORE_PACKAGES = ("", "fullshard.comm", "fullshard.sharding")


class Log(GroupExtension):
    """Writes down each call, with the state of the group."""

    lines: list[str]

    def __init__(self, group: ExtendedGroup) -> None:
        super().__init__(group)
        self.lines = []

    def _note(self, name: str) -> None:
        assert isinstance(self.group, FSDPParamGroup)
        self.lines.append(f"{name} {self.group.state.name}")

    def before_gather(self, *, from_copies: bool) -> None:
        self._note("before_gather" + (" from copies" if from_copies else ""))


def _noting(name: str) -> Any:
    return lambda self, *args: self._note(name)


for _name in METHODS:
    if _name not in vars(Log):
        setattr(Log, _name, _noting(_name))


def _sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model)


def _net(**options: Any) -> tuple[Any, list[Any]]:
    model = _sharded(**options)
    return model, extend_groups(model, Log)


def _calls_in(path: Path) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [call.func.attr for call in calls if isinstance(call.func, ast.Attribute)]


def test_the_core_calls_each_method_at_one_place() -> None:
    sources = [each.folder / "src" for each in MEMBERS if each.name in CORE]
    files = [path for source in sources for path in source.rglob("*.py")]
    assert len(sources) == 2
    methods = [*METHODS, *OF_ROOTS, *OF_STEPS]
    found = Counter(name for path in files for name in _calls_in(path) if name in methods)
    assert found == dict.fromkeys(methods, 1)


def test_the_core_names_packages_that_extend_it_in_one_file_only() -> None:
    names = [each.package for each in MEMBERS if each.package not in CORE_PACKAGES]
    assert {"fullshard.insight", "fullshard.policies"} <= {*names}
    sources = [each.folder / "src" for each in MEMBERS if each.name in CORE]
    found = {
        (path.name, name)
        for source in sources
        for path in source.rglob("*.py")
        for name in names
        if re.search(rf"import.*{re.escape(name)}|[\"']{re.escape(name)}[\"']", path.read_text())
    }
    named = (*installed.TRANSPORTS, *installed.EXTENSIONS)
    assert found == {("installed.py", name) for name in named}


# What extensions are about. A branch of the core for one of them would have a name for it.
FEATURES = {
    "samehost": ("samehost", "memfd", "segment"),
    "insight": ("debug", "desync", "integrity", "slow", "on_read"),
    "policies": ("canonicalorder", "coalesc", "bucket", "resident", "file_offload"),
    "wire": ("quantis", "codec", "coded"),
    "optim": ("shadow", "clip", "adamw", "muon"),
    "elastic": ("torchft", "lighthouse", "quorum"),
}


@pytest.mark.parametrize("package", FEATURES)
def test_no_name_in_the_code_of_the_core_is_about_a_feature_of(package: str) -> None:
    sources = [each.folder / "src" for each in MEMBERS if each.name in CORE]
    files = [path for source in sources for path in source.rglob("*.py")]
    found = set()
    for path in files:
        with tokenize.open(path) as file:
            tokens = tokenize.generate_tokens(file.readline)
            names = {each.string for each in tokens if each.type == tokenize.NAME}
        about = [name for name in names if any(w in name.lower() for w in FEATURES[package])]
        found |= {(path.name, name) for name in about}
    assert len(files) > 80
    assert not found


STEP = [
    "before_gather SHARDED",
    "after_gather UNSHARDED",
    "around_forward UNSHARDED",
    "before_reshard UNSHARDED",
    "before_gather SHARDED",
    "after_gather UNSHARDED",
    "before_reshard UNSHARDED",
    "on_commit SHARDED",
    "on_step SHARDED",
]


@distributed(2)
def test_a_step_calls_the_methods_of_each_group_in_their_order() -> None:
    model, logs = _net(reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert [log.lines for log in logs] == [STEP * 2] * 2
    assert [log.group.name for log in logs] == ["0", "1"]


@distributed(2)
def test_full_parameters_that_stay_are_idle_until_they_are_used_again() -> None:
    model, (log, _) = _net(reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    lines = ["on_idle", "on_reuse", "around_forward", "on_idle"]
    assert log.lines[3:] == [f"{line} UNSHARDED" for line in lines]


class _Around(GroupExtension):
    """Runs each forward in a context that writes down when it begins and ends."""

    def around_forward(
        self, name: str, groups: Sequence[ExtendedGroup], begin_backward: object
    ) -> Any:
        self.lines: list[str] = []
        return self._context(f"{name} with {[group.name for group in groups]}")

    @contextmanager
    def _context(self, forward: str) -> Iterator[None]:
        self.lines.append(f"begin {forward}")
        yield
        self.lines.append(f"end {forward}")


@pytest.mark.parametrize("error", [None, ArithmeticError, KeyboardInterrupt])
@distributed(2)
def test_a_forward_runs_in_the_contexts_of_extensions(error: type[BaseException] | None) -> None:
    model, _ = _net()
    around: Any = extend_groups(model[0], _Around)[0]

    def hook(module: nn.Module, args: object) -> None:
        assert around.lines == ["begin 0 with ['0']"]
        if error is not None:
            raise error

    model[0].register_forward_pre_hook(hook)
    with contextlib.suppress(*[error] if error else []):
        model(torch.ones(2, 4))
    model.reset_iter_state()
    assert around.lines == ["begin 0 with ['0']", "end 0 with ['0']"]


@distributed(2)
def test_gradients_are_in_place_when_they_are_committed() -> None:
    seen: list[int] = []

    class Sees(GroupExtension):
        def on_commit(self) -> None:
            seen.extend(param.sharded.grad is not None for param in self.group.params)

    model, _ = _net()
    extend_groups(model[0], Sees)
    model(torch.ones(2, 4)).sum().backward()
    assert seen == [True, True]


@pytest.mark.parametrize("change", ["state dict", "block", "by hand"])
@distributed(2)
def test_what_changes_parameters_is_a_step(change: str) -> None:
    model, (log, _) = _net()
    with torch.no_grad():
        model(torch.ones(2, 4))
    log.lines.clear()
    if change == "state dict":
        model.load_state_dict(model.state_dict())
    elif change == "by hand":
        model.parameters_changed()
    else:
        with unsharded(model, writeback=True), torch.no_grad():
            model[0].weight.zero_()
    assert [line for line in log.lines if line.startswith("on_step")]


@distributed(2)
def test_a_method_that_raises_ends_the_forward_and_a_reset_cleans_up() -> None:
    class Raises(GroupExtension):
        once = True

        def after_gather(self) -> None:
            if self.once:
                self.once = False
                raise ArithmeticError("of the extension")

    model, (log, _) = _net()
    extend_groups(model[1], Raises)
    with pytest.raises(ArithmeticError, match="of the extension"):
        model(torch.ones(2, 4))
    model.reset_iter_state()
    assert log.lines[-1] == "on_reset SHARDED"
    model(torch.ones(2, 4)).sum().backward()
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())


@distributed(2)
def test_what_makes_no_extension_is_refused_and_nothing_is_added() -> None:
    model, _ = _net()
    made: list[Any] = [Log, lambda group: 3]
    with pytest.raises(TypeError, match="returned a int; return a "):
        extend_groups(model, lambda group: made.pop(0)(group))
    assert all(kind is not int for kind in _kinds(model))
    assert _kinds(model).count(Log) == 2


@distributed(2)
def test_a_module_without_a_sharded_one_is_refused() -> None:
    model, _ = _net()
    for module in (nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])):
        with pytest.raises(ValueError, match="not sharded, and has no sharded module below"):
            extend_groups(module, Log)
    with pytest.raises(ValueError, match="the ModuleList is not sharded; call fully_shard"):
        extend_groups(nn.ModuleList([model]), Log, recurse=False)
    assert len(extend_groups(nn.ModuleList([model]), Log)) == 2


@distributed(2)
def test_what_raises_before_a_reshard_leaves_no_full_parameters() -> None:
    class Raises(GroupExtension):
        def before_reshard(self) -> None:
            raise ArithmeticError("of the extension")

    model, _ = _net(reshard_after_forward=False)
    extend_groups(model[0], Raises)
    with torch.no_grad():
        expected = model(torch.ones(2, 4))
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="of the extension"):
                model[0].reshard()
            assert isinstance(model[0].weight, DTensor)
            assert torch.equal(model(torch.ones(2, 4)), expected)


@distributed(2)
def test_inside_transforms_the_methods_are_called_as_in_a_step() -> None:
    model, (log, _) = _net(reshard_after_forward=True)
    torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 4))
    assert log.lines[:7] == STEP[:7]


@distributed(2)
def test_each_new_group_gets_the_extensions_of_the_process() -> None:
    where = "fullshard.sharding.groups.param_group.EXTENSIONS"
    layer = nn.Linear(2, 2)
    with mock.patch(where, [lambda group: 3]), pytest.raises(TypeError, match="a int; return"):
        fully_shard(layer)
    assert type(layer) is nn.Linear and not isinstance(layer.weight, DTensor)
    with mock.patch(where, [*EXTENSIONS, Log]):
        model, _ = _net()
    assert _kinds(model).count(Log) == 4  # with those that were added by hand


def _kinds(model: Any) -> list[type]:
    groups = {log.group for log in extend_groups(model, GroupExtension)}
    assert all(isinstance(group, FSDPParamGroup) for group in groups)
    assert all(group.state is ShardedState.SHARDED for group in groups)  # type: ignore[attr-defined]
    return [type(each) for group in groups for each in group.extensions]  # type: ignore[attr-defined]


class _RootLog(RootExtension):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def at_root(self, groups: Any) -> str:
        self.lines.append(f"root {len(groups)}")
        return ""

    def at_end(self, groups: Any) -> None:
        self.lines.append(f"end {len(groups)}")

    def at_block(self, groups: Any) -> None:
        self.lines.append(f"block {len(groups)}")

    def at_commit(self, groups: Any) -> None:
        self.lines.append(f"commit {len(groups)}")


@distributed(2)
def test_an_extension_of_roots_is_asked_where_all_ranks_are() -> None:
    model, log = _sharded(), _RootLog()
    extension.ROOT_EXTENSIONS.append(log)
    try:
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 4))
        with unsharded(model):
            pass
    finally:
        extension.ROOT_EXTENSIONS.remove(log)
    assert log.lines == ["root 2", "end 2", "commit 2", "end 2", "block 2"]


@distributed(2)
def test_what_it_finds_at_a_root_is_raised_on_all_ranks() -> None:
    class Finds(_RootLog):
        def at_root(self, groups: Any) -> str:
            return "a disk is full" if dist.get_rank() == 1 else ""

    model = _sharded()
    extension.ROOT_EXTENSIONS.append(found := Finds())
    try:
        with pytest.raises(RuntimeError, match="rank 1: a disk is full"):
            model(torch.ones(2, 4))
    finally:
        extension.ROOT_EXTENSIONS.remove(found)
    model(torch.ones(2, 4)).sum().backward()


class _StepLog(StepExtension):
    """Writes down each call."""

    def __init__(self) -> None:
        self.lines: list[str] = []


for _name in OF_STEPS:
    setattr(_StepLog, _name, lambda self, *args, name=_name: self.lines.append(name) or args[-1])


@distributed(2)
def test_a_step_calls_the_methods_of_each_optimizer_in_their_order() -> None:
    logs: list[_StepLog] = []

    def make() -> _StepLog:
        logs.append(_StepLog())
        return logs[-1]

    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters())

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    closure()  # the first forward makes what a step looks at
    extension.STEP_EXTENSIONS.append(make)
    try:
        optimizer.step(closure)
        optimizer.step()
    finally:
        extension.STEP_EXTENSIONS.remove(make)
    (log,) = logs
    around = ["before_closure", "after_closure"]
    step = ["before_step", "after_step"]
    assert log.lines == ["on_parameters", step[0], *around, step[1], *step]


@distributed(2)
def test_optimizers_step_alike_without_extensions() -> None:
    """As where the core is installed alone: they step ``DTensor``s."""
    found = []
    for extensions in (list(extension.STEP_EXTENSIONS), []):
        with mock.patch("fullshard.sharding.optim.step_hooks.STEP_EXTENSIONS", extensions):
            model = _sharded(offload_policy=OffloadToCPU())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.ones(2, 4) + dist.get_rank()).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([param.full_tensor() for param in model.parameters()])
    assert extension.STEP_EXTENSIONS, "fullshard.optim is installed"
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)

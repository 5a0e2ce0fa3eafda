"""The user's program: functions that build, shard and feed a model, by their names in a module.

``load_program`` imports a script or a module and collects the functions. ``accepted`` picks the
functions that a call takes. ``planned`` and ``raced`` run the program.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import symtable
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fullshard.preflight.planning.choices import call_shard
from fullshard.preflight.planning.plan import plan, shard_blocks
from fullshard.preflight.planning.report import Plan
from fullshard.preflight.races.report import RaceReport
from fullshard.preflight.races.watch import check
from fullshard.preflight.verification.program import Program
from fullshard.preflight.verification.verify import verify

__all__ = ["ProgramError", "accepted", "load_program", "planned", "raced"]

_NEEDED = ("build_model", "batch", "loss")
_OF_STEP = ("build_model", "batch", "step", "optimizers")  # if there is no loss
_OPTIONAL = ("shard", "optimizer", "tokens")
_FUNCTION = "preflight"


class ProgramError(ValueError):
    """A program that cannot be imported, or that lacks a function."""


def load_program(name: str) -> dict[str, Any]:
    """Return the arguments for ``verify`` and ``plan`` that a user's program has.

    Args:
        name: ``script.py``, ``module`` or either with ``:function``. The function returns a dict of
            arguments. Without a function: the function ``preflight`` of the module, if there is
            one; else the module's functions ``build_model``, ``batch``, ``loss``, and ``shard``,
            ``optimizer`` and ``tokens`` if it has them. A module without ``loss`` has ``step`` and
            ``optimizers`` in place of ``loss`` and ``optimizer``.

    Raises:
        ProgramError: if it cannot be imported, or a function is missing.
    """
    where, _, function = name.partition(":")
    if ":" in name and not (where and function):
        raise ProgramError(f"{name!r} is no module:function; write for example train:verification")
    if not function and where.endswith(".py") and Path(where).is_file():
        _check_names(Path(where), name)
    module = _module(where, name)
    if function or callable(getattr(module, _FUNCTION, None)):
        found = _called(module, function or _FUNCTION, name)
    else:
        found = _by_name(module, name)
    known = {*inspect.signature(verify).parameters, *inspect.signature(plan).parameters}
    if unknown := sorted(found.keys() - known):
        raise ProgramError(
            f"{name} has {', '.join(unknown)}, which is no argument; use {', '.join(sorted(known))}"
        )
    found.setdefault("shard", shard_blocks)
    return found


def _check_names(script: Path, name: str) -> None:
    """Refuse a script without its functions before the import runs it: it may train for hours."""
    source = script.read_text(errors="replace")
    try:
        symbols = symtable.symtable(source, str(script), "exec").get_symbols()
    except (SyntaxError, ValueError):
        return  # the import has the message
    bound = {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}
    is_open = "import *" in source or "globals()" in source  # names that no symbol shows
    if not (is_open or _FUNCTION in bound or bound >= {*_NEEDED} or bound >= {*_OF_STEP}):
        raise ProgramError(_lacks(name, [each for each in _NEEDED if each not in bound]))


def _module(where: str, name: str) -> ModuleType:
    path = Path(where)
    if path.suffix == ".py" and not path.is_file():
        raise ProgramError(f"{where} does not exist; pass a script or a module")
    try:
        if path.suffix != ".py":
            sys.path.insert(0, "")
            return importlib.import_module(where)
        sys.path.insert(0, str(path.resolve().parent))
        spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
        assert spec is not None and spec.loader is not None, "the suffix is that of a script"
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and pickle look for it there
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise ProgramError(f"{name} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise ProgramError(
            f"{name} cannot be imported: {_described(error)}; the commands import it, so what "
            "trains belongs below `if __name__ == '__main__'`"
        ) from error
    return module


def _described(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def _called(module: ModuleType, function: str, name: str) -> dict[str, Any]:
    try:
        found = getattr(module, function)()
    except AttributeError as error:
        if hasattr(module, function):
            raise
        raise ProgramError(f"{name} cannot be imported: {error}") from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ProgramError(f"{name} returned a {kind}; return a dict of the arguments of verify")
    return dict(found)


def _by_name(module: ModuleType, name: str) -> dict[str, Any]:
    names = (*_NEEDED, *_OF_STEP, *_OPTIONAL)
    found = {each: value for each in names if callable(value := getattr(module, each, None))}
    if found.keys() >= {*_NEEDED}:  # functions called step and optimizers are the script's own
        return {each: found[each] for each in (*_NEEDED, *_OPTIONAL) if each in found}
    if found.keys() >= {*_OF_STEP}:
        return {each: value for each, value in found.items() if each != "optimizer"}
    raise ProgramError(_lacks(name, [each for each in _NEEDED if each not in found]))


def _lacks(name: str, missing: list[str]) -> str:
    return (
        f"{name} has no function {', '.join(missing)}; it needs build_model(), batch(step) and "
        "loss(model, batch), or step(model, optimizers, batch) and optimizers(model) in place of "
        "loss, at the top level and outside of `if __name__ == '__main__'`, or "
        f"a function {_FUNCTION}() that returns a dict of them; `fullshard init example.py` writes "
        "a script that has them"
    )


def accepted(function: Callable[..., object], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``found`` that ``function`` takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in found.items() if name in names}


def planned(
    found: Mapping[str, Any], mesh: tuple[int, ...], micro_batches: int, device: str | None
) -> Plan:
    """Return the plan of one rank of a program in a world of the given mesh."""
    given = accepted(plan, found) | {"batch": lambda: _run_of(found).batch_of(0)}
    given |= {"mesh": _world(mesh), "device": device}
    return plan(**{"micro_batches": micro_batches, **given})


def raced(found: Mapping[str, Any], mesh: tuple[int, ...], *, steps: int) -> RaceReport:
    """Return the races of a program on simulated streams."""
    run = _run_of(found)

    def train(world: DeviceMesh) -> None:
        model = run.built()
        model = call_shard(run.shard, model, world) or model
        optimizers = run.optimizers_of(model)
        for step in range(steps):
            for loss in run.losses_of(model, optimizers, run.batch_of(step)):
                loss.backward()
            if run.step is None:
                optimizers[0].step()
                optimizers[0].zero_grad()

    return check(train, mesh=_world(mesh))


def _run_of(found: Mapping[str, Any]) -> Program:
    return Program(**accepted(Program, found))


def _world(mesh: tuple[int, ...]) -> Any:
    return mesh[0] if len(mesh) == 1 else mesh

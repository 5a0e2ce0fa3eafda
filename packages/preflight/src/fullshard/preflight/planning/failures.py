"""Errors of a plan, with the module and the line of the user's code that caused each."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from torch import nn
from torch.nn.parameter import is_lazy

from fullshard.preflight.compat import (
    UnknownOperator,
    UnknownValue,
    errors_raised_alone,
    unknown_custom_operator,
)
from fullshard.preflight.planning.memory.places import Places
from fullshard.preflight.races.collectives import UnknownCollectiveError
from fullshard.preflight.training import Training

__all__ = ["PlanError", "check_model", "line_of", "saying_where"]


_LAZY = (
    "a lazy module, such as nn.LazyLinear, has parameters without shapes, and a plan shards before "
    "the first forward; give the module its sizes"
)
_OTHERS = {"fullshard", "torch", *sys.stdlib_module_names}  # packages that are no user's code


class PlanError(RuntimeError):
    """A model cannot be planned: it needs data, or a time that is not known or measured."""


@contextmanager
def saying_where(places: Places) -> Iterator[None]:
    """Add the module and the line of code to errors raised inside the ``with`` block.

    Args:
        places: knows the phase of the step.

    Raises:
        PlanError: if the plan needs a value, or something that is not known.
    """
    try:
        with errors_raised_alone():
            yield
    except PlanError:
        raise
    except Exception as error:
        where = _where(error, places)
        said = _said(error)
        if said:
            raise PlanError(f"in {where}, {said}") from error
        error.add_note(f"raised while {where} was planned")
        raise


def _said(error: Exception) -> str:
    """Return what the plan lacks; "" if the error is the user's own."""
    if isinstance(error, UnknownValue):
        return _needs_values(str(error))
    if isinstance(error, UnknownOperator):
        return _needs_fake(str(error))
    if isinstance(error, UnknownCollectiveError):
        return f"{error}; a plan without device= needs no time of it"
    if isinstance(error, RuntimeError):
        if ".numpy()" in str(error):  # it is no operation, and torch has no class for it
            return _needs_values("Tensor.numpy()")
        if "UninitializedParameter" in str(error) or "UninitializedBuffer" in str(error):
            return _LAZY
        found = unknown_custom_operator(error)
        return _needs_fake(found) if found else ""
    return ""


def _needs_values(what: str) -> str:
    return (
        f"{what} needs values, and a plan has none. To log a number, read it with .item(): of a "
        "float a plan answers 1.0, and checks for NaN pass. Where shapes depend on values, plan a "
        "variant of fixed shapes (for experts: each with a fixed number of tokens); where a branch "
        "does, a variant that takes one"
    )


def _needs_fake(operator: str) -> str:
    return (
        f"the operator {operator} does not say what it returns for tensors without data; give it a "
        "function that does, with torch.library.register_fake"
    )


def _where(error: Exception, places: Places) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = places.failed()
    name = _module_in(frames, places.names)
    if name:
        told = f"{place.phase} of {name}"
    elif place.phase != "optimizer" and any(_is_of_loss(each) for each in frames):
        told = "the loss"
    else:
        told = str(place)
    line = line_of(reversed(frames))
    return f"{told} ({line})" if line else told


def _module_in(frames: Sequence[FrameType], names: Mapping[int, str]) -> str:
    """Return the full name of the innermost module that runs in frames; "" if none does."""
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return names.get(id(module), type(module).__name__) or "the model"
    return ""


def _is_of_loss(frame: FrameType) -> bool:
    return frame.f_code is Training.losses_of.__code__


def line_of(frames: Iterable[FrameType]) -> str:
    """Return the file and the line of the first frame that is the user's code; "" if none is."""
    for frame in frames:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _OTHERS:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


def check_model(model: nn.Module) -> None:
    """Raise if a model has parameters or buffers without shapes.

    Raises:
        PlanError: if it has; it names the first.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise PlanError(f"{name} has no shape: {_LAZY}")

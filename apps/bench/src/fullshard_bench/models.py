"""The models by name: presets, presets with other sizes, and a user's own.

Owns the text form: `gpt-small`, `gpt-small:layers=2,width=128`, `package.module:function`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from fullshard_bench.errors import BenchError, told_of
from fullshard_bench.experts import ChoosingExperts, ExpertsShape, experts
from fullshard_bench.gpt import PRESETS, gpt
from fullshard_bench.loading import load_object
from fullshard_bench.many import ManyShape, many
from fullshard_bench.workload import Shape, Workload

__all__ = ["MODELS", "make_workload"]

_Maker = Callable[[str, Any, Shape], Workload]

_MOE = partial(experts, kind=ChoosingExperts)

MODELS: dict[str, tuple[_Maker, Any]] = {
    **{name: (gpt, sizes) for name, sizes in PRESETS.items()},
    "many": (many, ManyShape()),
    "experts": (experts, ExpertsShape()),
    "moe": (_MOE, ExpertsShape()),
    "moe-8x7b": (_MOE, ExpertsShape(width=4096, layers=48, heads=32, vocabulary=32000)),
}


def make_workload(text: str, shape: Shape) -> Workload:
    """The workload that `text` means, for a rank's batch of this shape.

    Raises:
        BenchError: the model, size or function is missing, or the function takes or returns other
            values.
    """
    name, colon, rest = text.partition(":")
    if name in MODELS:
        maker, sizes = MODELS[name]
        return maker(text, _resized(text, sizes, rest) if colon else sizes, shape)
    if not colon:
        raise BenchError(
            f"model {text!r}: no such model; allowed: {', '.join(MODELS)}, or module:function of"
            " your own"
        )
    function = load_object(text, "model")
    try:
        inspect.signature(function).bind(shape)
    except (TypeError, ValueError) as error:  # a ValueError if it has no signature
        raise BenchError(
            f"model {text!r}: must take a fullshard_bench.Shape and nothing else: {error}"
        ) from None
    try:
        found = function(shape)
    except Exception as error:
        raise BenchError(f"model {text!r}: {told_of(error)}") from error
    if not isinstance(found, Workload):
        raise BenchError(
            f"model {text!r}: returned {type(found).__name__}; it must take a Shape and return a"
            " fullshard_bench.Workload"
        )
    return found


def _resized(text: str, sizes: Any, changes: str) -> Any:
    """`sizes` with `field=number` changes, separated by commas."""
    fields = [field.name for field in dataclasses.fields(sizes)]
    values: dict[str, int] = {}
    for change in changes.split(","):
        field, _, number = change.partition("=")
        if field not in fields or not number.isdecimal() or int(number) == 0:
            raise BenchError(
                f"model {text!r}: {change!r} must be size=number with a size of {', '.join(fields)}"
            )
        values[field] = int(number)
    return dataclasses.replace(sizes, **values)

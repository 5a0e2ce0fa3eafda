"""Objects that a program gives to a forward, and into which each layer writes.

Unsharded, the layers and the caller see one object. So they must with sharded modules: a layer
checks which objects it gets, the loss uses the entries, and the caller counts them.

Owns ``CarriedCase``, its draws, the kinds of objects, and how a layer reads and writes them.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch.utils import _pytree as pytree  # torch's own users register classes here, too

from support.fuzz.around import is_reentrant
from support.fuzz.case import Checkpointing, FuzzCase, NodeCase

__all__ = [
    "HEAD",
    "KINDS",
    "NOT_CARRIED",
    "STEM",
    "CarriedCase",
    "Entries",
    "checkpoints",
    "collect",
    "draw_carried",
    "empty",
    "entries_of",
    "read",
    "require_one",
    "write",
]

STEM, HEAD = -2, -1  # the numbers of these layers

Entries = list[tuple[str, torch.Tensor]]


class Named(list[Any]):
    """A list whose constructor takes other arguments than a list's."""

    def __init__(self, name: str, limit: int) -> None:
        super().__init__()
        self.name, self.limit = name, limit


@dataclass
class Total:
    """A sum, and how many layers added to it."""

    layers: int = 0
    total: torch.Tensor | None = None


class Bag:
    """Holds entries; torch knows nothing of it."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class Registered(Bag):
    """The same, registered with torch's pytree."""


pytree.register_pytree_node(
    Registered, lambda bag: (bag.items, None), lambda items, _: Registered(list(items))
)


def _gain(dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, 4, dtype=dtype)


def _batch(dtype: torch.dtype) -> dict[str, Any]:
    return {"gain": _gain(dtype), "ids": torch.arange(3), "name": "batch", "layers": 0}


def _nested(dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.arange(3), (_gain(dtype), [])


KINDS: dict[str, Callable[[torch.dtype], Any]] = {
    "list": lambda dtype: [],
    "deque": lambda dtype: deque(),
    "dict": lambda dtype: {},
    "OrderedDict": lambda dtype: OrderedDict(),
    "defaultdict": lambda dtype: defaultdict(list),
    "own list": lambda dtype: Named("hidden states", 99),
    "dataclass": lambda dtype: Total(),
    "registered": lambda dtype: Registered([]),
    "not registered": lambda dtype: Bag([]),
    "batch": _batch,
    "inner tuple": _nested,
    "attribute": lambda dtype: None,  # of the tensors that go from layer to layer
}


@dataclass(frozen=True, kw_only=True)
class CarriedCase:
    """What a forward gets besides its inputs.

    Attributes:
        kind: a key of ``KINDS``; empty: nothing.
        keyword: whether it is a keyword argument.
        again: whether a second argument is the same object.
        context: whether a second argument is the input itself.
        reads: whether layers compute with what earlier ones wrote.
        casts: whether the sharded root casts its inputs.
        trains: whether a tensor in an inner tuple requires a gradient.
        late: whether leaves compute what they write after their output, so that backward reaches
            it before the output.
    """

    kind: str = ""
    keyword: bool = False
    again: bool = False
    context: bool = False
    reads: bool = False
    casts: bool = False
    trains: bool = False
    late: bool = False

    def made(self, dtype: torch.dtype) -> Any:
        """Return a new object; tensors in it have the dtype of the inputs."""
        held = KINDS[self.kind](dtype) if self.kind else None
        if isinstance(held, tuple):
            held[1][0].requires_grad_(self.trains)
        return held

    def arguments(self, x: torch.Tensor, held: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments after the input ``x`` and the skips."""
        given: tuple[Any, ...] = ()
        named: dict[str, Any] = {}
        if self.kind == "attribute":
            named["on_tensors"] = True
            if not self.casts:
                x.aux = x.new_ones(())  # type: ignore[attr-defined]  # this is what is tested
        elif self.kind and self.keyword:
            named["held"] = held
        elif self.kind:
            given = (held,)
        if self.again:
            named["again"] = held
        if self.context:  # if the root casts, from the stem on
            named["context"] = None if self.casts else x
        if self.reads:
            named["reads"] = True
        if self.late:
            named["late"] = True
        return given, named


NOT_CARRIED = CarriedCase()


def draw_carried(case: FuzzCase, casts: bool) -> CarriedCase:
    """Draw what forwards get, apart from all other draws.

    Args:
        case: the run.
        casts: whether the sharded root casts its inputs.
    """
    rng = random.Random(f"carried {case.seed}")
    kind = rng.choice(["", *KINDS, *KINDS])
    # torch's own detaches the arguments, and then goes through graphs of what is in them twice
    plain = not any(map(is_reentrant, case.nodes))
    drawn = [rng.random() < 0.4 for _ in range(4)]
    again = kind not in ("", "attribute") and drawn[1]
    return CarriedCase(
        kind=kind,
        keyword=drawn[0],
        again=again and not (casts and kind == "inner tuple"),  # which cannot be changed
        # a recompute in a recompute gets a new tensor for each argument
        context=plain and drawn[2] and max(map(checkpoints, case.nodes)) < 2,
        reads=plain and bool(kind) and drawn[3],
        casts=casts,
        trains=plain,
        late=bool(kind) and rng.random() < 0.15 and not _is_misordered(case, kind),
    )


def _is_misordered(case: FuzzCase, kind: str) -> bool:
    """Return whether a region may be recomputed before the engine knows of its backward.

    No hook watches what is in an object that torch does not know, or an attribute. So if such an
    entry comes last, its backward recomputes the region first. A region in a sharded module then
    finds freed parameters, as with torch's own. Where another rank skips the layer, the output
    comes first. Torch's own misorders gathers for entries of all kinds then.
    """
    if kind not in ("not registered", "attribute"):
        return False
    if any(map(_has_region_of_another, case.nodes)):
        return True
    skips = any(map(_is_skipped, case.nodes)) and not case.canonical
    return skips and max(map(checkpoints, case.nodes)) > 0


def _has_region_of_another(node: NodeCase) -> bool:
    """Return whether a checkpointed node, here or below, is a part of a sharded module only."""
    own = node.checkpointing is not Checkpointing.NONE and not node.sharded
    return own or any(map(_has_region_of_another, node.children))


def _is_skipped(node: NodeCase) -> bool:
    return node.skipped or any(map(_is_skipped, node.children))


def checkpoints(node: NodeCase) -> int:
    """Return how many checkpointed regions are in one another at most, in a node."""
    own = node.checkpointing is not Checkpointing.NONE
    return own + max(map(checkpoints, node.children), default=0)


# -- what layers do -------------------------------------------------------------------------------


def require_one(
    x: torch.Tensor, held: Any = None, *, again: Any = None, context: Any = None, **_: Any
) -> None:
    """Raise unless arguments that a caller made one object are one.

    Checkpointing gives a recomputation the tensors that autograd saved, which are views of x then.
    """
    assert again is None or again is held, "a module got two objects for one"
    recomputes = torch._C._current_graph_task_id() != -1
    same = context is x or (recomputes and context is not None and torch.equal(context, x))
    assert context is None or same, "a module got two tensors for one"


def read(
    x: torch.Tensor,
    held: Any = None,
    *,
    context: torch.Tensor | None = None,
    reads: bool = False,
    on_tensors: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Return the input of a layer, changed by what the layer got besides."""
    entries = entries_of(x if on_tensors else held) if reads else []
    earlier = [value for _, value in entries if value.is_floating_point()]
    if context is not None:
        x = (x + context) / 2
    if isinstance(held, dict) and "gain" in held:
        x = x * held["gain"]
    if isinstance(held, tuple):
        x = x * held[1][0]
    return x + 0.1 * earlier[-1].mean() if earlier else x


def collect(
    x: torch.Tensor,
    out: torch.Tensor,
    layer: int,
    held: Any = None,
    *,
    on_tensors: bool = False,
    **_: Any,
) -> torch.Tensor | None:
    """Return what a layer collects: ``out``, or in every other layer a scalar.

    Args:
        x: the input of the layer, as it came.
        out: what the layer computed.
        layer: its number.
        held: where it will be written.
        on_tensors: whether it will be an attribute, which may not save the tensor that has it.
    """
    if on_tensors:
        aux: torch.Tensor = x.__dict__.get("aux", 0) + x.square().mean()
        return aux
    if held is None:
        return None
    return out if layer % 2 == 0 else out.square().mean()


def write(
    y: torch.Tensor,
    layer: int,
    value: torch.Tensor | None,
    held: Any = None,
    *,
    on_tensors: bool = False,
    **_: Any,
) -> None:
    """Write what a layer collected; ``y`` is the output, which is not the input."""
    if on_tensors:
        y.aux = value  # type: ignore[attr-defined]
    elif value is not None:
        _put(held, f"{layer}", value)


@singledispatch
def _put(held: Any, layer: str, value: torch.Tensor) -> None:
    raise TypeError(type(held))


@_put.register(list)
@_put.register(deque)
def _(held: Any, layer: str, value: torch.Tensor) -> None:
    held.append(value)


@_put.register
def _(held: dict, layer: str, value: torch.Tensor) -> None:  # type: ignore[type-arg]
    if "gain" in held:
        held["layers"] += 1
        held.update(hidden=value + held["hidden"] if "hidden" in held else value)
    held[layer] = value


@_put.register
def _(held: defaultdict, layer: str, value: torch.Tensor) -> None:  # type: ignore[type-arg]
    held[layer].append(value)


@_put.register
def _(held: Total, layer: str, value: torch.Tensor) -> None:
    held.layers += 1
    held.total = value.mean() if held.total is None else held.total + value.mean()


@_put.register
def _(held: Bag, layer: str, value: torch.Tensor) -> None:
    held.items.append(value)


@_put.register
def _(held: tuple, layer: str, value: torch.Tensor) -> None:  # type: ignore[type-arg]
    held[1][1].append(value)


def empty(held: Any) -> None:
    """Drop the entries: checkpointing keeps its arguments, and tensors in them keep its graph."""
    if isinstance(held, Total):
        held.total = None
    elif isinstance(held, torch.Tensor):
        held.__dict__.clear()
    elif held is not None:
        inner = held[1][1] if isinstance(held, tuple) else held
        (inner.items if isinstance(inner, Bag) else inner).clear()


def entries_of(held: Any) -> Entries:
    """Return what layers wrote: keys or numbers, and values, in order."""
    if isinstance(held, torch.Tensor):
        return [(name, each) for name, each in held.__dict__.items() if name == "aux"]
    if isinstance(held, Total):
        return [] if held.total is None else [(f"of {held.layers}", held.total)]
    if isinstance(held, dict):
        first = [("layers", torch.tensor(held["layers"]))] if "layers" in held else []
        own = [(f"{key}", value) for key, value in held.items() if key not in _GIVEN]
        return first + [(f"{key} {at}", v) for key, value in own for at, v in _numbered(value)]
    if isinstance(held, tuple):
        held = held[1][1]
    return _numbered(held.items if isinstance(held, Bag) else held or ())


_GIVEN = ("gain", "ids", "name", "layers")


def _numbered(values: Any) -> Entries:
    if isinstance(values, torch.Tensor):
        return [("", values)]
    return [(f"{at}", value) for at, value in enumerate(values)]

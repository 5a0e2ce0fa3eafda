"""Tensors inside nested containers: found and replaced, with everything else left as it is."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree as pytree  # what libraries register with

from fullshard.sharding import map_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    value: Any
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    note: str = "kept"


@dataclasses.dataclass
class Derived:
    """A field that the constructor does not take."""

    value: Any
    total: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.value


class Registered:
    """A container that a library registers with torch's pytree."""

    def __init__(self, value: Any, note: str = "kept") -> None:
        self.value = value
        self.note = note


pytree.register_pytree_node(
    Registered,
    lambda found: ([found.value], found.note),
    lambda items, note: Registered(next(iter(items)), note),
)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


CONTAINERS: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda t: t, lambda v: v),
    "list": (lambda t: [t, 1], lambda v: v[0]),
    "tuple": (lambda t: (t, "x"), lambda v: v[0]),
    "dict": (lambda t: {"a": t, "b": None}, lambda v: v["a"]),
    "namedtuple": (lambda t: Pair(1, t), lambda v: v.right),
    "dataclass": (lambda t: Record(t), lambda v: v.value),
    "frozen": (lambda t: Frozen(t), lambda v: v.value),
    "ordered": (lambda t: OrderedDict(b=1, a=t), lambda v: v["a"]),
    "default": (lambda t: defaultdict(list, a=t), lambda v: v["a"]),
    "set": (lambda t: {t, 1}, lambda v: next(x for x in v if isinstance(x, torch.Tensor))),
    "frozenset": (lambda t: frozenset([t]), lambda v: next(iter(v))),
    "deque": (lambda t: deque([1, t], maxlen=2), lambda v: v[1]),
    "registered": (lambda t: Registered({"a": t}), lambda v: v.value["a"]),
    "nested": (lambda t: {"a": [Pair(Frozen(t), ()), 2.0]}, lambda v: v["a"][0].left.value),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_kind_of_container_is_rebuilt_with_its_type_and_its_other_items(
    kind: str,
) -> None:
    make, read = CONTAINERS[kind]
    tensor = torch.ones(2)
    original = make(tensor)
    mapped = map_tensors(_double, original)
    assert type(mapped) is type(original)
    assert torch.equal(read(mapped), 2 * tensor)
    assert read(original) is tensor  # the caller's own object is not changed
    if isinstance(original, dict):
        assert list(mapped) == list(original)
    if isinstance(original, defaultdict):
        assert mapped.default_factory is list
    if isinstance(original, Record | Frozen | Registered):
        assert mapped.note == "kept"


@pytest.mark.parametrize(
    "value",
    [[1, [2]], (None,), {"a": {"b": ()}}, Pair(1, 2), Record("x"), Registered(1), {1}, 3, object()],
)
def test_what_holds_no_tensor_comes_back_as_the_same_object(value: Any) -> None:
    assert map_tensors(_double, value) is value


def test_a_container_in_which_nothing_changes_is_the_same_object() -> None:
    value = {"a": [torch.ones(1)], "b": Frozen(torch.ones(1))}
    assert map_tensors(lambda tensor: tensor, value) is value


def test_a_dataclass_with_a_field_that_its_constructor_does_not_take_is_copied_too() -> None:
    tensor = torch.ones(2)
    original = Derived(tensor)
    mapped = map_tensors(_double, original)
    assert torch.equal(mapped.value, 2 * tensor)
    assert torch.equal(mapped.total, 2 * tensor)
    assert original.value is tensor
    assert original.total is tensor


def test_a_dataclass_type_is_no_dataclass() -> None:
    assert map_tensors(_double, Record) is Record


def test_a_subclass_of_dict_keeps_its_class() -> None:
    class Output(dict[str, Any]):
        """As the output classes of model libraries are."""

    mapped = map_tensors(_double, Output(logits=torch.ones(1)))
    assert type(mapped) is Output
    assert mapped["logits"].item() == 2


def test_the_lengths_of_a_packed_sequence_stay_where_torch_wants_them() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    seen: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor.to(torch.float64) if tensor.is_floating_point() else tensor + 0

    mapped = map_tensors(note, packed)
    assert type(mapped) is type(packed)
    assert mapped.data.dtype is torch.float64
    assert mapped.batch_sizes is packed.batch_sizes

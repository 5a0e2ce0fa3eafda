"""The slices of tensors that consumers need, and which trainer rank sends which part: arithmetic.

Owns the check of slices and the plan of messages. Every rank computes the same plan, and ships it
to consumers as plain numbers. This module reads no values.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fullshard.checkpoint.boxes import Box
from fullshard.checkpoint.engines.metadata import ParamMeta
from fullshard.checkpoint.engines.tensors import EngineTensors
from fullshard.checkpoint.rules.pieces import Piece
from fullshard.checkpoint.weights.layout import FileTensor
from fullshard.checkpoint.weights.sending import shares_of

__all__ = ["Message", "Part", "Slice", "Slices", "Wanted", "planned", "tensor_parallel_slices"]


@dataclass(frozen=True)
class Slice:
    """A range of indices in one dim of a tensor.

    Attributes:
        dim: of the tensor.
        start: the first index.
        stop: the index after the last one.
    """

    dim: int
    start: int
    stop: int


Slices: TypeAlias = Slice | Sequence[Slice]
"""What a consumer needs of a tensor: one slice, several in different dims, or ``()`` for all."""

Wanted: TypeAlias = Mapping[str, Slices]
"""What a consumer needs, by the name of the tensor; tensors that are not named are not sent."""


def tensor_parallel_slices(
    metadata: Iterable[ParamMeta], dims: Mapping[str, int], consumers: int
) -> list[dict[str, Slices]]:
    """Return what consumers need that cut some tensors into equal slices and copy the others.

    Args:
        metadata: of a weight source.
        dims: the dim that is cut, by a pattern of names as in a shell: ``{"*.up.weight": 0}``. The
            first pattern that fits counts.
        consumers: how many there are.

    Raises:
        ValueError: if a pattern fits no name, or a dim cannot be cut equally.
    """
    found: list[dict[str, Slices]] = [{} for _ in range(consumers)]
    unused = dict.fromkeys(dims)
    for meta in metadata:
        pattern = next((each for each in dims if fnmatch.fnmatchcase(meta.name, each)), None)
        if pattern is None:
            for wanted in found:
                wanted[meta.name] = ()
            continue
        unused.pop(pattern, None)
        dim = dims[pattern]
        if not 0 <= dim < len(meta.shape) or meta.shape[dim] % consumers:
            raise ValueError(
                f"{meta.name} has shape {tuple(meta.shape)}, of which dim {dim} cannot be cut into "
                f"{consumers} equal slices; change {pattern!r}, or write the slices yourself"
            )
        size = meta.shape[dim] // consumers
        for index, wanted in enumerate(found):
            wanted[meta.name] = Slice(dim, index * size, (index + 1) * size)
    if unused:
        raise ValueError(f"patterns {', '.join(unused)} fit no tensor of the engine")
    return found


@dataclass(frozen=True)
class Part:
    """A part of a consumer's slice that one trainer rank sends.

    Attributes:
        tensor: its position among the tensors of the engine.
        param: the position of the parameter of which it is a part.
        piece: of that parameter and of the tensor.
        box: the same part, within the slice.
        nbytes: as it travels.
    """

    tensor: int
    param: int
    piece: Piece
    box: Box
    nbytes: int


Message: TypeAlias = Mapping[int, Sequence[Part]]
"""The parts of a bucket, by the position of the trainer rank that sends them."""


@dataclass(frozen=True)
class ConsumerPlan:
    """The slices of one consumer, and the messages that bring them.

    Attributes:
        slices: the consumer's part of each tensor, by the position of the tensor.
        buckets: the messages, in order.
        nbytes: of all slices.
    """

    slices: Mapping[int, Box]
    buckets: Sequence[Message]
    nbytes: int


def planned(
    tensors: EngineTensors, wanted: Sequence[Wanted], bucket_bytes: int
) -> list[ConsumerPlan]:
    """Return the plan of each consumer.

    Args:
        tensors: of the engine.
        wanted: by each consumer.
        bucket_bytes: slices that travel together have at most this size, or are one slice.

    Raises:
        TypeError: if ``wanted`` has another form.
        ValueError: if there is no tensor of a name, or a slice is outside of its tensor.
    """
    if isinstance(wanted, Mapping | str) or not isinstance(wanted, Sequence) or not wanted:
        raise TypeError(
            f"wanted is {type(wanted).__name__}; pass a list with a dict for each consumer, from "
            "names to fullshard.checkpoint.Slice"
        )
    boxes = [_checked(tensors.made, number, each) for number, each in enumerate(wanted)]
    used = sorted({position for each in boxes for position in each})
    shares = {
        position: shares_of(tensors.made[position], tensors.boxes, tensors.sharded, -1)
        for position in used
    }
    plans = []
    for slices in boxes:
        buckets: list[dict[int, list[Part]]] = []
        left = total = 0
        for position, box in slices.items():
            itemsize = tensors.made[position].dtype.itemsize
            nbytes = box.numel * itemsize
            if not buckets or nbytes > left:
                buckets.append({})
                left = bucket_bytes
            left -= nbytes
            total += nbytes
            for share in shares[position].of(box) if nbytes else ():
                inside = share.piece.in_file
                start = tuple(a - b for a, b in zip(inside.start, box.start, strict=True))
                part = Part(
                    position,
                    share.position,
                    share.piece,
                    Box(start, inside.size),
                    inside.numel * itemsize,
                )
                buckets[-1].setdefault(share.rank, []).append(part)
        plans.append(ConsumerPlan(slices, [each for each in buckets if each], total))
    return plans


def _checked(made: Sequence[FileTensor], consumer: int, wanted: Wanted) -> dict[int, Box]:
    """Return the part of each tensor that a consumer wants, by the position of the tensor."""
    if not isinstance(wanted, Mapping):
        raise TypeError(
            f"consumer {consumer} wants a {type(wanted).__name__}; pass a dict from names to "
            "fullshard.checkpoint.Slice"
        )
    positions = {tensor.name: position for position, tensor in enumerate(made)}
    for name in wanted:
        if name not in positions:
            near = difflib.get_close_matches(str(name), positions, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see metadata of the weight source"
            raise ValueError(
                f"consumer {consumer} wants {name!r}, which none of the {len(made)} tensors is "
                f"called; {hint}"
            )
    return {
        position: _box(tensor, consumer, wanted[tensor.name])
        for position, tensor in enumerate(made)
        if tensor.name in wanted
    }


def _box(tensor: FileTensor, consumer: int, slices: Slices) -> Box:
    box = Box.whole(tensor.shape)
    cut: set[Any] = set()
    for each in (slices,) if isinstance(slices, Slice) else slices:
        if not isinstance(each, Slice):
            raise TypeError(
                f"consumer {consumer} wants {each!r} of {tensor.name}; pass a "
                "fullshard.checkpoint.Slice, several of them, or ()"
            )
        dims = len(tensor.shape)
        numbers = (each.dim, each.start, each.stop)
        if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
            raise TypeError(f"consumer {consumer} wants {each} of {tensor.name}; pass integers")
        if not 0 <= each.dim < dims or each.dim in cut:
            allowed = f"dims 0 to {dims - 1}, each once" if dims else "no dim: pass ()"
            raise ValueError(
                f"consumer {consumer} wants {each} of {tensor.name}, which has shape "
                f"{tensor.shape}; allowed are {allowed}"
            )
        size = tensor.shape[each.dim]
        if not 0 <= each.start <= each.stop <= size:
            raise ValueError(
                f"consumer {consumer} wants {each} of {tensor.name}, which has shape "
                f"{tensor.shape}; allowed in dim {each.dim} are 0 <= start <= stop <= {size}"
            )
        cut.add(each.dim)
        box = box.along(each.dim, each.start, each.stop - each.start)
    return box

"""Blocks with full parameters: reads, and writes that outlive the block or are lost.

A block comes before a step, also while a graph is alive that no backward will use, or between a
forward and its backward. Then it writes only parameters that no graph has saved, as plain torch
allows.

Owns ``BlockCase``, its draws, and which parameters may be written.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from fullshard.sharding import unsharded
from support.fuzz.case import Checkpointing, FuzzCase
from support.fuzz.model import Leaf, Node, Root

__all__ = [
    "NO_BLOCKS",
    "WRITES",
    "BlockCase",
    "BlocksCase",
    "Grads",
    "draw_blocks",
    "open_block",
    "unsaved",
]

WRITES = ("", "mul_", "add_", "copy_")


class Grads(Enum):
    """How autograd is kept out of a write."""

    AROUND = "no_grad() around the block"
    INSIDE = "no_grad() inside the block"
    DETACHED = "a write into detach()"


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    """One block, or one block in another.

    Attributes:
        write: how a parameter is changed; empty: it is only read.
        writebacks: the ``writeback`` of the blocks, the outermost first.
        grads: how autograd is kept out.
        part: whether the module that holds the parameter is opened, else the root.
        forward: whether a graph is alive that no backward uses; before a step only.
        pick: chooses the parameter; in [0, 1).
    """

    write: str
    writebacks: tuple[bool, ...]
    grads: Grads
    part: bool
    forward: bool
    pick: float


@dataclass(frozen=True, kw_only=True)
class BlocksCase:
    """The blocks of a run.

    Attributes:
        before: for each step, the block before it.
        inside: for each step, the block between forward and backward of each micro-batch.
    """

    before: tuple[BlockCase | None, ...] = ()
    inside: tuple[tuple[BlockCase | None, ...], ...] = ()


NO_BLOCKS = BlocksCase()


def draw_blocks(case: FuzzCase) -> BlocksCase:
    """Draw blocks, apart from all other draws."""
    rng = random.Random(f"blocks {case.seed}")
    return BlocksCase(
        before=tuple(_draw(rng, 0.4) for _ in case.steps),
        inside=tuple(tuple(_draw(rng, 0.3) for _ in step.synchronise) for step in case.steps),
    )


def _draw(rng: random.Random, often: float) -> BlockCase | None:
    drawn = rng.random() < often
    block = BlockCase(
        write=rng.choice(WRITES),
        writebacks=rng.choice([(True,), (True,), (False,), (True, False), (False, True)]),
        grads=rng.choice([*Grads]),
        part=rng.random() < 0.3,
        forward=rng.random() < 0.3,
        pick=rng.random(),
    )
    return block if drawn else None


def open_block(
    block: BlockCase,
    models: tuple[Any, nn.Module],
    names: list[str],
    compare: Callable[[Any, str], None],
) -> Callable[[], None]:
    """Open a block of the sharded model; return what does the same to the unsharded one.

    Args:
        block: what to do.
        models: the sharded model and the other.
        names: the parameters of which one may be written.
        compare: called with the opened module and its path, inside the block.
    """
    name = names[int(block.pick * len(names))]
    path = name.rpartition(".")[0] if block.part else ""
    opened, other = models[0].get_submodule(path), models[1].get_parameter(name)
    with ExitStack() as stack:
        if block.grads is Grads.AROUND:
            stack.enter_context(torch.no_grad())
        for writeback in block.writebacks:
            stack.enter_context(unsharded(opened, writeback=writeback))
        compare(opened, path)
        _write(block, models[0].get_parameter(name))
    if any(block.writebacks):
        return lambda: _write(block, other)
    return lambda: None


def _write(block: BlockCase, param: torch.Tensor) -> None:
    values = torch.linspace(-0.5, 0.4, param.numel(), dtype=param.dtype).view(param.shape)
    writes: dict[str, Callable[[torch.Tensor], object]] = {
        "": lambda into: None,
        "mul_": lambda into: into.mul_(0.5),
        "add_": lambda into: into.add_(values, alpha=0.5),
        "copy_": lambda into: into.copy_(values),
    }
    if block.grads is Grads.DETACHED:
        writes[block.write](param.detach())
    else:
        with torch.no_grad():
            writes[block.write](param)


def unsaved(model: Root) -> list[str]:
    """Return parameters that no graph saves and no recompute reads: biases, and unused ones."""
    names = ["stem.bias", "head.bias", "unused.weight"]

    def walk(node: Node, path: str) -> None:
        for index, (case, part) in enumerate(zip(node.cases, node.parts, strict=True)):
            inner = f"{path}.parts.{index}"
            if case.checkpointing is not Checkpointing.NONE:
                continue
            if isinstance(part, Leaf):
                names.append(f"{inner}.up.bias")
            elif isinstance(part, Node):
                walk(part, inner)

    walk(model.tree, "tree")
    return names

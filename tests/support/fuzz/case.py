"""What one number makes of a training run: model, wrapping, mesh, policies, accumulation."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum


class Checkpointing(Enum):
    """How a node is run."""

    NONE = "none"
    REENTRANT = "reentrant"
    NOT_REENTRANT = "not reentrant"


@dataclass(frozen=True, kw_only=True)
class NodeCase:
    """One node of the model's tree.

    Attributes:
        children: nodes inside; a leaf has none.
        rows: rows of a leaf's inner layer, which rarely divide.
        scale: whether a leaf has a 0-d parameter.
        frozen: whether a leaf's first layer is frozen.
        tied: the leaf, by its number, whose first weight it shares; -1: none.
        sharded: whether it is given to ``fully_shard`` by itself.
        dim: the dim along which its parameters are cut, where they have it.
        reshard: its ``reshard_after_forward``.
        skipped: whether some ranks do not run it.
        repeated: whether it runs twice in a row.
        checkpointing: how it is run.
    """

    children: tuple[NodeCase, ...] = ()
    rows: int = 1
    scale: bool = False
    frozen: bool = False
    tied: int = -1
    sharded: bool = False
    dim: int = 0
    reshard: bool | int | None = None
    skipped: bool = False
    repeated: bool = False
    checkpointing: Checkpointing = Checkpointing.NONE

    @property
    def shards(self) -> int:
        """Nodes given to ``fully_shard`` in it, itself counted in."""
        return self.sharded + sum(child.shards for child in self.children)


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """One optimizer step.

    Attributes:
        synchronise: per micro-batch, whether gradients are reduced.
        all_reduce: per micro-batch, whether they are also reduced over replicas.
        waits: per micro-batch, whether the end of backward waits.
        forwards_first: run all forwards before the first backward.
        evaluates: run a forward without gradients before the step.
        max_norm: clip to it; None: do not clip.
        by_count: divide by a tensor on the device.
    """

    synchronise: tuple[bool, ...]
    all_reduce: tuple[bool, ...]
    waits: tuple[bool, ...]
    forwards_first: bool
    evaluates: bool
    max_norm: float | None
    by_count: bool


@dataclass(frozen=True, kw_only=True)
class FuzzCase:
    """A whole run.

    Attributes:
        seed: the number it was drawn from.
        world_size: ranks.
        hybrid: shard over pairs, replicate over two.
        nodes: the tree's top.
        root_reshard: ``reshard_after_forward`` of the root.
        canonical: whether ranks skip whole groups.
        prefetch: groups gathered ahead.
        adamw: the optimizer: AdamW, else SGD with momentum.
        steps: what is run.
    """

    seed: int
    world_size: int
    hybrid: bool
    nodes: tuple[NodeCase, ...]
    root_reshard: bool | None
    canonical: bool
    prefetch: int
    adamw: bool
    steps: tuple[StepCase, ...]


def draw(seed: int) -> FuzzCase:
    """The case of a seed."""
    rng = random.Random(seed)
    world_size = rng.choice([1, 2, 2, 4])
    canonical = rng.random() < 0.3
    trees = _Trees(rng, world_size, canonical)
    hybrid = world_size == 4 and rng.random() < 0.5
    trees.ints = world_size == 4 and not hybrid and not canonical
    return FuzzCase(
        seed=seed,
        world_size=world_size,
        hybrid=hybrid,
        nodes=tuple(trees.node(depth=0) for _ in range(rng.randint(1, 4))),
        root_reshard=rng.choice([None, None, True, False]),
        canonical=canonical,
        prefetch=rng.choice([0, 1, 1, 2]),
        adamw=rng.random() < 0.5,
        steps=tuple(_step(rng, hybrid, canonical) for _ in range(rng.randint(1, 3))),
    )


def _step(rng: random.Random, hybrid: bool, canonical: bool) -> StepCase:
    micro = rng.randint(1, 3)
    last = (*[False] * (micro - 1), True)
    often = [rng.random() < 0.5 for _ in range(micro)]
    mixed = tuple(a or b for a, b in zip(last, often, strict=True))
    return StepCase(
        synchronise=rng.choice([(True,) * micro, last, mixed]),
        all_reduce=rng.choice([(True,) * micro, last]) if hybrid else (True,) * micro,
        waits=rng.choice([(True,) * micro, last]),
        forwards_first=rng.random() < 0.25,
        evaluates=rng.random() < 0.25,
        max_norm=rng.choice([None, None, 0.1, 10.0]),
        by_count=rng.random() < 0.25,
    )


def repeated_runs(node: NodeCase, times: int = 1) -> int:
    """Return how many runs the layers have that a forward runs more than once.

    Args:
        node: the node in which they are.
        times: how often a forward runs what it is in.
    """
    times *= 1 + node.repeated
    if node.children:
        return sum(repeated_runs(child, times) for child in node.children)
    return times if times > 1 else 0


class _Trees:
    """Draws the model.

    What some ranks skip holds no sharded module, unless the order is canonical. In the canonical
    order a sharded module runs once, and a checkpointed region holds at most one: `slack` is 1.
    Without it, a region whose recomputation ranks would begin at different places is reentrant.
    """

    def __init__(self, rng: random.Random, world_size: int, canonical: bool) -> None:
        self._rng = rng
        self._world_size = world_size
        self._canonical = canonical
        self._leaves = 0
        self.ints = False

    def node(self, depth: int) -> NodeCase:
        rng = self._rng
        children: tuple[NodeCase, ...] = ()
        if depth < 2 and rng.random() < 0.4:
            children = tuple(self.node(depth + 1) for _ in range(rng.randint(1, 3)))
        sharded = rng.random() < 0.5
        held = sharded + sum(child.shards for child in children)
        free = not held or not self._canonical
        ways = [Checkpointing.NONE] * 2
        if free or held == 1:
            ways += [Checkpointing.REENTRANT, Checkpointing.NOT_REENTRANT]
        reshards: list[bool | int | None] = [None, True, False, *([2] if self.ints else [])]
        node = NodeCase(
            children=children,
            rows=rng.choice([1, 2, 3, 4, 5, 8]),
            scale=rng.random() < 0.3,
            frozen=rng.random() < 0.2,
            tied=self._tie() if not children else -1,
            sharded=sharded,
            dim=rng.choice([0, 0, 1]),
            reshard=rng.choice(reshards),
            skipped=(self._canonical or not held) and rng.random() < 0.4,
            repeated=free and rng.random() < 0.15,
            checkpointing=rng.choice(ways),
        )
        if self._world_size > 1 and not self._canonical:
            node = _in_order(node, again=False)
        return node

    def _tie(self) -> int:
        number, self._leaves = self._leaves, self._leaves + 1
        return self._rng.randrange(number) if number and self._rng.random() < 0.15 else -1


def _in_order(node: NodeCase, *, again: bool) -> NodeCase:
    """Return ``node`` with reentrant regions in the place of misordered ones, in it and below it.

    ``again``: a region around it runs it twice.
    """
    again |= node.repeated
    node = replace(node, children=tuple(_in_order(each, again=again) for each in node.children))
    if _is_misordered(node, again):
        return replace(node, checkpointing=Checkpointing.REENTRANT)
    return node


def _is_misordered(region: NodeCase, again: bool) -> bool:
    """Return whether ranks may recompute a region before and after a hook in it gathers.

    Ranks that run what comes after the region's last sharded module recompute the region first,
    and so gather its first module. On the others, backward comes to the output of the last module
    first, and gathers that. Torch's own gathers the same, and then computes with wrong parameters.
    A prefetch, or modules that stay unsharded, may hide it; both may change in a run. If its one
    module runs twice, in the region or since that does (``again``), ranks free it at different
    places.
    """
    if region.checkpointing is not Checkpointing.NOT_REENTRANT:
        return False
    skips, gathered = False, 0  # by the hooks that backward reaches on all ranks alike
    ahead = [region]
    while ahead:
        node = ahead.pop()
        inside = node is not region
        again |= inside and node.repeated and node.shards > 0
        if inside and node.skipped:
            skips = True  # it holds no sharded module
        elif inside and node.checkpointing is Checkpointing.REENTRANT:
            return False  # the inputs that it saved are recomputed before all in it
        elif node.sharded and skips:
            return again or gathered + 1 < region.shards
        elif not node.children:
            return False  # all ranks recompute here
        else:
            gathered += node.sharded
            ahead += [replace(node, repeated=False)] * (inside and node.repeated)
            ahead += node.children  # of which backward comes to the last one first
    return False

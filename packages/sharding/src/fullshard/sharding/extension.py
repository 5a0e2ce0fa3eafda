"""The contract for features outside the core: calls around groups, roots and steps.

A feature that watches groups, or works on them, is a subclass of ``GroupExtension``. The engine
calls each method at one place, and knows no subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

__all__ = [
    "EXTENSIONS",
    "ROOT_EXTENSIONS",
    "STEP_EXTENSIONS",
    "ExtendedGroup",
    "ExtendedParameter",
    "GroupExtension",
    "MakeExtension",
    "RootExtension",
    "StepExtension",
    "end_pass",
    "made_by",
]


class ExtendedParameter(Protocol):
    """One parameter of a group, as extensions see it."""

    @property
    def name(self) -> str:
        """Its full name."""

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part, in the dtype in which it is stored."""

    @property
    def sharded(self) -> nn.Parameter:
        """The ``DTensor`` that optimizers step, which has the sharded gradient."""

    @property
    def unsharded(self) -> nn.Parameter:
        """What modules compute with; empty while the group is sharded."""


class ExtendedGroup(Protocol):
    """A parameter group, as extensions see it."""

    @property
    def name(self) -> str:
        """The full name of its module."""

    @property
    def rank(self) -> int:
        """This rank among those that shard the group."""

    @property
    def params(self) -> Sequence[ExtendedParameter]:
        """Its parameters, in an order that is equal on all ranks."""

    @property
    def generation(self) -> Any:
        """The version of its parameters: ``number`` grows when their values change."""


class GroupExtension:
    """Is called around one parameter group; the methods do nothing, so override those you need.

    Each group has an instance of its own. Methods run on the thread and on the stream of the
    engine, on every rank. Calls of an extension of all groups come in one order on all ranks.
    A method that raises ends the forward, backward or call in which it runs: raise on all ranks or
    on none. Several extensions are called in the order in which they were added.

    Attributes:
        group: the group.
    """

    def __init__(self, group: ExtendedGroup) -> None:
        """Begin to be called for ``group``, which is sharded or not."""
        self.group = group

    def before_gather(self, *, from_copies: bool) -> None:
        """Take notice that shards are about to be gathered.

        Args:
            from_copies: the gather starts from copies that an earlier one kept, as with
                ``reshard_after_forward=<int>``.
        """

    def on_reuse(self) -> None:
        """Take notice that full parameters of an earlier gather are about to be used again."""

    def after_gather(self) -> None:
        """Take notice that modules hold the full parameters of a gather."""

    def around_forward(
        self,
        name: str,
        groups: Sequence[ExtendedGroup],
        begin_backward: Callable[[], object] | None,
    ) -> AbstractContextManager[object] | None:
        """Return a context in which a forward is to run, or None; the group is unsharded.

        Args:
            name: the full name of the module, or "(root)".
            groups: the groups whose full parameters the module uses.
            begin_backward: to call if a backward comes to the module otherwise than through what
                it returns: gathers the groups, once. None where no backward can come.
        """

    def on_idle(self) -> None:
        """Take notice that full parameters stay in memory, and no module uses them now."""

    def before_reshard(self) -> None:
        """Take notice that full parameters are about to be freed, or kept out of sight."""

    def on_commit(self) -> None:
        """Take notice that the sharded gradients of all backwards so far are in place."""

    def on_step(self) -> None:
        """Take notice that an optimizer or a load changed the shards: full values are stale."""

    def on_reset(self) -> None:
        """Take notice that the group was brought back to its shards after an error."""


class RootExtension:
    """What ranks tell each other at places to which all ranks of a root come; does nothing.

    All roots of the process share an instance. A method may call collectives, in an order that is
    equal on all ranks. If it raises, it raises on all ranks.
    """

    def at_root(self, groups: Sequence[ExtendedGroup]) -> str:
        """Return what this rank finds wrong with ``groups``, whose root was found; else nothing.

        The engine then raises on all ranks.
        """
        return ""

    def at_end(self, groups: Sequence[ExtendedGroup]) -> None:
        """Take notice that a pass over ``groups`` ends: a backward, or a forward without one.

        A backward that ends with an error here leaves no gradients.
        """

    def at_block(self, groups: Sequence[ExtendedGroup]) -> None:
        """Take notice that a ``with unsharded(...)`` block has gathered ``groups``."""

    def at_commit(self, groups: Sequence[ExtendedGroup]) -> None:
        """Take notice that gradients are in place, before hooks and optimizers see them."""


ROOT_EXTENSIONS: list[RootExtension] = []
"""What all roots of this process ask; packages append to it when they are imported."""


def end_pass(groups: Sequence[ExtendedGroup]) -> None:
    """End a pass over ``groups``; see ``RootExtension.at_end``."""
    for each in ROOT_EXTENSIONS:
        each.at_end(groups)


class StepExtension:
    """Is called around the steps of an optimizer; the methods do nothing.

    For each optimizer of sharded parameters an instance is made.
    """

    def on_parameters(self, optimizer: Optimizer) -> None:
        """Take notice of the parameters: before the first step, and where they have changed."""

    def before_step(self, optimizer: Optimizer, stepped: Optimizer) -> Optimizer:
        """Return what ``step`` is to get in the place of ``optimizer``: as it is, ``stepped``."""
        return stepped

    def before_closure(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Take notice that the step is about to run a closure on the parameters."""

    def after_closure(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Take notice that the closure has returned."""

    def after_step(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Take notice that ``step`` has returned, before the user's own hooks run."""


STEP_EXTENSIONS: list[Callable[[], StepExtension]] = []
"""Make the extensions of each optimizer; packages append to it when they are imported."""


def made_by(make: MakeExtension, group: ExtendedGroup) -> GroupExtension:
    """Return the extension that ``make`` makes for ``group``.

    Raises:
        TypeError: if it makes anything else.
    """
    made: object = make(group)
    if not isinstance(made, GroupExtension):
        raise TypeError(
            f"{make!r} returned a {type(made).__name__}; return a "
            "fullshard.sharding.GroupExtension, or pass a subclass of it"
        )
    return made


MakeExtension: TypeAlias = Callable[[ExtendedGroup], GroupExtension]
"""Makes the extension of a group, such as a subclass of ``GroupExtension``."""

EXTENSIONS: list[MakeExtension] = []
"""What each new group of this process gets; packages append to it when they are imported."""

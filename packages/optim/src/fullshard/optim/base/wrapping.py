"""Optimizers that wrap another one, and step a few of its parameters at a time.

``WrappingOptimizer`` shows groups, state and hooks of the wrapped optimizer as its own. ``part_of``
makes an optimizer of a few parameters. When and where these are stepped is the subclass's matter.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.optim.owners.ranks import group_of
from fullshard.sharding.spi import Comparison, device_of_mesh

__all__ = [
    "Bucket",
    "WrappingOptimizer",
    "error_of_any_rank",
    "forget_step",
    "params_of",
    "part_of",
    "take_over",
]

Bucket = Mapping[int, Sequence[torch.Tensor]]
"""Some parameters of an optimizer, by the index of their group."""

_HOOKS = "_optimizer_"  # how torch (2.11 to 2.15) names an optimizer's dicts of hooks
_SCALES = "_step_supports_amp_scaling"  # what GradScaler asks an optimizer
_ENGINE = "_fullshard_"  # how sharding names what it keeps for one optimizer


class WrappingOptimizer(Optimizer):
    """An optimizer with the groups, the state and the hooks of another.

    Attributes:
        optimizer: the wrapped optimizer.
    """

    _no_copy = ""  # why copies and pickles are refused
    # A fused optimizer lets GradScaler leave the unscaling to its step. Parts are stepped here.
    _step_supports_amp_scaling = False

    def __init__(self, optimizer: Optimizer) -> None:
        """Wrap ``optimizer``."""
        # Not by torch's constructor: groups, state and hooks stay those of the wrapped optimizer.
        for name, value in vars(optimizer).items():
            own = _is_own(name) or name == _SCALES
            if name.startswith(_HOOKS) or not own:
                vars(self)[name] = value
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override] # an attribute there
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"an {type(self).__name__} cannot be copied or pickled, as {self._no_copy}; save its "
            "state_dict(), and load that into another optimizer"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)


def params_of(bucket: Bucket) -> list[torch.Tensor]:
    """Return the parameters of a bucket, in order."""
    return [param for params in bucket.values() for param in params]


def part_of(optimizer: Optimizer, bucket: Bucket) -> Optimizer:
    """Return an optimizer like ``optimizer`` with the parameters of a bucket, and without state."""
    part: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.startswith(_HOOKS):
            vars(part)[name] = OrderedDict()
        elif not _is_own(name):
            vars(part)[name] = value
    groups = optimizer.param_groups
    part.param_groups = [{**groups[index], "params": list(bucket[index])} for index in bucket]
    part.state = defaultdict(dict)
    return part


def forget_step(part: Optimizer) -> None:
    """Free what a step left on ``part``: its state, and hooks of the engine, which know it too."""
    part.state = defaultdict(dict)
    for name, value in list(vars(part).items()):
        if name.startswith(_ENGINE):
            del vars(part)[name]
        elif name.startswith(_HOOKS):
            value.clear()


def take_over(optimizer: Optimizer, bucket: Bucket, part: Optimizer) -> None:
    """Give options and attributes that a step of ``part`` changed to ``optimizer``."""
    for index, group in zip(bucket, part.param_groups, strict=True):
        mine = optimizer.param_groups[index]
        mine.update({**group, "params": mine["params"]})
    attributes = vars(part).items()
    vars(optimizer).update({name: value for name, value in attributes if not _is_own(name)})


def error_of_any_rank(error: str, groups: Sequence[Mapping[str, Any]], words: Comparison) -> str:
    """Return the errors of all ranks of the model, or an empty string; they call it together."""
    params = [param for group in groups for param in group["params"]]
    meshes = dict.fromkeys(each.device_mesh for each in params if isinstance(each, DTensor))
    for mesh in meshes:
        process_group = group_of(mesh)
        if process_group is not None:
            error = words.verdict([], error, process_group, device_of_mesh(mesh)) or error
    return error


def _is_own(name: str) -> bool:
    """Return whether an attribute belongs to one optimizer alone."""
    return name in ("state", "param_groups", "step") or name.startswith((_HOOKS, _ENGINE))

"""The common part of the wrapper classes of FSDP1 and FairScale.

Owns the place of the wrapped module, and behaviour that is equal in both. The classes define all
other behaviour.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fullshard.optim import clip_grad_norm_
from fullshard.wrappers.ignored_states import WRAPPED

__all__ = ["Wrapper", "require_module", "require_unwrapped", "wrappers_under"]

_W = TypeVar("_W", bound="Wrapper")


class Wrapper(nn.Module):
    """A module that holds a sharded one, and looks like it."""

    _fsdp_wrapped_module: nn.Module

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that shard."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """How many they are."""
        return self.process_group.size()

    def __getitem__(self, key: Any) -> Any:
        """Return an item of the wrapped module: a layer of an ``nn.Sequential``."""
        return self._fsdp_wrapped_module[key]  # type: ignore[index]  # if it has items

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return what ``torch.distributed.checkpoint.state_dict`` leaves out of names, and for it.

        torch asks under the default name of ``StateDictOptions.dsd_fqn_modifiers``.
        """
        return {"": WRAPPED}

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """Return the norm of all gradients together, after scaling them to ``max_norm`` at most.

        Every rank calls it.

        Args:
            max_norm: the largest norm that is left alone, 0 or more.
            norm_type: the p of the p-norm, more than 0; ``math.inf`` or ``"inf"`` for the largest
                absolute value.

        Returns:
            The norm before, a 0-d tensor, equal on all ranks.

        Raises:
            TypeError: if an argument is no number.
            ValueError: if ``max_norm`` is negative, or ``norm_type`` is not positive.
        """
        return clip_grad_norm_(self, max_norm, norm_type)


def require_module(module: object) -> None:
    """Return if ``module`` is one.

    Raises:
        TypeError: if it is not.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; pass an nn.Module")


def require_unwrapped(module: object, kind: type[Wrapper]) -> None:
    """Return if ``module`` may be wrapped in ``kind``.

    Raises:
        TypeError: if it is no module.
        ValueError: if it is wrapped already.
    """
    require_module(module)
    if isinstance(module, kind):
        raise ValueError("module is wrapped already; wrap a module once")


def wrappers_under(model: nn.Module, kind: type[_W]) -> dict[_W, str]:
    """Return the wrappers under ``model``, itself included, inner ones first, and their paths.

    Raises:
        ValueError: if there is none.
    """
    paths = {each: path for path, each in model.named_modules() if isinstance(each, kind)}
    if not paths:
        raise ValueError(
            f"{type(model).__name__} holds no FullyShardedDataParallel; pass a wrapped model"
        )
    return {each: paths[each] for each in _inner_first(model) if isinstance(each, kind)}


def _inner_first(module: nn.Module) -> dict[nn.Module, None]:
    found: dict[nn.Module, None] = {}
    for child in module.children():
        found.update(_inner_first(child))
    found[module] = None
    return found

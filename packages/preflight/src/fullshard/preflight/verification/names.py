"""The names that parameters had before anybody wrapped their modules."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["clean", "module_of", "own_names"]

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_fpw_module")


def clean(name: str) -> str:
    """Return ``name`` without what FSDP1, checkpoint wrappers and ``torch.compile`` add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def own_names(model: nn.Module) -> nn.Module:
    """Return the module whose names count: ``model``, or what DDP has as its ``module``."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def module_of(name: str) -> str:
    """Return the name of the module that holds the parameter or buffer ``name``."""
    return name.rpartition(".")[0]

"""The names that parameters had before anybody wrapped their modules."""

from __future__ import annotations

__all__ = ["clean", "module_of"]

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_fpw_module")


def clean(name: str) -> str:
    """Returns ``name`` without what FSDP1, checkpoint wrappers and ``torch.compile`` add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def module_of(name: str) -> str:
    """Returns the name of the module that holds the parameter or buffer ``name``."""
    return name.rpartition(".")[0]

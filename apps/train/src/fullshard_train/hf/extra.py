"""The libraries of the extra `fullshard-train[hf]`, and what to do where they are missing.

Owns the check, and every name of theirs that is not public.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from torch import nn

from fullshard_train.errors import TrainError

__all__ = [
    "checkpoint_activations",
    "initial_values_in_place",
    "layer_classes",
    "peft",
    "require_extra",
    "transformers",
]

_INSTALL = "pip install 'fullshard-train[hf]'"


def require_extra(*names: str) -> None:
    """Pass if these libraries are installed.

    Raises:
        TrainError: one is not.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise TrainError(
                f"config run.task = 'hf': {name} is not installed; {_INSTALL}, or use another task"
            )


def transformers() -> Any:
    """The library transformers; importing it takes seconds.

    Raises:
        TrainError: it is not installed.
    """
    return _library("transformers")


def peft() -> Any:
    """The library peft.

    Raises:
        TrainError: it is not installed.
    """
    return _library("peft")


def _library(name: str) -> ModuleType:
    require_extra(name)
    return importlib.import_module(name)


def checkpoint_activations(model: Any) -> None:
    """Drop each layer's activations of `model`, and compute them again in backward."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its name in earlier releases of transformers 5
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def layer_classes(model: nn.Module) -> frozenset[str]:
    """The names of the classes of layers that transformers must not split."""
    # No public name exists; accelerate and torch's FSDP read this one. Seen in transformers 4 and
    # 5.
    return frozenset(getattr(model, "_no_split_modules", None) or ())


def initial_values_in_place(model: nn.Module, part: nn.Module) -> None:
    """Draw the parameters of `part`, a module of `model`, as its architecture prescribes.

    Random numbers come from torch's default generator.
    """
    # The hook that each architecture overrides; `from_config` calls it for each module, children
    # first. Seen in transformers 4 and 5.
    part.apply(model._init_weights)  # type: ignore[arg-type]

"""Adapters of peft on a frozen base: LoRA, DoRA, and modules that are trained in full with them.

Owns which modules get them, and the values that come from the base: DoRA's magnitudes begin as the
norms of the base's weights, a module that is trained whole as a copy (`modules_to_save` of peft).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import initialise
from fullshard_train.errors import TrainError
from fullshard_train.hf.extra import peft
from fullshard_train.settings.sections import HFConfig

__all__ = ["fill_from_base", "with_adapters"]


def with_adapters(base: Any, section: HFConfig) -> nn.Module:
    """`base`, frozen, with float32 adapters at the modules that the config names.

    A module that is trained whole has the base's dtype, as peft leaves it.

    Raises:
        TrainError: a name is no module's, or one is tied to another and cannot be trained alone.
    """
    named = _names(section.lora_targets)
    targets = "all-linear" if section.lora_targets == "all-linear" else named
    whole = _names(section.lora_modules_to_save)
    _require_trainable(base, whole)
    config = peft().LoraConfig(
        r=section.lora_rank,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        target_modules=targets,
        modules_to_save=whole or None,
        use_dora=section.lora_dora,
        task_type="CAUSAL_LM",
    )
    try:
        model: nn.Module = peft().get_peft_model(base, config, autocast_adapter_dtype=True)
    except ValueError as error:
        ends = sorted({name.rpartition(".")[2] for name, _ in _linear_layers(base)})
        raise TrainError(
            f"config hf.lora_targets = {section.lora_targets!r}: {error}; this model has"
            f" {', '.join(ends)}, or give all-linear"
        ) from error
    missed = [name for name in named if targets != "all-linear" and not _adapted(model, name)]
    if missed:
        raise TrainError(
            f"config hf.lora_targets = {section.lora_targets!r}: no module of the model is called"
            f" {', '.join(missed)}"
        )
    return model


def _names(words: str) -> list[str]:
    return [name.strip() for name in words.split(",") if name.strip()]


def _require_trainable(base: nn.Module, whole: list[str]) -> None:
    said = f"config hf.lora_modules_to_save = {','.join(whole)!r}: "
    modules = dict(base.named_modules())
    for name in whole:
        found = [each for each in modules if _is_called(each, name)]
        if not found:
            ends = sorted({each.rpartition(".")[2] for each, _ in _linear_layers(base)})
            raise TrainError(
                f"{said}no module of the model is called {name}; it has {', '.join(ends)}"
            )
        inside = {id(value) for each in found for value in modules[each].parameters()}
        for other, value in base.named_parameters(remove_duplicate=False):
            if id(value) in inside and not any(other.startswith(f"{each}.") for each in found):
                raise TrainError(
                    f"{said}{found[0]} shares its weight with {other}, which stays frozen; leave it"
                    " out, or untie them (tie_word_embeddings in config.json, and save both)"
                )


def _is_called(full: str, name: str) -> bool:
    return full == name or full.endswith(f".{name}")


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim == 2:
            yield name, module


def _adapted(model: nn.Module, name: str) -> bool:
    return any(
        _is_called(each, name)
        for each, module in model.named_modules()
        if hasattr(module, "lora_A")
    )


@torch.no_grad()
def fill_from_base(model: nn.Module) -> None:
    """Give magnitudes and modules trained whole the values that come from a base with values.

    Every rank that has a part of the model calls this; each holds one whole weight at a time.
    """
    for module in list(model.modules()):
        copies, magnitudes = (
            _part(module, "modules_to_save"),
            _part(module, "lora_magnitude_vector"),
        )
        if copies is not None:
            originals = dict(module.get_submodule("original_module").named_parameters())
            for name, copy in copies.named_parameters():
                copy.copy_(originals[name])
        if magnitudes is not None:
            _fill_magnitude(module, magnitudes)


def _part(module: nn.Module, name: str) -> nn.Module | None:
    # Models of peft hand on attributes that are others'.
    parts = dict(module.named_children()).get(name)
    return parts["default"] if isinstance(parts, nn.ModuleDict) and "default" in parts else None


def _fill_magnitude(module: Any, magnitude: Any) -> None:
    """The norm of each output's weights (Liu et al. 2024, DoRA, section 4.1), as peft takes it."""
    weight = module.get_base_layer().weight
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    # An adapter adds nothing yet, so what peft adds before it takes norms is zero.
    norm = magnitude.get_weight_norm(whole, whole.new_zeros(()), 1.0)
    initialise(magnitude, lambda _, value, __: value.copy_(norm), 0)

"""A causal language model of transformers as the trainer's frame takes it: rows in, logits out.

Owns building it (with adapters, if asked) and the way its parts are sharded. Refuses to know its
weights: under the meta device it costs no memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fullshard_train.errors import TrainError
from fullshard_train.hf.adapters import with_adapters
from fullshard_train.hf.extra import checkpoint_activations, layer_classes, transformers
from fullshard_train.hf.folder import ModelFolder, open_folder
from fullshard_train.settings.config import Config
from fullshard_train.settings.sections import HFConfig
from fullshard_train.training.optim import step_by

__all__ = [
    "Causal",
    "build_model",
    "flops_per_token",
    "layers_of",
    "parameters_on_meta",
    "read_config",
    "vocabulary",
]


class Causal(nn.Module):
    """A causal language model: `[rows, time, 2]` tokens and positions in, logits out.

    Logits are `[rows, time, vocabulary]`, of the token after each. If positions start from zero
    within a row, models of transformers prevent attention to earlier tokens.

    Args:
        inner: the model of transformers, or peft's around it.
        positions: whether its forward takes positions.
    """

    def __init__(self, inner: nn.Module, *, positions: bool) -> None:
        super().__init__()
        self.inner = inner
        self.positions = positions

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, time, vocabulary]` of int64 `[rows, time, 2]`."""
        tokens, positions = inputs.unbind(-1)
        given: dict[str, Any] = {"position_ids": positions} if self.positions else {}
        logits: torch.Tensor = self.inner(input_ids=tokens, use_cache=False, **given).logits
        return logits


def read_config(folder: ModelFolder) -> Any:
    """The configuration of transformers for a folder's config.json.

    Raises:
        TrainError: transformers does not know such a model.
    """
    try:
        config = transformers().AutoConfig.from_pretrained(folder.config, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainError(f"model {folder.config}: {error}") from error
    return config


def vocabulary(config: Any) -> int:
    """The rows of the embedding that a configuration describes."""
    return int(config.get_text_config().vocab_size)


def build_model(config: Config) -> Causal:
    """The model of a config, on the current default device; trained parameters are in float32.

    A base that adapters freeze has the dtype in which it is stored, or `hf.base_dtype`.

    Raises:
        TrainError: as `open_folder` and `read_config`, or adapters fit no module.
    """
    section = config.hf
    folder = open_folder(section)
    described = read_config(folder)
    options = {} if section.attention == "auto" else {"attn_implementation": section.attention}
    dtype = torch.float32 if section.method == "full" else _base_dtype(section, folder)
    try:
        base = transformers().AutoModelForCausalLM.from_config(described, dtype=dtype, **options)
    except (ValueError, ImportError) as error:
        raise TrainError(
            f"model {folder.config}, hf.attention = {section.attention!r}: {error}"
        ) from error
    if config.train.activation_checkpointing:
        checkpoint_activations(base)
    positions = _takes(base, "position_ids")
    inner: Any = base if section.method == "full" else with_adapters(base, section)
    for table in (inner.get_input_embeddings(), inner.get_output_embeddings()):
        if table is not None:
            step_by(table.weight, algorithm="adamw")
    return Causal(inner, positions=positions).train()


def _takes(model: Any, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def _base_dtype(section: HFConfig, folder: ModelFolder) -> torch.dtype:
    if section.base_dtype == "auto":
        return folder.stored
    dtype = getattr(torch, section.base_dtype)
    assert isinstance(dtype, torch.dtype), section.base_dtype
    return dtype


def layers_of(model: Causal) -> Sequence[nn.Module]:
    """The layers of the model, in forward order; the rest is gathered with the root.

    None contains another: where transformers names a block and a part of it, the block counts.
    """
    inner: Any = model.inner
    base: nn.Module = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    classes = layer_classes(base)
    found = [module for module in base.modules() if type(module).__name__ in classes]
    parts = {id(part) for layer in found for part in layer.modules() if part is not layer}
    if found:
        return [layer for layer in found if id(layer) not in parts]
    lists = [each for each in base.modules() if isinstance(each, nn.ModuleList)]
    return list(max(lists, key=_size, default=()))


def flops_per_token(model: Causal, block: int) -> float:
    """6 N + 12 L H Q T of a token (Chowdhery et al. 2022, PaLM, appendix B).

    N counts the parameters but an embedding of its own, which multiplies nothing, and of experts
    those that a token meets; a frozen parameter has no gradient, so it counts 4, and 0 if another
    is trained instead. L layers of H heads of width Q look back on T tokens, as if a row were one
    document.
    """
    inner: Any = model.inner
    shape = inner.config.get_text_config()
    own = inner.get_output_embeddings() is not None and not shape.tie_word_embeddings
    looked_up = inner.get_input_embeddings().weight if own else None
    experts = getattr(shape, "num_local_experts", None) or getattr(shape, "num_experts", None)
    met = shape.num_experts_per_tok / experts if experts else 1.0
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is not looked_up and ".original_module." not in name:
            share = met if ".experts." in name else 1.0
            total += (6 if parameter.requires_grad else 4) * share * parameter.numel()
    heads = getattr(shape, "num_attention_heads", None)
    if not heads:
        return total  # without attention
    width = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    return total + float(12 * shape.num_hidden_layers * heads * width * block)


def _size(modules: nn.Module) -> int:
    return sum(parameter.numel() for parameter in modules.parameters())


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, modules are built with parameters on the meta device, but with real buffers.

    Values that a constructor computes (rotary frequencies, masks) are in no file, so they must be
    computed.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None  # as it is
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(to_meta)
    try:
        with torch.device("cpu"):
            yield
    finally:
        hook.remove()

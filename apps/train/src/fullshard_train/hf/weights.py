"""The initial values of a model: weights of a folder, or random ones; and its adapters.

Owns the names: what a parameter of `Causal` is called in files. Every rank reads or draws what its
shards need, and holds one layer of random weights at a time, never the model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from fullshard.checkpoint import Rule, WeightsError, initialise, load_safetensors
from fullshard.sharding import RankMismatchError
from fullshard_train.errors import TrainError
from fullshard_train.hf.adapters import fill_from_base
from fullshard_train.hf.extra import initial_values_in_place
from fullshard_train.hf.folder import open_folder, read_json
from fullshard_train.hf.model import Causal, build_model, layers_of, parameters_on_meta
from fullshard_train.seeds import derive_seed, generator_for
from fullshard_train.settings.config import Config

__all__ = ["adapter_rules", "base_rules", "fill", "fill_untrained", "stored_names"]

_SHOWN = 5


def fill(model: Causal, config: Config, seed: int) -> None:
    """Give a model that has memory its buffers and initial values; sharded or not.

    Every rank that has a part of the model calls this.

    Raises:
        TrainError: the folder's weights do not fit the model, or cannot be read.
    """
    _fill_buffers(model, config)
    folder = open_folder(config.hf)
    if folder.weights is None:
        drawn = _Drawn(config, seed)
        initialise(model, lambda name, value, _: _draw(name, value, drawn), seed)
    else:
        for name, module in model.named_modules():
            if _is_adapter(name):
                _fill_adapter(name, module, seed)
        _load(model, folder.weights, config)
    fill_from_base(model)


def fill_untrained(model: Causal, config: Config, seed: int) -> None:
    """Give a model that has memory what a checkpoint leaves out: buffers, and a frozen base.

    Raises:
        TrainError: as `fill`.
    """
    if config.hf.method == "lora":
        fill(model, config, seed)
    else:
        _fill_buffers(model, config)


def _fill_buffers(model: Causal, config: Config) -> None:
    with parameters_on_meta():
        skeleton = build_model(config)
    with torch.no_grad():
        for name, buffer in skeleton.named_buffers():
            model.get_buffer(name).copy_(buffer)


# -- names ----------------------------------------------------------------------------------------


def base_rules(model: Causal, stored: Iterable[str], *, adapted: bool) -> list[Rule]:
    """The position of each parameter of the base in files with tensors of these names.

    Files of a bare model have no "transformer." (or "model.") before each name; those of mixtures
    of experts have each expert apart, where the model has them stacked.
    """
    names = list(stored)
    inner: Any = model.inner
    prefix: str = (inner.get_base_model() if adapted else inner).base_model_prefix
    head = "inner.base_model.model." if adapted else "inner."
    bare = bool(names) and not any(name.startswith(f"{prefix}.") for name in names)
    heads = [f"{head}{prefix}."] * bare + [head]
    beside = ("{*m}.lora_{*rest}", "{*m}.modules_to_save.{*rest}")
    rules = [Rule(each, None) for each in beside] if adapted else []
    for each in heads:
        rules += _experts(each, names)
        if adapted:
            rules.append(Rule(f"{each}{{*m}}.base_layer.{{p}}", "{*m}.{p}"))
            rules.append(Rule(f"{each}{{*m}}.original_module.{{*p}}", "{*m}.{*p}"))
        rules.append(Rule(f"{each}{{*m}}", "{*m}"))
    return rules


def _experts(head: str, names: list[str]) -> list[Rule]:
    layouts = {
        ".block_sparse_moe.experts.0.w1.weight": ("block_sparse_moe", "w1", "w3", "w2"),
        ".mlp.experts.0.gate_proj.weight": ("mlp", "gate_proj", "up_proj", "down_proj"),
    }
    for end, (block, gate, up, down) in layouts.items():
        if any(name.endswith(end) for name in names):
            each = f"{{*m}}.{block}.experts.{{e}}"
            return [
                Rule(
                    f"{head}{{*m}}.mlp.experts.gate_up_proj",
                    (f"{each}.{gate}.weight", f"{each}.{up}.weight"),
                ),
                Rule(f"{head}{{*m}}.mlp.experts.down_proj", f"{each}.{down}.weight"),
                Rule(f"{head}{{*m}}.mlp.gate.{{p}}", f"{{*m}}.{block}.gate.{{p}}"),
            ]
    return []


def adapter_rules() -> list[Rule]:
    """Return the positions of adapters in the files of peft, which contain only adapters."""
    return [
        Rule("inner.{*m}.lora_{ab}.default.weight", "{*m}.lora_{ab}.weight"),
        Rule("inner.{*m}.lora_embedding_{ab}.default", "{*m}.lora_embedding_{ab}"),
        Rule("inner.{*m}.lora_magnitude_vector.default.weight", "{*m}.lora_magnitude_vector"),
        Rule("inner.{*m}.modules_to_save.default.{*p}", "{*m}.{*p}"),
        Rule("{*m}", None),
    ]


def stored_names(weights: Path) -> list[str]:
    """The names of the tensors in a file, or in those of an index."""
    if weights.suffix == ".json":
        return list(read_json(weights)["weight_map"])
    with safe_open(weights, framework="pt") as file:
        return list(file.keys())


def _load(model: Causal, weights: Path, config: Config) -> None:
    rules = base_rules(model, stored_names(weights), adapted=config.hf.method == "lora")
    try:
        report = load_safetensors(model, weights, rename=rules, strict=False)
    except (OSError, RankMismatchError, WeightsError) as error:
        raise TrainError(f"model {weights}: {error}") from error
    if report.missing:
        raise TrainError(
            f"model {weights}: has no tensor for {_shown(report.missing)}; is it whole, and that of"
            " this config.json? hf.weights = 'random' begins anew"
        )
    if report.unexpected:
        warnings.warn(
            f"model {weights}: tensors that no parameter takes: {_shown(report.unexpected)}",
            stacklevel=2,
        )


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# -- random values --------------------------------------------------------------------------------


class _Drawn:
    """Random weights as the architecture prescribes: the same for every world size.

    A layer, or a module outside of layers, is drawn as a whole, from a generator of its name.
    """

    def __init__(self, config: Config, seed: int) -> None:
        whole = replace(config, hf=replace(config.hf, method="full"))
        with parameters_on_meta():
            self._model = build_model(whole)
        self.seed = seed
        layers = {id(layer) for layer in layers_of(self._model)}
        modules = self._model.named_modules()
        self._layers = [f"{name}." for name, module in modules if id(module) in layers]
        self._name = ""
        self._values: dict[str, torch.Tensor] = {}

    def value(self, name: str) -> torch.Tensor:
        """The float32 value of a parameter of the base, under its name without adapters."""
        layers = (layer for layer in self._layers if name.startswith(layer))
        part = next(layers, name[: name.rfind(".") + 1])
        if part != self._name:
            self._name, self._values = part, self._draw(part)
        return self._values[name]

    def _draw(self, part: str) -> dict[str, torch.Tensor]:
        module = self._model.get_submodule(part[:-1])
        module.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, "initial", part))
            initial_values_in_place(self._model.inner, module)
        values = {part + name: value.detach() for name, value in module.named_parameters()}
        module.to("meta")
        return values


def _draw(name: str, value: torch.Tensor, drawn: _Drawn) -> None:
    if "lora_" in name:
        _draw_adapter(name, value, drawn.seed)
        return
    plain = name.replace("inner.base_model.model.", "inner.")
    for peft_adds in (".base_layer.", ".original_module.", ".modules_to_save.default."):
        plain = plain.replace(peft_adds, ".")
    value.copy_(drawn.value(plain))


def _is_adapter(name: str) -> bool:
    return name.rpartition(".")[2].startswith(("lora_A", "lora_B", "lora_embedding_"))


def _fill_adapter(prefix: str, module: nn.Module, seed: int) -> None:
    def draw(name: str, value: torch.Tensor, _: torch.Generator) -> None:
        _draw_adapter(f"{prefix}.{name}", value, seed)

    initialise(module, draw, seed)


def _draw_adapter(name: str, value: torch.Tensor, seed: int) -> None:
    """As peft does: A uniform in +-1 / sqrt(inputs), B zero (Hu et al. 2021, section 4.1).

    Of an embedding's adapter, A is zero, and B normal.
    """
    generator = generator_for(seed, "initial", name)
    if "lora_embedding_B" in name:
        value.normal_(generator=generator)
    elif "lora_A" in name:
        bound = 1 / math.sqrt(value.shape[1])
        value.uniform_(-bound, bound, generator=generator)
    else:
        value.zero_()

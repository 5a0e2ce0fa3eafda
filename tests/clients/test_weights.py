"""Weights that transformers and peft save are loaded in shards, and what we save they load.

Run by ``nox -s clients``. Tiny models of random weights; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint import (
    MismatchError,
    Rule,
    SaveOptions,
    load_safetensors,
    save_safetensors,
    weight_source,
)
from fullshard.sharding import fully_shard
from support.ranks import distributed
from support.weights import files_of, saved, values_of

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # what libraries say of their own parts
]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48}


def _llama(*, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SMALL, intermediate_size=40, num_key_value_heads=2, tie_word_embeddings=tied
    )
    return LlamaForCausalLM(config)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=48))


def _tied_llama() -> Any:
    return _llama(tied=True)


def _mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SMALL, intermediate_size=40, num_key_value_heads=2, num_local_experts=4
    )
    return MixtralForCausalLM(config)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(
        **SMALL, **experts, intermediate_size=40, num_key_value_heads=2, head_dim=8
    )
    return Qwen3MoeForCausalLM(config)


def _vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = ViTConfig(**sizes, intermediate_size=40, image_size=16, patch_size=8, num_labels=3)
    return ViTForImageClassification(config).eval()


def _dinov2() -> Any:
    """Its gate and up are one tensor in files, and two in the model."""
    from transformers import Dinov2Config, Dinov2Model

    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = Dinov2Config(**sizes, image_size=16, patch_size=8, use_swiglu_ffn=True)
    return Dinov2Model(config).eval()


MODELS = {
    "llama": _llama,
    "tied llama": _tied_llama,
    "gpt2": _gpt2,
    "mixtral": _mixtral,  # transformers stacks the experts as it loads them
    "qwen3 moe": _qwen3_moe,
    "vit": _vit,  # transformers renames most of it
    "dinov2": _dinov2,
}


def _sharded(model: Any) -> Any:
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def _output(model: Any) -> torch.Tensor:
    if model.main_input_name == "pixel_values":
        pixels = torch.arange(768.0).view(1, 3, 16, 16).div(768).to(model.dtype)
        found: torch.Tensor = model(pixels)[0]
    else:
        found = model(torch.arange(12)[None]).logits
    return found


def _save_config(model: Any, folder: Path) -> None:
    model.config.save_pretrained(folder)


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype is value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("kind", MODELS)
@distributed(2, timeout=200)
def test_what_transformers_saves_loads_in_shards_and_back_bit_for_bit(
    kind: str, size: str, tmp_path: Path
) -> None:
    torch.manual_seed(dist.get_rank())  # ranks begin with other values
    plain = MODELS[kind]().to(torch.bfloat16)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    dist.barrier()
    model = _sharded(MODELS[kind]().to(torch.bfloat16))
    load_safetensors(model, tmp_path / "theirs")
    expected = type(plain).from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    _same(values_of(model), dict(expected.state_dict()))

    save_safetensors(model, tmp_path / "ours", max_shard_size=size)
    if dist.get_rank() == 0:
        _save_config(model, tmp_path / "ours")
        loaded, said = type(plain).from_pretrained(
            tmp_path / "ours", dtype=torch.bfloat16, output_loading_info=True
        )
        assert not said["missing_keys"] and not said["unexpected_keys"], said
        _same(dict(loaded.state_dict()), dict(expected.state_dict()))
        _same(files_of(tmp_path / "ours"), files_of(tmp_path / "theirs"))
        assert torch.equal(_output(loaded), _output(expected))


def test_a_saved_set_is_the_same_of_a_model_that_from_pretrained_made(tmp_path: Path) -> None:
    """Transformers keeps the conversions that it used, and reverts those alone."""
    _mixtral().save_pretrained(tmp_path / "theirs")
    model = type(_mixtral()).from_pretrained(tmp_path / "theirs")
    save_safetensors(model, tmp_path / "ours")
    _same(files_of(tmp_path / "ours"), files_of(tmp_path / "theirs"))


def test_the_weights_of_a_base_model_load_into_one_with_a_head_and_back(tmp_path: Path) -> None:
    whole = _vit()
    whole.vit.save_pretrained(tmp_path / "base")
    other = _vit()
    report = load_safetensors(other, tmp_path / "base", strict=False)
    assert sorted(report.missing) == ["classifier.bias", "classifier.weight"]
    assert not report.unexpected
    for name, value in whole.vit.named_parameters():
        assert torch.equal(other.vit.get_parameter(name), value), name
    whole.save_pretrained(tmp_path / "whole")
    report = load_safetensors(other.vit, tmp_path / "whole", strict=False)
    assert sorted(report.unexpected) == ["classifier.bias", "classifier.weight"]
    assert not report.missing


def test_files_with_the_models_own_names_load_too(tmp_path: Path) -> None:
    plain, model = _mixtral(), _mixtral()
    save_safetensors(plain, tmp_path, rename={})
    assert "model.layers.0.mlp.experts.gate_up_proj" in files_of(tmp_path)
    load_safetensors(model, tmp_path)
    _same(dict(model.state_dict()), dict(plain.state_dict()))


def test_what_is_missing_is_named_as_it_is_in_the_files(tmp_path: Path) -> None:
    plain = _mixtral()
    plain.save_pretrained(tmp_path)
    state = files_of(tmp_path)
    del state["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    del state["model.layers.1.block_sparse_moe.gate.weight"]
    with pytest.raises(MismatchError) as caught:
        load_safetensors(_mixtral(), saved(tmp_path / "less", state))
    (missing,) = caught.value.report.missing
    gate = "model.layers.1.block_sparse_moe.gate.weight"
    assert missing == f"model.layers.1.mlp.gate.weight (in the files {gate})"
    (wrong,) = caught.value.report.mismatched
    assert "gate_up_proj has 4 indices along its first dim, and the files have 3, 4" in wrong


def test_an_operation_that_byte_ranges_cannot_do_is_named(tmp_path: Path) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import PermuteForRope, WeightConverter

    def mapping(*_: Any, **__: Any) -> list[Any]:
        turn = PermuteForRope()
        return [WeightConverter("attn.wq.weight", "self_attn.q_proj.weight", operations=[turn])]

    model = _llama()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    own = "model.layers.0.self_attn.q_proj.weight"
    state["model.layers.0.attn.wq.weight"] = state.pop(own)
    with patch.object(conversion_mapping, "get_model_conversion_mapping", mapping):
        with pytest.raises(MismatchError, match=f"{own} is made of .*PermuteForRope.* rename="):
            load_safetensors(model, saved(tmp_path / "a", state))
        # saved under the model's own names, which from_pretrained takes as they are
        save_safetensors(model, tmp_path / "b")
    assert own in files_of(tmp_path / "b")


def test_a_model_of_another_library_is_told_what_the_files_are(tmp_path: Path) -> None:
    _mixtral().save_pretrained(tmp_path)
    own = nn.ParameterDict({"experts": nn.Parameter(torch.ones(2))})
    with pytest.raises(MismatchError, match=r"of a mixtral of transformers .* write a Rule"):
        load_safetensors(own, tmp_path)


@distributed(2, timeout=200)
def test_a_model_on_the_meta_device_computes_what_from_pretrained_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = _llama()
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path)
    dist.barrier()
    with torch.device("meta"):
        model = _llama()
    for module in model.modules():  # buffers that are in no file, as their modules compute them
        if hasattr(module, "inv_freq"):
            module.inv_freq = plain.model.rotary_emb.inv_freq.clone()
            module.original_inv_freq = module.inv_freq.clone()
    _sharded(model)
    report = load_safetensors(model, tmp_path)
    assert report.on_meta == []
    tokens = torch.arange(12)[None]
    assert torch.allclose(model(tokens).logits, plain(tokens).logits, atol=1e-6)


@distributed(2, timeout=200)
def test_adapters_go_to_peft_and_come_back_over_a_base_by_transformers(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    base = _llama()
    if dist.get_rank() == 0:
        base.save_pretrained(tmp_path / "base")
    dist.barrier()
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    model: Any = get_peft_model(_llama(), config)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    load_safetensors(
        model,
        tmp_path / "base",
        rename=[
            Rule("{*m}.lora_{*rest}", None),
            Rule("base_model.model.{*m}.base_layer.weight", "{*m}.weight"),
            Rule("base_model.model.{*m}", "{*m}"),
        ],
    )
    adapters = [
        Rule("{*m}.lora_{ab}.default.weight", "{*m}.lora_{ab}.weight"),
        Rule("{*other}", None),
    ]
    folder = tmp_path / "adapters"
    save_safetensors(model, folder, rename=adapters, options=SaveOptions(stem="adapter_model"))
    tokens = torch.arange(12)[None]
    found = model(tokens).logits
    if dist.get_rank() == 0:
        config.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(base, folder)
        assert torch.allclose(loaded(tokens).logits, found, atol=1e-6)
        loaded.save_pretrained(tmp_path / "theirs")
        _same(files_of(folder), files_of(tmp_path / "theirs"))
    dist.barrier()
    with torch.no_grad():
        for name, parameter in nn.Module.named_parameters(model):
            if "lora_" in name:
                parameter.zero_()
    load_safetensors(model, tmp_path / "theirs", rename=adapters)
    assert torch.allclose(model(tokens).logits, found, atol=1e-6)


@pytest.mark.parametrize("build", [_llama, _tied_llama, _gpt2, _mixtral], ids=lambda f: f.__name__)
@distributed(2)
def test_an_engine_gets_the_tensors_that_transformers_saves(
    build: Callable[[], Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = build()
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path)
    dist.barrier()
    expected = files_of(tmp_path)
    source = weight_source(fully_shard(model))
    found = dict(source.iter_full())
    assert found.keys() == expected.keys()
    assert list(found) == [meta.name for meta in source.metadata]
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name

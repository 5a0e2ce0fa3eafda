"""Weights that transformers and peft save are loaded in shards, and what we save they load.

Run by ``nox -s clients``. Tiny models of random weights; nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint import Rule, SaveOptions, load_safetensors, save_safetensors
from fullshard.sharding import fully_shard
from support.ranks import distributed
from support.weights import files_of, values_of

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


MODELS = {"llama": _llama, "tied llama": _tied_llama, "gpt2": _gpt2, "mixtral": _mixtral}

# what transformers writes of a mixture of experts, whose parameters it stacks as it loads them
EXPERTS = [
    Rule(
        "{*m}.mlp.experts.gate_up_proj",
        (
            "{*m}.block_sparse_moe.experts.{e}.w1.weight",
            "{*m}.block_sparse_moe.experts.{e}.w3.weight",
        ),
    ),
    Rule("{*m}.mlp.experts.down_proj", "{*m}.block_sparse_moe.experts.{e}.w2.weight"),
    Rule("{*m}.mlp.gate.weight", "{*m}.block_sparse_moe.gate.weight"),
]
RULES: dict[str, Any] = {"mixtral": EXPERTS}


def _sharded(model: Any) -> Any:
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


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
    load_safetensors(model, tmp_path / "theirs", rename=RULES.get(kind))
    expected = type(plain).from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    _same(values_of(model), dict(expected.state_dict()))

    save_safetensors(model, tmp_path / "ours", max_shard_size=size, rename=RULES.get(kind))
    if dist.get_rank() == 0:
        _save_config(model, tmp_path / "ours")
        loaded, said = type(plain).from_pretrained(
            tmp_path / "ours", dtype=torch.bfloat16, output_loading_info=True
        )
        assert not said["missing_keys"] and not said["unexpected_keys"], said
        _same(dict(loaded.state_dict()), dict(expected.state_dict()))
        _same(files_of(tmp_path / "ours"), files_of(tmp_path / "theirs"))
        tokens = torch.arange(12)[None]
        assert torch.equal(loaded(tokens).logits, expected(tokens).logits)


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

"""Tiny models of transformers with random weights, in folders as `hf download` leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 300
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 256,
    "bos_token_id": 257,
    "pad_token_id": 256,
}


def _llama(library: Any) -> Any:
    return library.LlamaForCausalLM(library.LlamaConfig(**_SIZES))


def _gpt2(library: Any) -> Any:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 257, "eos_token_id": 256}
    return library.GPT2LMHeadModel(
        library.GPT2Config(vocab_size=VOCABULARY, **sizes, **drop, **ends)
    )


def _qwen2(library: Any) -> Any:
    return library.Qwen2ForCausalLM(library.Qwen2Config(**_SIZES, tie_word_embeddings=True))


def _mistral(library: Any) -> Any:
    # The window is shorter than a row, so layers see less than a document.
    return library.MistralForCausalLM(library.MistralConfig(**_SIZES, sliding_window=8))


def _mixtral(library: Any) -> Any:
    return library.MixtralForCausalLM(
        library.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)
    )


def _qwen3_moe(library: Any) -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return library.Qwen3MoeForCausalLM(library.Qwen3MoeConfig(**_SIZES, **experts, head_dim=8))


def _mamba(library: Any) -> Any:
    return library.MambaForCausalLM(
        library.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2)
    )


KINDS: Mapping[str, Callable[[Any], Any]] = {
    "llama": _llama,
    "gpt2, tied": _gpt2,
    "qwen2, tied": _qwen2,
    "mistral, window": _mistral,
    "mixtral": _mixtral,
    "qwen3 moe": _qwen3_moe,
    "mamba": _mamba,
}


def make_folder(
    folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, shard_size: str = "20KB"
) -> Path:
    """Writes a model of a kind into a folder, in several files with an index; returns it."""
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = KINDS[kind](transformers).to(dtype)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def make_tokenizer(folder: Path, *, size: int = 280, template: str = "{{ messages }}") -> None:
    """Puts a tokenizer of byte pairs into a folder; its end of a document is number 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner: Any = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    inner.train_from_iterator(documents(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)


def documents(count: int = 60) -> list[str]:
    """Texts of very different lengths, from 2 to 45 bytes."""
    return [f"{n}+{n}={2 * n}. " * (1 + (n * n) % 5) for n in range(count)] + ["hi"] * 8


def write_documents(path: Path) -> Path:
    """The documents as a .jsonl file."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    return path


def settings_of(model: Path, data: Path, **hf: Any) -> dict[str, dict[str, Any]]:
    """The sections of a small run's config that name a model and data."""
    return {
        "run": {"task": "hf"},
        "data": {"source": str(data), "held_out_every": 8},
        "hf": {"model": str(model), "block": 64, **hf},
        "optim": {"epsilon": 1e-3, "learning_rate": 1e-2},
        "sample": {"length": 3, "prompt": "1+1"},
    }

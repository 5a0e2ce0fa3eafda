"""``verify`` raises no alarm on models of transformers, sharded block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight import verify
from fullshard.sharding import fully_shard
from support.ranks import distributed

pytestmark = pytest.mark.clients

TINY = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**TINY, "intermediate_size": 32, "num_key_value_heads": 1},
    "qwen2": {**TINY, "intermediate_size": 32, "num_key_value_heads": 1},
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 32},
    "gpt_neox": {**TINY, "intermediate_size": 32},
    "bert": {**TINY, "intermediate_size": 32, "is_decoder": True},
}


@pytest.mark.parametrize("kind", MODELS)
@distributed(2)
def test_a_model_of_transformers_is_equal(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **MODELS[kind])

    def shard(model: nn.Module) -> None:
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList):
                for block in module:
                    fully_shard(block)
        fully_shard(model)

    def batch(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        return torch.randint(64, (2, 12), generator=generator)

    verdict = verify(
        lambda: AutoModelForCausalLM.from_config(config),
        shard,
        batch,
        lambda model, ids: model(input_ids=ids, labels=ids).loss,
        aligned_seeds=True,
    )
    assert verdict.equal, str(verdict)

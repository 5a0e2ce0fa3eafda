"""Fine-tune a transformers model by LoRA adapters (peft), the frozen base on shards.

Give it a folder that ``from_pretrained`` reads; without one it takes a tiny Llama with random
weights, for a trial. Requires ``pip install transformers peft``::

    torchrun --standalone --nproc-per-node=2 lora_transformers.py --model ./llama --data notes.txt

The base keeps the dtype in which it is stored, and is gathered in it; adapters are float32. Only
they have gradients, optimizer state and files: ``--out`` is a folder that ``PeftModel`` loads.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fullshard.optim import clip_grad_norm_
from fullshard.sharding import full_state_dict, fully_shard


def make_base(folder: str | None) -> nn.Module:
    """The model of a folder, or a tiny one; the same values on every rank."""
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=128, **sizes, **heads)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def add_adapters(base: nn.Module, rank: int) -> nn.Module:
    """Adapters in float32 at all linear layers but the head; the base frozen as it is."""
    torch.manual_seed(1)  # adapters, too, begin alike on every rank
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model = get_peft_model(base, config, autocast_adapter_dtype=True)
    for param in model.parameters():
        assert not param.requires_grad or param.dtype is torch.float32
    return model


def shard(model: nn.Module) -> nn.Module:
    """A group for each decoder layer; frozen bfloat16 and trained float32 travel together."""
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


def tokens_of(data: str, folder: str | None) -> Tensor:
    """The file as tokens of the folder's tokenizer, or as bytes."""
    text = Path(data).read_text()
    if folder is None:
        return torch.tensor(list(text.encode()))
    return torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


def save_adapters(model: nn.Module, folder: str) -> None:
    """Adapters and their configuration, as peft reads them; every rank calls, rank 0 writes."""
    weights = full_state_dict(model)
    if dist.get_rank() == 0:
        adapters = get_peft_model_state_dict(model, state_dict=weights)
        model.save_pretrained(folder, state_dict=weights)
        print(
            f"saved {len(adapters)} tensors, {sum(t.numel() for t in adapters.values())} elements"
        )
    dist.barrier()


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains and saves; returns the mean losses over ranks. The process group is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder; without it, a tiny one of random weights")
    parser.add_argument("--data", default=__file__, help="a text file (this script)")
    parser.add_argument("--out", default="adapters")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (8)")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--context", type=int, default=64, help="tokens of a row (64)")
    options = parser.parse_args(arguments)
    model = shard(add_adapters(make_base(options.model), options.rank))
    device = next(model.parameters()).device
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    text = tokens_of(options.data, options.model)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(options.steps):
        starts = torch.randint(len(text) - options.context, (4, 1), generator=drawn)
        rows = text[starts + torch.arange(options.context)].to(device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
    save_adapters(model, options.out)
    return losses


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()

"""TRL: supervised fine-tuning, and preference optimisation with a sharded reference model.

Run by ``nox -s clients``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.clients import Run, beside_torch, engine_of, shard_on_cpu, tiny_llama
from support.ranks import distributed

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # what libraries say of their own parts
]

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _settings(folder: Path, **others: Any) -> dict[str, Any]:
    config = {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
    }
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "fsdp": True,
        "fsdp_config": config,
        "bf16": False,
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        **others,
    }


def _sentences(start: int) -> str:
    return " ".join(WORDS[(start + step) % len(WORDS)] for step in range(6))


def _fine_tuner(folder: Path) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments = shard_on_cpu(lambda: SFTConfig(**_settings(folder, max_length=8)))
    rows = Dataset.from_list([{"text": _sentences(start)} for start in range(32)])
    return SFTTrainer(tiny_llama(), arguments, train_dataset=rows, processing_class=_tokenizer())


def _preference_tuner(folder: Path) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    arguments = shard_on_cpu(lambda: DPOConfig(**_settings(folder, max_length=16)))
    rows = [
        {
            "prompt": WORDS[start % 10],
            "chosen": _sentences(start),
            "rejected": _sentences(start + 3),
        }
        for start in range(32)
    ]
    return DPOTrainer(
        tiny_llama(),
        ref_model=tiny_llama(),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=_tokenizer(),
    )


TRAINERS = {"fine-tuning": _fine_tuner, "preferences": _preference_tuner}


def _train(name: str, folder: Path) -> Run:
    trainer = TRAINERS[name](folder)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    run = Run(
        engine=engine_of(trainer.model_wrapped),
        losses=[entry["loss"] for entry in log],
        norms=[entry["grad_norm"] for entry in log],
    )
    reference = getattr(trainer, "ref_model", None)
    assert reference is None or engine_of(reference) == run.engine
    whole = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    run.weights = dict(whole) if dist.get_rank() == 0 else {}
    return run


@pytest.mark.parametrize("name", TRAINERS)
@distributed(2, timeout=280)
def test_a_trainer_of_trl_gives_what_it_gives_on_torchs_own(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    beside_torch(lambda folder: _train(name, folder), tmp_path)

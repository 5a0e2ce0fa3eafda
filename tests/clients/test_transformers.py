"""transformers: `Trainer` with FSDP2 and FSDP1, and models sharded as they are loaded.

Run by ``nox -s clients``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.clients import Run, batch, beside_torch, engine_of, shard_on_cpu, tiny_llama
from support.ranks import distributed

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # what libraries say of their own parts
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of the Trainer."""

    version: int = 2
    state_dict_type: str = "SHARDED_STATE_DICT"
    bf16: bool = False
    checkpointing: bool = False
    accumulate: int = 1
    tied: bool = False


CASES = {
    "fsdp2": Case(),
    "fsdp2, bf16, whole state, checkpointing, accumulation": Case(
        bf16=True, state_dict_type="FULL_STATE_DICT", checkpointing=True, accumulate=2
    ),
    "fsdp1, tied, accumulation": Case(version=1, tied=True, accumulate=2),
}


def _trainer(case: Case, folder: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    config = {
        "version": case.version,
        "reshard_after_forward": True if case.version == 2 else "full_shard",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": case.state_dict_type,
        "activation_checkpointing": case.checkpointing,
        "use_orig_params": True,
        "cpu_ram_efficient_loading": False,
        "sync_module_states": False,
    }

    def arguments() -> Any:
        return TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            fsdp=True,
            fsdp_config=config,
            bf16=case.bf16,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=case.accumulate,
            max_steps=4,
            save_steps=2,
            logging_steps=1,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )

    drawn = torch.randint(0, 64, (64, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in drawn]
    model = tiny_llama(tied=case.tied)
    return Trainer(model, shard_on_cpu(arguments), train_dataset=rows, eval_dataset=rows[:16])


def _train(case: Case, folder: Path) -> Run:
    first = _trainer(case, folder)
    first.train()
    log = [entry for entry in first.state.log_history if "loss" in entry]
    run = Run(
        engine=engine_of(first.model_wrapped),
        losses=[*(entry["loss"] for entry in log), first.evaluate()["eval_loss"]],
        norms=[entry["grad_norm"] for entry in log],
    )
    if case.version == 2:  # torch's FSDP1 cannot offload a state dict on a CPU
        whole = first.accelerator.get_state_dict(first.model_wrapped)
        run.weights = dict(whole) if dist.get_rank() == 0 else {}
    dist.barrier()
    run.files = sorted(path.name for path in (folder / "checkpoint-2").iterdir())
    second = _trainer(case, folder)
    second.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    log = [entry for entry in second.state.log_history if "loss" in entry]
    run.resumed = [*(entry["loss"] for entry in log), second.evaluate()["eval_loss"]]
    return run


@pytest.mark.parametrize("name", CASES)
@distributed(2, timeout=280)
def test_the_trainer_trains_saves_and_resumes_as_on_torchs_own(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tolerance = 0.0 if case.version == 2 else 1e-5  # a norm, added up in another order
    beside_torch(lambda folder: _train(case, folder), tmp_path, tolerance=tolerance)


def _train_loaded(folder: Path, tied: bool) -> Run:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        tiny_llama(tied=tied).save_pretrained(folder / "from")
    dist.barrier()
    config = DistributedConfig(fsdp_size=2, fsdp_mixed_precision=tied)
    model = LlamaForCausalLM.from_pretrained(
        folder / "from", distributed_config=config, dtype=torch.float32
    )
    run = Run(engine=engine_of(model), losses=[])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(4):
        tokens = batch(number)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        run.norms.append(float(norm.full_tensor()))
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(float(loss.detach()))
    prompt = torch.arange(3)[None]
    said = model.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
    run.resumed = [float(token) for token in said[0]]
    model.save_pretrained(folder / "to")
    dist.barrier()
    run.files = sorted(path.name for path in (folder / "to").iterdir())
    named = json.loads((folder / "to" / "config.json").read_text())["architectures"]
    assert named == ["LlamaForCausalLM"]
    run.weights = dict(LlamaForCausalLM.from_pretrained(folder / "to").state_dict())
    return run


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied, bf16"])
@distributed(2, timeout=280)
def test_a_model_sharded_as_it_is_loaded_trains_generates_and_saves_as_on_torchs_own(
    tied: bool, tmp_path: Path
) -> None:
    beside_torch(lambda folder: _train_loaded(folder, tied), tmp_path)

"""Accelerate's FSDP2 and FSDP1: `prepare`, clipping, accumulation, `save_state`, `load_state`.

Run by ``nox -s clients``. FSDP2's ``prepare`` swaps an optimizer's parameters by their addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.clients import Run, batch, beside_torch, engine_of, shard_on_cpu, tiny_llama
from support.ranks import distributed

pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # what libraries say of their own parts
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of Accelerate's plugin."""

    version: int
    mixed_precision: str = "no"
    state_dict_type: str = "SHARDED_STATE_DICT"
    checkpointing: bool = False
    accumulate: int = 1
    tied: bool = False
    load_on_first: bool = False  # cpu_ram_efficient_loading: on the meta device elsewhere
    stored: torch.dtype = torch.float32  # in which the model is loaded; a lower one is raised

    @property
    def tolerance(self) -> float:
        """FSDP1's norm adds the elements of one flat parameter in another order."""
        return 0.0 if self.version == 2 else 1e-5

    @property
    def max_norm(self) -> float:
        """Clips, unless a norm's last bit could turn a rounding to bf16, and with it a gradient."""
        return 0.5 if self.version == 2 or self.mixed_precision == "no" else 1e6


CASES = {
    "fsdp2": Case(version=2),
    "fsdp2, tied, loaded on rank 0": Case(version=2, tied=True, load_on_first=True),
    "fsdp2, bf16, whole state, checkpointing, accumulation": Case(
        version=2,
        mixed_precision="bf16",
        state_dict_type="FULL_STATE_DICT",
        checkpointing=True,
        accumulate=2,
    ),
    "fsdp1, tied, accumulation": Case(version=1, tied=True, accumulate=2),
    "fsdp1, bf16, checkpointing": Case(version=1, mixed_precision="bf16", checkpointing=True),
    "fsdp1, loaded in bf16": Case(version=1, mixed_precision="bf16", stored=torch.bfloat16),
}


def _accelerator(case: Case) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    shard_on_cpu(lambda: None)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=case.version,
        reshard_after_forward=True if case.version == 2 else "FULL_SHARD",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=case.state_dict_type,
        activation_checkpointing=case.checkpointing,
        cpu_ram_efficient_loading=case.load_on_first,
        use_orig_params=True if case.version == 1 else None,
    )
    return Accelerator(
        cpu=True,
        mixed_precision=case.mixed_precision,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=case.accumulate,
    )


def _train(case: Case, folder: Path) -> Run:
    accelerator = _accelerator(case)
    model = tiny_llama(tied=case.tied).to(case.stored).train()
    if case.version == 1:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
    run = Run(engine=engine_of(model), losses=[])

    def step(number: int) -> float:
        tokens = batch(number)
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                run.norms.append(
                    float(accelerator.clip_grad_norm_(model.parameters(), case.max_norm))
                )
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.detach())

    run.losses = [step(number) for number in range(4)]
    accelerator.save_state(str(folder))
    after = [step(number) for number in (4, 5)]
    accelerator.load_state(str(folder))
    run.resumed = [step(number) for number in (4, 5)]
    assert run.resumed == after
    run.files = sorted(path.name for path in folder.iterdir())
    run.weights = _weights(accelerator, model, case)
    return run


def _weights(accelerator: Any, model: Any, case: Case) -> dict[str, torch.Tensor]:
    """The whole model on the first rank; torch's FSDP1 cannot offload a state dict on a CPU."""
    if case.version == 2:
        whole = accelerator.get_state_dict(model)
        return dict(whole) if dist.get_rank() == 0 else {}
    prefixes = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
    found = {}
    with type(model).summon_full_params(model):
        for name, param in model.named_parameters():
            for prefix in prefixes:
                name = name.replace(prefix, "")
            found[name] = param.detach().clone()
    if engine_of(model) == "fullshard":
        whole = accelerator.get_state_dict(model)
        assert dist.get_rank() != 0 or all(torch.equal(whole[name], found[name]) for name in found)
    return found


@pytest.mark.parametrize("name", CASES)
@distributed(2, timeout=280)
def test_training_saving_and_resuming_are_those_on_torchs_own(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    beside_torch(lambda folder: _train(case, folder), tmp_path, tolerance=case.tolerance)

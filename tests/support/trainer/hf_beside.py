"""Training by plain transformers and peft: one process, whole batches; what `hf` must equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fullshard_train.settings.config import Config
from fullshard_train.task import IGNORED, Batch, Task
from support.ranks import run_on_ranks
from support.trainer.jobs import TOLERANCE, Ran, losses, plain_model, plain_training, small_task


def _initial_adapters(task: Task, config: Config) -> dict[str, torch.Tensor]:
    """The values that adapters begin with; what is not ours to define."""
    return {
        name.removeprefix("inner."): parameter.detach()
        for name, parameter in plain_model(task, config).named_parameters()
        if "lora_" in name and "magnitude" not in name
    }


def _plain(config: Config, adapters: dict[str, torch.Tensor]) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    section = config.hf
    dtype: Any = torch.float32 if section.method == "full" else "auto"
    model: Any = AutoModelForCausalLM.from_pretrained(section.model, dtype=dtype)
    if section.method == "lora":
        options = LoraConfig(
            r=section.lora_rank,
            lora_alpha=section.lora_alpha,
            target_modules=section.lora_targets,
            use_dora=section.lora_dora,
            modules_to_save=[name for name in section.lora_modules_to_save.split(",") if name],
        )
        model = get_peft_model(model, options)
        model.load_state_dict(adapters, strict=False)
    return model.train()


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Losses by step, weights, and the names of those that were trained."""

    losses: dict[int, float]
    weights: dict[str, torch.Tensor]
    trained: set[str]


def _plain_training(config: Config) -> Plain:
    """Training by transformers' own loss on whole batches; one process."""
    task = small_task(config)
    adapters = _initial_adapters(task, config) if config.hf.method == "lora" else {}
    model = _plain(config, adapters)

    def loss_of(model: Any, batch: Batch) -> torch.Tensor:
        tokens, positions = batch.inputs.unbind(-1)
        labels = torch.full_like(batch.targets, IGNORED)
        labels[:, 1:] = batch.targets[:, :-1]  # transformers moves them by one
        counted = int((labels != IGNORED).sum())
        loss: torch.Tensor = model(
            input_ids=tokens,
            position_ids=positions,
            labels=labels,
            num_items_in_batch=counted,
            use_cache=False,
        ).loss
        return loss

    return Plain(
        losses=plain_training(task, config, model, loss_of),
        weights={name: each.detach() for name, each in model.named_parameters()},
        trained={name for name, each in model.named_parameters() if each.requires_grad},
    )


def reference(config: Config) -> Plain:
    """What a config trains, by plain transformers or peft."""
    plain: Plain = run_on_ranks(_plain_training, 1, config)[0]
    return plain


def compare(ran: Ran, expected: Plain, *, exact: bool) -> None:
    """Passes if a run learned the same: to the bit, or up to the order of additions."""
    found = losses(ran.records)
    if exact:
        assert found == expected.losses
    assert found == pytest.approx(expected.losses, rel=1e-5)
    assert len(set(found.values())) == len(found)
    assert expected.trained
    for name, right in expected.weights.items():
        ours = ran.weights[f"inner.{name}"]
        if exact or name not in expected.trained:
            assert torch.equal(ours, right), name
        else:
            torch.testing.assert_close(ours, right, **TOLERANCE)

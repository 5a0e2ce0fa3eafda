"""Memory, speed and utilisation, from what they are defined by."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fullshard_train.errors import TrainError
from fullshard_train.settings.config import load_config
from fullshard_train.text.model import GPT
from fullshard_train.training.measures import CountsFlops, Memory, Utilisation, utilisation_of
from support.ranks import distributed
from support.trainer.jobs import (
    fit,
    small_config,
    small_task,
    small_text_task,
    small_trainer,
    this_world,
)


@pytest.mark.parametrize("tied", [True, False])
def test_the_flops_of_a_byte_are_palms_formula(tied: bool) -> None:
    config = small_config(model={"tied": tied})
    model, shape = GPT(config.model), config.model
    # Norms and matrices of a block, its expansion being 2; the last norm; the output layer.
    block = 2 * shape.width + shape.width**2 * (3 + 1 + 2 + 2)
    counted = shape.layers * block + shape.width + 256 * shape.width
    attention = 12 * shape.layers * shape.heads * (shape.width // shape.heads) * shape.context
    assert small_text_task(config).flops_per_item(model) == 6 * counted + attention


def test_utilisation_is_the_part_of_all_devices_peaks_that_the_model_needs() -> None:
    assert Utilisation(flops_per_item=6e9, peak=2 * 312e12).of(26_000) == pytest.approx(0.25)


@distributed(2)
def test_a_given_peak_makes_a_column_and_an_unknown_one_a_reason(tmp_path: Path) -> None:
    config = small_config(parallel={"peak_flops": 1e9})
    trainer = small_trainer(config)
    found = trainer.measures.utilisation
    assert isinstance(found, Utilisation)
    assert found.peak == 2e9  # two ranks
    fit(trainer, tmp_path)
    columns = trainer.measures.columns(1000.0)
    assert columns["model_flops_utilisation"] == round(found.of(1000.0), 6)
    plain = small_trainer(small_config())
    reason = plain.measures.utilisation
    assert isinstance(reason, str) and "parallel.peak_flops" in reason
    assert "model_flops_utilisation" not in plain.measures.columns(1000.0)


@distributed(1)
def test_a_task_without_a_formula_says_so() -> None:
    config = small_config(run={"task": "digits"}, parallel={"peak_flops": 1e9})
    task = small_task(config)
    assert not isinstance(task, CountsFlops)
    model = task.build_model()
    cpu = torch.device("cpu")
    reason = utilisation_of(task, model, config, world=this_world(), device=cpu)
    assert isinstance(reason, str) and "digits" in reason


def test_memory_on_the_cpu_is_the_peak_of_the_resident_set() -> None:
    memory = Memory(torch.device("cpu"))
    before = memory.peak()
    block = torch.ones(before // 4 + (64 << 20))  # touched, and more than the process ever had
    grown = memory.peak()
    assert grown - before > 32 << 20
    del block
    # The kernel counts per thread, and adds up now and then.
    near = pytest.approx(grown, abs=4 << 20)
    assert memory.peak() == near
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())
        assert int(line) * 1024 == near


@distributed(2)
def test_the_peak_of_each_rank_is_known_on_all(tmp_path: Path) -> None:
    trainer = small_trainer(small_config())
    fit(trainer, tmp_path)
    peaks: list[list[int]] = [[], []]
    torch.distributed.all_gather_object(peaks, list(trainer.measures.peaks))
    assert peaks[0] == peaks[1]
    assert len(peaks[0]) == 2 and min(peaks[0]) > 0


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_peak_that_is_none_is_an_error(value: float) -> None:
    with pytest.raises(TrainError, match=r"parallel\.peak_flops"):
        load_config([], [f"parallel.peak_flops={value}"])

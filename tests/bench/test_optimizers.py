"""`python -m fullshard_bench optim`: what it measures, and that the record is what pages say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from fullshard_bench.cli import main
from fullshard_bench.measuring import optimizers
from support.members import ROOT
from support.ranks import distributed

RECORD = ROOT / "benchmarks" / "optimizers" / "optim_2-core-epyc_2026-11-24.json"


@pytest.mark.matrix
def test_a_run_measures_all_contestants_and_counts_what_muon_sends(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    words = ["optim", "--model", "gpt-tiny", "--ranks", "2", "--rounds", "1"]
    assert main([*words, "--output", str(output)]) == 0
    (found,) = json.loads(output.read_text())["models"].values()
    assert all(found[f"{name}_ms"] > 0 for name in ("muon", "gathering", "newton_schulz"))
    assert found["adamw8bit_bytes"] < found["adamw_bytes"]
    # 2 bytes of each element to the owner and 2 back, for half of them: 4 (W-1)/W
    assert found["muon_sent_bytes"] == 2 * found["matrix_elements"]
    assert "| gpt-tiny |" in output.with_suffix(".md").read_text()


@distributed(2)
def test_a_step_lasts_from_the_first_begin_to_the_last_end(world_size: int) -> None:
    """Also where a rank begins when the other one has ended."""
    clock = iter([100.0 + 10 * dist.get_rank(), 105.0 + 10 * dist.get_rank()])
    with patch.object(optimizers, "time", Mock(monotonic=lambda: next(clock))):
        assert optimizers._span(lambda: None, in_a_row=3) == 5_000


def test_the_page_says_what_was_recorded() -> None:
    page = (ROOT / "docs" / "how-to" / "optimizers.md").read_text()
    models = json.loads(RECORD.read_text())["models"]
    said = re.search(
        r"Muon took ([\d.]+) .*? and ([\d.]+) .*? and ([\d.]+) and ([\d.]+) times", page, re.S
    )
    assert said is not None
    small, mini = models["gpt-small"], models["gpt-mini"]
    ratios = [each["muon_ms"] / each["gathering_ms"] for each in (small, mini)]
    ratios += [each["muon_ms"] / each["newton_schulz_ms"] for each in (small, mini)]
    assert [float(figure) for figure in said.groups()] == [round(ratio, 2) for ratio in ratios]
    eight = re.search(
        r"8-bit AdamW ([\d.]+) and ([\d.]+) times.*?with ([\d.]+) and ([\d.]+)", page, re.S
    )
    assert eight is not None
    found = [round(each["adamw8bit_ms"] / each["adamw_ms"], 1) for each in (small, mini)]
    found += [round(each["adamw8bit_bytes"] / each["adamw_bytes"], 3) for each in (small, mini)]
    assert [float(figure) for figure in eight.groups()] == found


def test_the_page_says_the_held_out_losses_that_were_recorded() -> None:
    page = (ROOT / "docs" / "how-to" / "optimizers.md").read_text()
    said = re.search(r"AdamW ([\d.]+), Muon ([\d.]+), SOAP ([\d.]+), 8-bit AdamW ([\d.]+)\.", page)
    assert said is not None
    record = RECORD.parent / "held-out_2-ranks_2026-11-23.json"
    runs = {each["name"].split()[0]: each for each in json.loads(record.read_text())["runs"]}
    for name, figure in zip(("adamw", "muon", "soap", "adamw8bit"), said.groups(), strict=True):
        ends = [losses[-1] for losses in runs[name]["held_out_losses"]]
        assert runs[name]["steps"][-1] == 200
        assert float(figure) == round(sum(ends) / len(ends), 3), name


def test_the_page_says_the_losses_in_equal_time_that_were_recorded() -> None:
    page = (ROOT / "docs" / "how-to" / "optimizers.md").read_text()
    record = json.loads((RECORD.parent / "held-out-tuned_2-ranks_2026-11-23.json").read_text())
    shown = "AdamW {} ({}) at a rate of {}, Muon {} ({}) at {}, SOAP {} ({}) at {}, 8-bit AdamW {}"
    budget = record["runs"][0]["steps"][-1] * record["runs"][0]["seconds_per_step"]
    figures: list[str] = []
    for each in record["runs"]:
        losses = dict(zip([*each["steps"]], each["held_out_losses"][0], strict=True))
        last, before = each["steps"][-1], each["steps"][-2]
        affordable = min(budget / each["seconds_per_step"], last)
        slope = (losses[last] - losses[before]) / (last - before)
        then = losses[before] + slope * (affordable - before)
        figures += [f"{losses[last]:.3f}", f"{then:.3f}", each["name"].split()[1]]
    assert shown.format(*figures) in " ".join(page.split())
    steps = [f"{1000 * each['seconds_per_step']:.0f}" for each in record["runs"]]
    assert f"{', '.join(steps[:3])} and {steps[3]} ms" in page


def test_the_page_says_what_shared_memory_and_the_compiler_were_measured_to_change() -> None:
    page = " ".join((ROOT / "docs" / "how-to" / "optimizers.md").read_text().split())
    turns = json.loads((RECORD.parent / "muon-in-turns_2-core-epyc_2026-11-23.json").read_text())
    ratio = {
        (each["model"], each["exchange"]): f"{each['muon_ms'] / each['newton_schulz_ms']:.2f}"
        for each in turns["runs"]
    }
    small, mini = (
        [ratio[model, way] for way in ("shared memory", "sockets")]
        for model in ("gpt-small", "gpt-mini")
    )
    assert f"takes {small[0]} (gpt-small) and {mini[0]} (gpt-mini)" in page
    assert f"{small[1]} and {mini[1]} times over sockets" in page
    compiled = json.loads((RECORD.parent / "compiled_2-core-epyc_2026-11-23.json").read_text())
    times = [f"{compiled[f'adamw8bit_{how}_ms']:.0f}" for how in ("compiled", "eager")]
    assert f"took {times[0]} ms, and the eager step {times[1]} ms" in page

"""`python -m fullshard_bench optim`: what it measures, and that the record is what pages say."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fullshard_bench.cli import main
from support.members import ROOT

RECORD = ROOT / "benchmarks" / "optimizers" / "optim_2-core-epyc_2026-11-23.json"


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
    said = re.search(r"AdamW ([\d.]+), Muon ([\d.]+), SOAP ([\d.]+), 8-bit AdamW ([\d.]+),", page)
    assert said is not None
    record = RECORD.parent / "held-out_2-ranks_2026-11-23.json"
    runs = {each["name"].split()[0]: each for each in json.loads(record.read_text())["runs"]}
    for name, figure in zip(("adamw", "muon", "soap", "adamw8bit"), said.groups(), strict=True):
        ends = [losses[-1] for losses in runs[name]["held_out_losses"]]
        assert runs[name]["steps"][-1] == 200
        assert float(figure) == round(sum(ends) / len(ends), 3), name

"""Pages about plans, verdicts and races: whole without a network, with all they are about."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as graph_objects
import pytest
import torch
from torch import nn

from fullshard.preflight import Cause, Difference, Phase, Tolerance, Verdict, plan
from fullshard.preflight.pages.contents import plan_parts, races_parts, verdict_parts
from fullshard.preflight.pages.page import Figure, PageError, Table, Text, write_page
from fullshard.preflight.races import Access, Kind, Race, RaceReport

SITE_FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=")


def _own(path: Path) -> str:
    """The text of a page without the script of plotly."""
    text = path.read_text()
    script = importlib.import_module("plotly.offline").get_plotlyjs()
    assert script in text
    return text.replace(script, "")


def _figures(text: str) -> list[dict[str, Any]]:
    found = [json.loads(each) for each in re.findall(r"data-figure=[^>]*>(.*?)</script>", text)]
    for each in found:
        graph_objects.Figure(each)  # plotly refuses what its schema does not have
    return found


def _planned(device: str | None) -> Any:
    return plan(
        lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]),
        torch.empty(8, 64),
        lambda model, batch: model(batch).square().mean(),
        mesh=4,
        device=device,
    )


def test_a_page_about_plans_has_choices_memory_parts_and_streams(tmp_path: Path) -> None:
    plans = [_planned(None), _planned("h100")]
    write_page(tmp_path / "page.html", "Plans", plan_parts(plans, 1 << 20))
    text = _own(tmp_path / "page.html")
    assert not SITE_FETCHED.search(text)
    memory, parts, again, _, streams = _figures(text)
    *layers, total = memory["data"]
    assert max(total["y"]) * 2**20 == pytest.approx(plans[0].peak)
    places = [each for each in plans[0].course if each.phase != "between steps"]
    assert total["text"] == [*map(str, places), str(places[-1])]
    sums = [sum(layer["y"][place] for layer in layers) for place in range(len(places))]
    assert sums == pytest.approx(total["y"][:-1])
    assert sum(each["x"][0] for each in parts["data"]) * 2**20 == pytest.approx(plans[0].peak)
    assert memory["layout"]["shapes"][-1]["y0"] == 1  # the budget, in MiB
    assert again["layout"].keys() == memory["layout"].keys()
    ran = sum(len(each["x"]) for each in streams["data"])
    assert ran == len(plans[1].time.spans)
    ends = [b + x for each in streams["data"] for b, x in zip(each["base"], each["x"], strict=True)]
    assert max(ends) <= 1000 * plans[1].step_time * (1 + 1e-9)
    rows = re.findall(r"<tr><td>4</td><td>(.*?)</td>", text)
    assert rows == ["any accelerator", "h100"]


def _verdict(count: int) -> Verdict:
    first = Difference(phase=Phase.GRADIENT, step=1, name="a.0.weight", module="a.0", error=2.0)
    return Verdict(
        equal=False,
        steps=2,
        first=first,
        others=tuple(f"block.{number}.<weight>" for number in range(count)),
        largest=first,
        causes=(Cause(name="a cause", evidence="seen", tested=True),),
        known=(),
        notes=(),
        tolerance=Tolerance(dtype=torch.float32, world_size=2, stretch=1.0),
    )


def test_a_page_about_a_verdict_has_each_of_1000_parameters_and_modules(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", "Verdict", verdict_parts(_verdict(1000)))
    text = _own(tmp_path / "page.html")
    assert len(re.findall(r"<tr><td>block\.\d+\.&lt;weight&gt;</td>", text)) == 1000
    (modules,) = _figures(text)
    bars = dict(zip(modules["data"][0]["x"], modules["data"][0]["y"], strict=True))
    assert bars == {"a": 1, "block": 1000}  # 1,001 bars would be a surface
    assert 'placeholder="filter 1001 rows"' in text
    assert "<td>a cause</td><td>shown</td><td>seen</td>" in text


def test_a_page_about_races_has_both_accesses(tmp_path: Path) -> None:
    access = [Access(f"aten::op{n}", f"stream {n}", f"file.py:{n}", n == 1) for n in range(2)]
    race = Race(Kind.ACCESS, "shard of weight", *access)
    report = RaceReport({race: 3}, {"default": 5, "gather": 2}, collectives=4, ended=True)
    write_page(tmp_path / "page.html", "Races", races_parts(report))
    text = _own(tmp_path / "page.html")
    for each in access:
        assert each.line in text
    assert "<td>shard of weight</td>" in text
    assert _figures(text)[0]["data"][0]["y"] == [5, 2]


def test_text_of_a_user_is_no_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    parts: list[Text | Table | Figure] = [
        Text(title=evil, text=evil),
        Table(title="t", heads=[evil], rows=[[evil]]),
        Figure(title="f", data=[{"name": evil}], layout={}),
    ]
    write_page(tmp_path / "page.html", evil, parts)
    text = _own(tmp_path / "page.html")
    assert "<script>alert" not in text
    assert _figures(text)[0]["data"][0]["name"] == evil


def test_without_plotly_the_error_names_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(PageError, match="--html needs plotly; pip install plotly"):
        write_page(tmp_path / "page.html", "t", [])
    monkeypatch.undo()
    with pytest.raises(PageError, match="cannot be written: No such file"):
        write_page(tmp_path / "none" / "page.html", "t", [])

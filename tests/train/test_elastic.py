"""Two jobs are the replica groups of one run, which goes on when one of them is lost."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from fullshard.elastic import Lighthouse
from fullshard_train.cli import main
from fullshard_train.reporting.metrics import read_metrics
from support.trainer.jobs import EPSILON, TOLERANCE, losses, settings
from support.trainer.launchers import Forked, until

needs_torchft = pytest.mark.skipif(
    find_spec("torchft") is None, reason="replica groups need torchft"
)


@pytest.fixture
def words(text: Path) -> list[str]:
    optim = {"epsilon": EPSILON, "clip_norm": 0.5}
    train = {"steps": 40, "accumulate": 1, "evaluate_every": 20}
    changed = settings(train=train, optim=optim, checkpoint={"every": 10}, run={"slow_ranks": 5})
    return [*changed, "--data", str(text)]


@pytest.mark.matrix
@needs_torchft
def test_a_run_of_two_groups_that_loses_one_ends_as_a_run_of_one_job(
    words: list[str], tmp_path: Path
) -> None:
    lighthouse = Lighthouse(min_groups=2, join_timeout=1.0, heartbeat_timeout=1.0)
    address = f"http://127.0.0.1:{lighthouse.address.rpartition(':')[2]}"

    def start(group: str, ranks: int) -> Forked:
        place = ["--elastic", address, "--group", group, "--timeout", "20"]
        folder = ["--out", str(tmp_path / group), "--resume", "auto"]
        return Forked(ranks, [*words, *place, *folder], tmp_path / f"{group}.txt")

    jobs = {"a": start("a", 1), "b": start("b", 2)}
    metrics = tmp_path / "b" / "metrics.jsonl"
    until(metrics, 5, *jobs.values())
    jobs["b"].kill()
    jobs["b"] = start("b", 2)
    codes = [job.wait(120) for job in jobs.values()]
    lighthouse.close()
    told = {group: (tmp_path / f"{group}.txt").read_text() for group in jobs}
    assert codes == [0, 0], told
    assert main([*words, "--out", str(tmp_path / "alone")]) == 0
    expected = read_metrics(tmp_path / "alone" / "metrics.jsonl")
    found = read_metrics(tmp_path / "a" / "metrics.jsonl")
    for kind in ("train", "held_out"):
        assert losses(found, kind) == pytest.approx(
            losses(expected, kind), rel=TOLERANCE["rtol"], abs=TOLERANCE["atol"]
        )
    assert losses(read_metrics(metrics))[40] == losses(found)[40]
    compared = [each for each in read_metrics(metrics) if each["kind"] == "ranks"]
    assert compared and all(each["step_ms"] > 0 for each in compared)  # of two ranks, in group b
    assert "b joins from a" in told["a"]


def test_an_address_without_a_group_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--elastic", "http://127.0.0.1:1"]) == 2
    assert "give both" in capsys.readouterr().err

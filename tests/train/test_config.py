"""Configs: defaults, files, overrides, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard_train.errors import TrainError
from fullshard_train.settings.config import (
    Config,
    default_table,
    differences,
    load_config,
    merge,
    override_table,
    to_toml,
)


def test_the_committed_default_config_names_every_setting_and_is_valid() -> None:
    assert load_config([], []).to_table() == default_table()


def test_a_file_goes_over_the_default_and_an_override_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nsteps = 7\nseed = 8\n")
    config = load_config([file], ["train.seed=9"])
    assert (config.train.steps, config.train.seed) == (7, 9)
    assert config.train.batch == load_config([], []).train.batch


def test_of_several_files_the_later_one_wins(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text("[train]\nsteps = 7\nseed = 8\n")
    second.write_text("[train]\nsteps = 9\n")
    config = load_config([first, second], [])
    assert (config.train.steps, config.train.seed) == (9, 8)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[trian]\nsteps = 7\n",
            r"mine\.toml: trian: no such section; did you mean train\? allow",
        ),
        (
            "[train]\nstpes = 7\n",
            r"train\.stpes: no such setting; did you mean steps\? allowed: st",
        ),
        ("[train]\nsteps = 'x'\n", r"mine\.toml: train\.steps = 'x': must be a valid integer"),
        (
            "[train]\nsteps = 0\n",
            r"mine\.toml: train\.steps = 0: must be greater than or eq",
        ),
        ("train = 3\n", r"mine\.toml: train = 3: must be a section, \[train\]"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_name(
    tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(TrainError, match=told) as caught:
        load_config([tmp_path / "mine.toml"], [])
    assert "mine.toml: " in str(caught.value)


def test_the_last_override_of_a_setting_wins() -> None:
    assert load_config([], ["train.steps=1", "train.steps=2"]).train.steps == 2


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.source=/some/path", "/some/path"),
        ('data.source="/some/path"', "/some/path"),
        ("data.source=7", "7"),
        ("data.source=-", "-"),
        ("optim.learning_rate=1", 1.0),
        ("optim.clip_norm=inf", math.inf),
        ("model.tied=false", False),
        ("model.layers = 3", 3),
    ],
)
def test_an_override_is_read_as_the_type_of_its_setting(override: str, value: object) -> None:
    section, name = override.partition("=")[0].strip().split(".")
    found = load_config([], [override]).to_table()[section][name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("steps=3", "section.name=value"),
        ("train.steps", "section.name=value"),
        ("nothing.steps=3", "config nothing: no such section; allowed: run"),
        ("train.nothing=3", "no such setting"),
        ("train.steps=many", "train.steps = 'many': must be a valid integer"),
        ("train.steps=1.5", "must be a valid integer"),
        ("train.steps=true", "must be a valid integer"),
        ("model.tied=1", "must be a valid boolean"),
        ("train.steps=0", "must be greater than or equal to 1"),
        ("train.batch=7", "multiple of train.accumulate"),
        ("model.width=130", "multiple of 2 * heads"),
        ("optim.learning_rate=nan", "must be a finite number"),
        ("optim.learning_rate=0", "must be greater than 0"),
        ("optim.beta1=1.0", "must be less than 1"),
        ("optim.final_fraction=2", "must be less than or equal to 1"),
        ("optim.weight_decay=-1", "must be greater than or equal to 0"),
        ("parallel.device=tpu", "must be 'auto', 'cpu' or 'cuda'"),
        ("parallel.param_dtype=int8", "must be 'auto', 'float32' or 'bfloat16'"),
        ("sample.prompt=", "must have at least 1 character"),
        ("sample.temperature=0", "must be greater than 0"),
        ("data.held_out_every=1", "must be greater than or equal to 2"),
    ],
)
def test_an_error_names_the_setting_and_what_is_allowed(override: str, told: str) -> None:
    if override == "train.batch=7":
        override = "train.accumulate=5"
    with pytest.raises(TrainError) as caught:
        load_config([], [override])
    assert told in str(caught.value)
    name = override.partition("=")[0]
    assert name in str(caught.value) or told.startswith(("multiple", "config nothing"))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            {"train": {"stepz": 3}},
            "config train.stepz: no such setting; did you mean steps? allowed",
        ),
        ({"trains": {}}, "config trains: no such section; did you mean train?"),
        ({"train": 3}, "must be a section"),
    ],
)
def test_an_unknown_name_in_a_table_is_refused(table: dict[str, Any], told: str) -> None:
    with pytest.raises(TrainError, match="config") as caught:
        Config.from_table(merge(default_table(), table))
    assert told in str(caught.value)


def test_a_missing_setting_is_refused() -> None:
    table = default_table()
    del table["train"]["steps"]
    with pytest.raises(TrainError, match=r"train\.steps: missing setting"):
        Config.from_table(table)


def test_a_file_that_is_not_there_or_not_toml_is_refused_by_name(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    with pytest.raises(TrainError, match=r"broken\.toml: not TOML"):
        load_config([broken], [])
    with pytest.raises(TrainError, match=r"gone\.toml: No such file"):
        load_config([tmp_path / "gone.toml"], [])


@given(prompt=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_a_config_written_as_toml_reads_back_the_same(prompt: str) -> None:
    table = merge(default_table(), {"sample": {"prompt": prompt}, "optim": {"clip_norm": math.inf}})
    config = Config.from_table(table)
    assert Config.from_table(tomllib.loads(to_toml(config))) == config


def test_a_config_cannot_be_changed() -> None:
    config = load_config([], [])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3  # type: ignore[misc]  # the point of the test


def test_differences_names_exactly_the_settings_that_differ() -> None:
    ours = load_config([], [])
    theirs = load_config([], ["model.layers=9", "train.seed=9"])
    assert differences(ours, theirs) == ["model.layers", "train.seed"]
    assert differences(ours, ours) == []


def test_merge_does_not_change_its_inputs() -> None:
    base = default_table()
    merge(base, override_table(["train.steps=1"]))
    assert base == default_table()

"""The configuration of a run, built from TOML and command-line overrides.

Owns the merge (default.toml, then files, then overrides) and the way back to TOML; the sections and
their checks are in `fullshard_train.settings.sections`. A `Config` that exists is valid, as far as
it can be checked without the world: what depends on the number of ranks is checked by
`fullshard_train.ranks.distributed`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_origin, get_type_hints

from pydantic import ValidationError

from fullshard_train.errors import TrainError, no_such
from fullshard_train.settings.sections import (
    CheckpointConfig,
    DataConfig,
    DigitsConfig,
    HFConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)

__all__ = [
    "Config",
    "default_table",
    "differences",
    "load_config",
    "merge",
    "override_table",
    "read_table",
    "to_toml",
]

Table: TypeAlias = Mapping[str, Any]
Layer: TypeAlias = tuple[str, Table]
"""Where a table comes from, as an error about it begins, and the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a run is asked to do, valid and complete."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig
    digits: DigitsConfig
    hf: HFConfig
    train: TrainConfig
    optim: OptimConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    sample: SampleConfig

    @classmethod
    def from_table(cls, table: Table) -> Config:
        """The config that a complete nested table describes.

        Raises:
            TrainError: a section or key is unknown or missing, or a value has the wrong type or
                range.
        """
        return cls._from_layers([("config ", table)])

    @classmethod
    def _from_layers(cls, layers: Sequence[Layer]) -> Config:
        """The config of the layers' tables; an error begins as the last layer that caused it."""
        tables = [table for _, table in layers]
        merged, kinds = merge(*tables), get_type_hints(cls)
        for name in (each for each in merged if each not in kinds):
            where = _source(layers, name)
            raise TrainError(f"{where}{name}: {no_such('section', name, kinds)}")
        return cls(**{name: _section(kind, name, layers, merged) for name, kind in kinds.items()})

    def to_table(self) -> dict[str, dict[str, Any]]:
        """The nested table that `from_table` builds this config from."""
        return dataclasses.asdict(self)


def _section(kind: type[Any], name: str, layers: Sequence[Layer], merged: Table) -> Any:
    if name not in merged:
        raise TrainError(f"config {name}: missing section")
    try:
        return kind(**merged[name])
    except ValidationError as error:
        first = error.errors()[0]
    value, allowed = first["input"], first["msg"]
    if first["type"] == "setting":  # of ours: see `fullshard_train.settings.sections`
        key, value = first["ctx"]["field"], first["ctx"]["value"]
    else:
        key = str(first["loc"][0])
    where = f"{_source(layers, name, key)}{name}.{key}"
    if first["type"] == "missing":
        raise TrainError(f"{where}: missing setting")
    if first["type"] == "unexpected_keyword_argument":
        raise TrainError(f"{where}: {no_such('setting', key, get_type_hints(kind))}")
    allowed = re.sub("^(Input|String) should", "must", allowed)
    raise TrainError(f"{where} = {value!r}: {allowed}")


def _source(layers: Sequence[Layer], section: str, key: str | None = None) -> str:
    """The beginning of an error: of the last layer that has the section, or the section's key."""
    found = (
        where
        for where, table in reversed(layers)
        if section in table and (key is None or key in table[section])
    )
    return next(found, "config ")


def default_table() -> dict[str, Any]:
    """The table of the committed default.toml."""
    text = resources.files("fullshard_train").joinpath("default.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def read_table(path: Path) -> dict[str, Any]:
    """The table of a TOML file.

    A bare name that is no file in the working directory may be a config of the package:
        `digits.toml`.

    Raises:
        TrainError: the file is not there, not readable, not TOML or not of sections.
    """
    packaged = resources.files("fullshard_train").joinpath(path.name)
    bare = path.name == str(path) and path.suffix == ".toml"
    source = packaged if bare and not path.exists() and packaged.is_file() else path
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainError(f"config file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrainError(f"config file {path}: not TOML: {error}") from error
    _require_sections(table, f"config file {path}: ")
    return table


def override_table(overrides: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The table of `section.name=value` overrides; a later one wins.

    A value is read as TOML; for a setting that is text, quotes may be left out.

    Raises:
        TrainError: an override is not of that form.
    """
    table: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise TrainError(f"override {override!r}: must look like section.name=value")
        table.setdefault(section, {})[key] = _parse_value(section, key, text.strip())
    return table


def _parse_value(section: str, key: str, text: str) -> object:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    kind = get_type_hints(get_type_hints(Config).get(section, Config)).get(key)
    is_text = kind is str or get_origin(kind) is Literal
    return text if is_text and not isinstance(value, str) else value


def merge(*tables: Table) -> dict[str, dict[str, Any]]:
    """One nested table: for every setting, the value of the last table that sets it.

    Raises:
        TrainError: a section of a table is not a table.
    """
    merged: dict[str, dict[str, Any]] = {}
    for table in tables:
        _require_sections(table, "config ")
        for name, section in table.items():
            merged[name] = {**merged.get(name, {}), **section}
    return merged


def _require_sections(table: Table, where: str) -> None:
    for name, section in table.items():
        if not isinstance(section, Mapping):
            raise TrainError(f"{where}{name} = {section!r}: must be a section, [{name}]")


def load_config(
    paths: Iterable[Path], overrides: Iterable[str], *, base: Table | None = None
) -> Config:
    """The config of `base` (default.toml unless given), then the files, then `overrides`.

    Raises:
        TrainError: as `read_table`, `override_table` and `Config.from_table`. An error in a file
            names the file.
    """
    layers: list[Layer] = [("config ", default_table() if base is None else base)]
    layers += [(f"config file {path}: ", read_table(path)) for path in paths]
    layers.append(("config ", override_table(overrides)))
    return Config._from_layers(layers)


def differences(ours: Config, theirs: Config) -> list[str]:
    """The names, `section.name`, of the settings in which two configs differ."""
    first, second = ours.to_table(), theirs.to_table()
    return [
        f"{section}.{name}"
        for section, settings in first.items()
        for name, value in settings.items()
        if value != second[section][name]
    ]


def to_toml(config: Config) -> str:
    """The config as TOML text that `read_table` and `Config.from_table` turn back into it."""
    lines: list[str] = []
    for section, settings in config.to_table().items():
        lines.append(f"[{section}]")
        lines.extend(f"{name} = {_toml_value(value)}" for name, value in settings.items())
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)

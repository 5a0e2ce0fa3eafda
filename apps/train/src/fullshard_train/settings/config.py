"""The configuration of a run, built from TOML and command-line overrides.

Owns the merge (default.toml, then files, then overrides) and the way back to TOML; the sections and
their checks are in `fullshard_train.settings.sections`. A `Config` that exists is valid, as far as
it can be checked without the world: what depends on the number of ranks is checked by
`fullshard_train.ranks.distributed`.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from fullshard_train.errors import TrainError
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
    "read_settings",
    "read_table",
    "to_toml",
]

Table = Mapping[str, Any]


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
        sections = _section_types()
        _check_names("section", table, sections, "config ")
        return cls(**{name: _section(kind, name, table[name]) for name, kind in sections.items()})

    def to_table(self) -> dict[str, dict[str, Any]]:
        """The nested table that `from_table` builds this config from."""
        return dataclasses.asdict(self)


def _section_types() -> dict[str, type[Any]]:
    return get_type_hints(Config)


def _check_names(kind: str, given: Table, allowed: Iterable[str], where: str) -> None:
    allowed = list(allowed)
    for name in given:
        _check_known(kind, name, allowed, where)
    for name in allowed:
        if name not in given:
            raise TrainError(f"{where}{name}: missing {kind}")


def _check_known(kind: str, name: str, allowed: Iterable[str], where: str) -> None:
    if name not in allowed:
        raise TrainError(f"{where}{name}: no such {kind}; allowed: {', '.join(allowed)}")


def _section(kind: type[Any], name: str, table: object) -> Any:
    if not isinstance(table, Mapping):
        raise TrainError(f"config {name} = {table!r}: must be a section, [{name}]")
    hints = get_type_hints(kind)
    _check_names("setting", table, hints, f"config {name}.")
    values = {key: _typed(hints[key], f"config {name}.{key}", table[key]) for key in hints}
    return kind(**values)


def _typed(kind: type[Any], name: str, value: object) -> object:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise TrainError(f"{name} = {value!r}: must be of type {kind.__name__}")
    return value


def default_table() -> dict[str, Any]:
    """The table of the committed default.toml."""
    text = resources.files("fullshard_train").joinpath("default.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def read_table(path: Path) -> dict[str, Any]:
    """The table of a TOML file.

    A bare name that is no file in the working directory may be a config of the package:
        `digits.toml`.

    Raises:
        TrainError: the file is not there, not readable or not TOML.
    """
    packaged = resources.files("fullshard_train").joinpath(path.name)
    bare = path.name == str(path) and path.suffix == ".toml"
    source = packaged if bare and not path.exists() and packaged.is_file() else path
    try:
        return tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainError(f"config file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrainError(f"config file {path}: not TOML: {error}") from error


def override_table(overrides: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The table of `section.name=value` overrides; a later one wins.

    A value is read as TOML; for a setting that is text, quotes may be left out.

    Raises:
        TrainError: an override names no setting, or its value cannot be read as the setting's type.
    """
    table: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and section and key):
            raise TrainError(f"override {override!r}: must look like section.name=value")
        sections = _section_types()
        if section not in sections:
            raise TrainError(
                f"override {override!r}: no such section; allowed: {', '.join(sections)}"
            )
        hints = get_type_hints(sections[section])
        if key not in hints:
            raise TrainError(f"override {override!r}: no such setting; allowed: {', '.join(hints)}")
        table.setdefault(section, {})[key] = _parse_value(hints[key], override, text.strip())
    return table


def _parse_value(kind: type[Any], override: str, text: str) -> object:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if kind is str:
        return value if isinstance(value, str) else text
    if type(value) is str:
        raise TrainError(f"override {override!r}: {text!r} is not of type {kind.__name__}")
    return value


def merge(*tables: Table) -> dict[str, dict[str, Any]]:
    """One nested table: for every setting, the value of the last table that sets it."""
    merged: dict[str, dict[str, Any]] = {}
    for table in tables:
        for name, section in table.items():
            if not isinstance(section, Mapping):
                raise TrainError(f"config {name} = {section!r}: must be a section, [{name}]")
            merged[name] = {**merged.get(name, {}), **section}
    return merged


def read_settings(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The settings of several TOML files; a later file wins.

    Raises:
        TrainError: as `read_table`, or a file has a section or setting that there is not, or a
            value of the wrong type. The file is named.
    """
    return merge(*(_checked(read_table(path), f"config file {path}: ") for path in paths))


def _checked(table: Table, where: str) -> Table:
    """`table`, once its names and types are known to be right; `where` begins the errors."""
    sections = _section_types()
    for name, section in table.items():
        _check_known("section", name, sections, where)
        if not isinstance(section, Mapping):
            raise TrainError(f"{where}{name} = {section!r}: must be a section, [{name}]")
        hints = get_type_hints(sections[name])
        for key, value in section.items():
            _check_known("setting", key, hints, f"{where}{name}.")
            _typed(hints[key], f"{where}{name}.{key}", value)
    return table


def load_config(
    paths: Iterable[Path], overrides: Iterable[str], *, base: Table | None = None
) -> Config:
    """The config of `base` (default.toml unless given), then the files, then `overrides`.

    Raises:
        TrainError: as `read_settings`, `override_table` and `Config.from_table`.
    """
    start = default_table() if base is None else base
    return Config.from_table(merge(start, read_settings(paths), override_table(overrides)))


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

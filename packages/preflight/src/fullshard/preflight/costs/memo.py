"""Measurements of this machine, kept in this process, and in a file if a user names one.

A file that was measured on another machine, or with another torch, is refused.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

__all__ = ["Memo", "memo_of"]

Figures = tuple[float, ...]
_kept: dict[tuple[Path | None, str], Memo] = {}


def _machine() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(errors="replace").splitlines() if cpus.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor())}, torch {torch.__version__}"


class Memo:
    """Figures by what they are of; no figures of what could not be measured.

    Args:
        path: the file that keeps them; None: this process alone.
        setting: by how many ranks and threads they were measured, in words.

    Raises:
        ValueError: if the file is of another machine, or none of ours.
    """

    def __init__(self, path: Path | None, setting: str) -> None:
        """Read the file, if it is there."""
        self._path, self._setting = path, setting
        self._figures = dict(_read(path).get(setting, {}))

    def __contains__(self, key: str) -> bool:
        """Whether it was measured, or tried to."""
        return key in self._figures

    def __getitem__(self, key: str) -> Figures:
        """The figures; none if it could not be measured."""
        return self._figures[key]

    def add(self, figures: Mapping[str, Figures]) -> None:
        """Keep what was measured."""
        self._figures.update(figures)
        if self._path is not None:
            settings = {**_read(self._path), self._setting: self._figures}
            told = {"machine": _machine(), "settings": settings}
            self._path.write_text(json.dumps(told, indent=1))


def memo_of(path: str | Path | None, setting: str) -> Memo:
    """The one memo of this process for a file and a setting.

    Raises:
        ValueError: as ``Memo``.
    """
    file = None if path is None else Path(path).resolve()
    if (file, setting) not in _kept:
        _kept[file, setting] = Memo(file, setting)
    return _kept[file, setting]


def _read(path: Path | None) -> dict[str, dict[str, Figures]]:
    """Return the content of a file by setting; nothing if there is none."""
    if path is None or not path.exists():
        return {}
    try:
        read = json.loads(path.read_text())
        machine = read["machine"]
        settings = {
            setting: {key: tuple(map(float, row)) for key, row in rows.items()}
            for setting, rows in read["settings"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} holds no measured costs ({error!r}); name a file that is not there yet, or "
            "one that a plan with Here(cache=...) wrote"
        ) from error
    if machine != _machine():
        raise ValueError(
            f"{path} was measured on another machine or torch ({machine}; this is {_machine()}); "
            "name a file of its own for each"
        )
    return settings

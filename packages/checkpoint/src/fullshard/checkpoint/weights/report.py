"""Reports of loading and saving weights: names, bytes, and the text of an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fullshard.checkpoint.files.headers import WeightsError

__all__ = ["LoadReport", "MismatchError", "SaveReport", "listed"]

_SHOWN = 20  # names in the text of an error; a report has all


def listed(names: Sequence[str]) -> str:
    """Return ``names`` as text, of very many only the first."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@dataclass(kw_only=True)
class LoadReport:
    """The result of ``load_safetensors``, and the bytes that this rank read.

    Attributes:
        loaded: the model's parameters and buffers that have their values from the files.
        missing: those for which the files have no tensor, with the name that it should have.
        unexpected: tensors of the files that no parameter or buffer takes.
        mismatched: tensors that have another shape or kind of dtype in the files, or that cannot be
            cut by a rule; in words.
        twice: tensors of the files that several parameters take, which are not tied; in words.
        ties: further names of tied parameters, and the first name, under which they were loaded.
        bytes_needed: those of this rank's shards, in the dtypes of the files.
        bytes_requested: those that this rank asked the files for, headers left out.
        bytes_beyond: additional bytes that this rank read, to compare whole chunks with their
            checksums.
        header_bytes: those of headers and the index.
        bytes_from_device: bytes that the system fetched from a disk for this process during the
            call; less than requested where files were in memory. None where the system does not
            tell.
        on_meta: buffers that are still on the meta device, as the files do not have them.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    bytes_needed: int = 0
    bytes_requested: int = 0
    bytes_beyond: int = 0
    header_bytes: int = 0
    bytes_from_device: int | None = None
    on_meta: list[str] = field(default_factory=list)

    def problems(self, *, strict: bool) -> list[str]:
        """Return what makes loading impossible, a line for each kind."""
        found = []
        if strict and self.missing:
            found.append(f"missing in the files: {listed(self.missing)}")
        if strict and self.unexpected:
            found.append(f"unexpected in the files: {listed(self.unexpected)}")
        if self.mismatched:
            found.append(f"not as the model's: {listed(self.mismatched)}")
        if self.twice:
            found.append(f"produced twice: {listed(self.twice)}")
        return found


class MismatchError(WeightsError):
    """Files and model do not fit; nothing was written to the model.

    Attributes:
        report: all that was found.
    """

    def __init__(self, text: str, report: LoadReport) -> None:
        """Create the error."""
        super().__init__(text)
        self.report = report

    def __reduce__(self) -> tuple[type[MismatchError], tuple[str, LoadReport]]:
        """Pickles with the report."""
        return type(self), (str(self), self.report)


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What ``save_safetensors`` wrote.

    Attributes:
        files: the safetensors files of the set, on all ranks.
        index: the index, if there are several.
        total_bytes: those of all tensors.
        bytes_written: those that this rank wrote, headers included.
        bytes_sent: those that this rank sent to writers.
    """

    files: tuple[Path, ...]
    index: Path | None
    total_bytes: int
    bytes_written: int
    bytes_sent: int

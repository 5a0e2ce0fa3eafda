"""``fullshard convert``: the options, and the output for a person or a program."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fullshard.cli.converting.convert import FORMATS, Conversion, convert, open_checkpoint
from fullshard.cli.converting.entry import Checkpoint, ConvertError
from fullshard.cli.running.tables import size
from fullshard.preflight import parse_bytes

__all__ = ["Convert", "ConvertError", "convert_or_list"]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class Convert:
    """The result of the command.

    Attributes:
        source: what was opened.
        target: where it was written; None if it was listed.
        done: the conversion; None if it was listed.
    """

    source: Checkpoint
    target: Path | None
    done: Conversion | None

    def value(self) -> dict[str, Any]:
        """Return the result as a JSON value."""
        told: dict[str, Any] = {
            "source": str(self.source.path),
            "format": self.source.format,
            "bytes": self.source.nbytes,
            "left_out": list(self.source.left_out),
        }
        if self.done is None:
            names = [_described(each.dtype, each.shape) for each in self.source.entries]
            pairs = zip(self.source.entries, names, strict=True)
            return told | {"tensors": {each.name: named for each, named in pairs}}
        return told | {
            "tensors": len(self.source.entries),
            "target": str(self.target),
            "to": self.done.target,
            "files": list(self.done.files),
            "checked": self.done.checked,
        }

    def show(self, console: Console) -> None:
        """Print the result for a person."""
        source = self.source
        if self.done is None:
            table = Table("tensor", "dtype", "shape", title=f"{source.path}: {source.format}")
            for each in source.entries:
                table.add_row(each.name, _name(each.dtype), " x ".join(map(str, each.shape)))
            console.print(table)
        else:
            read_back = ", read back and equal" if self.done.checked else ""
            console.print(
                f"{self.target}: {len(source.entries)} tensors of {source.path} ({source.format}) "
                f"as {self.done.target}{read_back}",
                soft_wrap=True,
            )
        where = "" if self.done is None else " in the source"
        total = f"{len(source.entries)} tensors, {size(source.nbytes)}{where}"
        console.print(total, soft_wrap=True)
        if left := source.left_out:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            console.print(f"left out: {', '.join(left[:3])}{more}", soft_wrap=True)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"dtype": _name(dtype), "shape": list(shape)}


def convert_or_list(
    path: Path,
    target: Path | None,
    *,
    to: str | None,
    key: str | None,
    dtype: str | None,
    max_shard_size: str,
    check: bool,
) -> Convert:
    """Convert ``path`` to ``target``, or only open it; see ``convert``.

    Raises:
        ConvertError: if an option has a wrong value, or the conversion fails.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConvertError(f"--dtype {dtype}: use one of {', '.join(_DTYPES)}")
    if to is not None and to not in FORMATS:
        raise ConvertError(f"--to {to}: use one of {', '.join(FORMATS)}")
    try:
        limit = parse_bytes(max_shard_size)
    except ValueError as error:
        raise ConvertError(f"--max-shard-size {error}") from None
    if limit < 1:
        raise ConvertError(f"--max-shard-size {max_shard_size}: use a size of at least one byte")
    source = open_checkpoint(path, key)
    if target is None:
        return Convert(source=source, target=None, done=None)
    shown = sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=not shown) as bar:
        task = bar.add_task("writing", total=len(source.entries))
        done = convert(
            source,
            target,
            to=to,
            dtype=None if dtype is None else _DTYPES[dtype],
            limit=limit,
            check=check,
            progress=lambda name: bar.advance(task),
        )
    return Convert(source=source, target=target, done=done)

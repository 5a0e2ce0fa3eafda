"""A set of safetensors files: one file, or several that an index names.

Owns finding them below a path, and which file has which tensor. If a folder has both a single file
and an index, the single file counts, as for transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint.files.headers import Header, Stored, WeightsError, read_header

__all__ = ["INDEX", "SINGLE", "WeightSet", "find_files", "index_names", "read_set"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class WeightSet:
    """All tensors of a set.

    Attributes:
        tensors: by name.
        header_bytes: how many bytes were read to know them.
    """

    tensors: dict[str, Stored]
    header_bytes: int


def index_names(index: Path) -> dict[str, str]:
    """Return the file name of each tensor, as read from ``index``.

    Raises:
        OSError: if it cannot be read.
        WeightsError: if it is none.
    """
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        return {str(tensor): str(file) for tensor, file in names.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsError(
            f"{index} is no index of safetensors files ({type(error).__name__}: {error}); it must "
            "have a 'weight_map' from names of tensors to names of files"
        ) from error


def find_files(path: Path) -> tuple[Path | None, list[Path]]:
    """Return the index, if the set at ``path`` has one, and its files.

    Args:
        path: a safetensors file, an index, or a folder with either.

    Raises:
        OSError: if it cannot be read.
        WeightsError: if there is neither, or a file of the index is missing.
    """
    if not path.exists():
        raise WeightsError(f"{path} does not exist; pass a safetensors file, its index or a folder")
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix != ".json":
        return None, [path]
    names = dict.fromkeys(index_names(path).values())
    for name in names:
        if Path(name).name != name:
            raise WeightsError(f"{path} names {name}, which is not a file beside it")
    files = [path.parent / name for name in names]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise WeightsError(
            f"{path} names {', '.join(missing[:3])}{more}, which are missing; copy the whole set"
        )
    return path, files


def _in_folder(folder: Path) -> Path:
    for name in (SINGLE, INDEX):
        if (folder / name).exists():
            return folder / name
    found = sorted(each.name for each in folder.glob("*.safetensors"))
    indices = sorted(each.name for each in folder.glob("*.safetensors.index.json"))
    if len(indices) == 1 or (len(found) == 1 and not indices):
        return folder / (indices or found)[0]
    what = ", ".join(found[:3] + ["..."] * (len(found) > 3)) or "no safetensors file"
    raise WeightsError(
        f"{folder} holds {what}, and neither {SINGLE} nor {INDEX}; pass the file itself, or bring "
        "the index that belongs to its files"
    )


def read_set(path: Path, *, checksums: bool = False) -> WeightSet:
    """Return the tensors of the set at ``path``; see ``find_files``.

    Args:
        path: a safetensors file, an index, or a folder with either.
        checksums: also read the checksums of the tensors.

    Raises:
        OSError: if a file cannot be read.
        WeightsError: if a file is cut short, or does not hold the tensors that the index names.
    """
    index, files = find_files(path)
    headers: dict[str, Header] = {
        file.name: read_header(file, checksums=checksums) for file in files
    }
    nbytes = sum(header.nbytes for header in headers.values())
    if index is None:
        return WeightSet(headers[files[0].name].tensors, nbytes)
    found = {}
    for tensor, file in index_names(index).items():
        stored = headers[file].tensors.get(tensor)
        if stored is None:
            raise WeightsError(f"{index} says that {file} holds {tensor}, which it does not")
        found[tensor] = stored
    return WeightSet(found, nbytes + index.stat().st_size)

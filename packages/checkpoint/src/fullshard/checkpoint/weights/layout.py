"""The plan of a set of files: which tensors, in which file, at which byte, out of which pieces.

Owns the split into files, and the checks that every tensor of a file is made once and completely.
It writes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fullshard.checkpoint.files.checksums import KEY, blank, checksum_text
from fullshard.checkpoint.files.headers import DTYPE_NAMES, WeightsError, header_bytes
from fullshard.checkpoint.rules.pieces import Piece
from fullshard.checkpoint.weights.matching import Naming, names_of
from fullshard.checkpoint.weights.report import listed
from fullshard.checkpoint.weights.tensors import ModelTensor

__all__ = ["FileTensor", "PlannedFile", "bytes_of", "planned_files", "planned_tensors"]

_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{k}B": 1000**i for i, k in enumerate("KMGT", 1)})
_UNITS.update({f"{k}IB": 1024**i for i, k in enumerate("KMGT", 1)})


def bytes_of(size: int | str) -> int:
    """Return a number of bytes from ``size``: a number, or ``"5GB"`` or ``"500MiB"``.

    Raises:
        TypeError: if it is neither a number nor text.
        ValueError: if it is not above 0, or no size.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"max_shard_size is {size!r}; pass a number of bytes, or text as '5GB'")
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = None if found is None else _UNITS.get(found.group(2).upper())
    if found is None or unit is None or float(found.group(1)) * unit < 1:
        raise ValueError(
            f"max_shard_size is {size!r}; pass a positive number of bytes, or text as '5GB'"
        )
    return int(float(found.group(1)) * unit)


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file that is to be written.

    Attributes:
        name: in the files.
        dtype: in the files.
        shape: of all of it.
        sources: what it is made of: the position of a tensor of the model, and a piece of that.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[tuple[int, Piece], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedFile:
    """A file that is to be written.

    Attributes:
        header: its first bytes; the checksums in it are blank until the tensors are written.
        tensors: in the order in which they follow.
        metadata: text in the header, in addition to checksums.
    """

    header: bytes
    tensors: tuple[FileTensor, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def header_with(self, checksums: Mapping[str, str]) -> bytes:
        """Return the header with the checksums of its tensors, by name."""
        return _header(self.tensors, self.metadata, checksums)


def planned_tensors(
    tensors: Sequence[ModelTensor], names: Naming, dtype: torch.dtype | None
) -> tuple[list[FileTensor], dict[str, str]]:
    """Return what files will hold of ``tensors``, and what ties are called there.

    Args:
        tensors: the model's.
        names: the names of the model's tensors in files.
        dtype: that of floating tensors in the files; None: their own.

    Raises:
        WeightsError: if a tensor of the files would be made twice, or not completely, or the
            format does not know a dtype.
    """
    params = names_of(tensors)
    sources: dict[str, list[tuple[int, Piece]]] = {}
    ties: dict[str, str] = {}
    for position, tensor in enumerate(tensors):
        pieces = names.pieces(tensor.name, params, None)
        for piece in pieces:
            sources.setdefault(piece.file, []).append((position, piece))
        if len(pieces) == 1:
            for other in tensor.names[1:]:
                also = names.pieces(other, params, None)
                if len(also) == 1 and also[0].shape == pieces[0].shape:
                    ties[also[0].file] = pieces[0].file
    found = [_file_tensor(name, made, tensors, dtype) for name, made in sources.items()]
    return found, {alias: name for alias, name in ties.items() if alias not in sources}


def _file_tensor(
    name: str,
    made: Sequence[tuple[int, Piece]],
    tensors: Sequence[ModelTensor],
    dtype: torch.dtype | None,
) -> FileTensor:
    owners = list(dict.fromkeys(tensors[position].name for position, _ in made))
    shapes = {piece.shape for _, piece in made}
    taken = sum(piece.in_file.numel for _, piece in made)
    if len(shapes) > 1 or taken > math.prod(next(iter(shapes))) or (taken == 0 and len(made) > 1):
        raise WeightsError(
            f"{name} in the files would be produced twice, by {listed(owners)}; give each a name "
            "of its own in rename="
        )
    (shape,) = shapes
    if taken < math.prod(shape):
        raise WeightsError(
            f"{name} of shape {shape} in the files would have only {taken} elements, of "
            f"{listed(owners)}; all of a rule's parameters must be in the model"
        )
    dtypes = {_saved_dtype(tensors[position].tensor.dtype, dtype) for position, _ in made}
    if len(dtypes) > 1:
        raise WeightsError(
            f"{name} in the files is made of {listed(owners)}, which are in "
            f"{' and '.join(sorted(map(str, dtypes)))}; pass dtype="
        )
    (kind,) = dtypes
    if kind not in DTYPE_NAMES:
        raise WeightsError(f"{owners[0]} is in {kind}, which safetensors files do not have")
    return FileTensor(name, kind, shape, tuple(made))


def _saved_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and own.is_floating_point else own


def planned_files(
    tensors: Sequence[FileTensor],
    max_bytes: int,
    metadata: Mapping[str, str],
    *,
    checksums: bool,
) -> list[PlannedFile]:
    """Return the files that hold ``tensors``, in their order, each of at most ``max_bytes``.

    A larger tensor has a file of its own. Within a file, wide dtypes come first, so that each
    tensor begins at a multiple of its width.

    Args:
        tensors: of all files.
        max_bytes: of the tensors of a file.
        metadata: text for the header of each file.
        checksums: leave room in the headers for the checksums of the tensors.
    """
    groups: list[list[FileTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    files = []
    for group in groups:
        ordered = tuple(sorted(group, key=lambda tensor: -tensor.dtype.itemsize))
        blanks = {each.name: blank(each.nbytes) for each in ordered} if checksums else None
        files.append(PlannedFile(_header(ordered, metadata, blanks), ordered, metadata))
    return files


def _header(
    tensors: Sequence[FileTensor], metadata: Mapping[str, str], checksums: Mapping[str, str] | None
) -> bytes:
    described = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    metadata = {key: text for key, text in metadata.items() if key != KEY}  # of other tensors
    if checksums is not None:
        metadata[KEY] = checksum_text({name: checksums[name] for name in described})
    return header_bytes(described, metadata)

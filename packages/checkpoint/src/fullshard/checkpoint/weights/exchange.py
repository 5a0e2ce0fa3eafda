"""Ranks read together: each reads rows of a tensor that all cut into columns, and sends the rest.

Owns who reads which rows, and the all-to-all that brings each rank its own columns; and the
broadcast of a shard to its replicas. The ranks know from the layout which parts are sent, so they
need no other message. [Note: read together] A rank that needs a few columns of each row would
request a fragment per row, or all of every row. Instead each rank of the axis requests its share of
whole rows, in long ranges. A rank that cannot read its file sends the buffer unchanged. The rank
raises after the last collective, so that no other rank waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.boxes import Box
from fullshard.checkpoint.files.headers import Stored, WeightsError
from fullshard.checkpoint.files.reading import FRAGMENT, Reader
from fullshard.checkpoint.files.runs import runs_of
from fullshard.checkpoint.rules.pieces import Piece
from fullshard.checkpoint.weights.sharing import Sharing, sharing_of
from fullshard.checkpoint.weights.tensors import ModelTensor
from fullshard.comm import EventKind, check_collective, waiting
from fullshard.comm.spi import carrier_of
from fullshard.sharding.spi import device_of_mesh

__all__ = ["Together", "alone_from", "replicated_axes", "send_to_replicas", "together"]

_SLICES = 4  # of the buffer: for reading, for the rows that were read, for sending, for receiving


@dataclass(frozen=True)
class Together:
    """A plan by which the ranks on one axis read a piece together.

    Attributes:
        piece: the part of the piece that these ranks have together.
        sharing: who they are.
        blocks: the rows, in the order in which they are read: rank ``i`` of ``n`` reads every
            ``n``-th one.
    """

    piece: Piece
    sharing: Sharing
    blocks: tuple[Box, ...]

    def read(self, reader: Reader, stored: Stored, tensor: ModelTensor) -> Exception | None:
        """Fill the piece of this rank's shard, and return what went wrong."""
        mesh = tensor.tensor.device_mesh  # type: ignore[attr-defined]  # only DTensors are shared
        process_group: dist.ProcessGroup = mesh.get_group(self.sharing.axis)
        count, error = len(self.sharing.boxes), None
        for first in range(0, len(self.blocks), count):
            try:
                self._round(
                    reader, stored, tensor, self.blocks[first : first + count], process_group
                )
            except _ReadError as caught:
                error = caught.error
        return error

    def _round(
        self,
        reader: Reader,
        stored: Stored,
        tensor: ModelTensor,
        blocks: Sequence[Box],
        process_group: dist.ProcessGroup,
    ) -> None:
        """Read one block per rank, and give each rank what it needs of all."""
        assert stored.dtype is not None, "it was matched"
        mine, quarter = self.sharing.index, reader.memory.numel() // _SLICES
        rows, sent, come = (reader.memory[i * quarter : (i + 1) * quarter] for i in (1, 2, 3))
        own, error = blocks[mine] if mine < len(blocks) else None, None
        send_sizes = [self._nbytes(stored, box, own) for box in self.sharing.boxes]
        if own is not None:
            taken = own.numel * stored.dtype.itemsize
            block = rows[:taken].view(stored.dtype).view(own.size)
            try:
                reader.read(stored, own, block, quarter)
            except (OSError, WeightsError) as caught:
                error = caught
            self._pack(block, own, sent)
        box = self.sharing.boxes[mine]
        come_sizes = [self._nbytes(stored, box, block) for block in blocks]
        come_sizes += [0] * (len(self.sharing.boxes) - len(blocks))
        mesh = tensor.tensor.device_mesh  # type: ignore[attr-defined]  # as above
        device = carrier_of(process_group, device_of_mesh(mesh))
        input = sent[: sum(send_sizes)].to(device)
        output = come[: sum(come_sizes)].to(device)
        nbytes = stored.dtype.itemsize * sum(block.numel for block in blocks)
        check_collective(EventKind.ALL_GATHER, "weights", process_group, nbytes=nbytes)
        with waiting("weights"):
            dist.all_to_all_single(output, input, come_sizes, send_sizes, group=process_group)
        self._unpack(output.view(stored.dtype), tensor, blocks)
        if error is not None:
            raise _ReadError(error)

    def _of(self, box: Box, block: Box | None) -> Piece | None:
        """Return what of ``block`` the shard with ``box`` needs."""
        found = None if block is None or box.numel == 0 else self.piece.of_shard(box)
        return None if found is None or block is None else found.of_file(block)

    def _nbytes(self, stored: Stored, box: Box, block: Box | None) -> int:
        found = self._of(box, block)
        assert stored.dtype is not None, "it was matched"
        return 0 if found is None else found.in_file.numel * stored.dtype.itemsize

    def _pack(self, block: torch.Tensor, own: Box, sent: torch.Tensor) -> None:
        packed, at = sent[: sent.numel() // 16 * 16].view(block.dtype), 0
        for box in self.sharing.boxes:
            found = self._of(box, own)
            if found is not None:
                part = found.in_file.of(block, own)
                packed[at : at + part.numel()].view(part.shape).copy_(part)
                at += part.numel()

    def _unpack(self, come: torch.Tensor, tensor: ModelTensor, blocks: Sequence[Box]) -> None:
        box, at = self.sharing.boxes[self.sharing.index], 0
        for block in blocks:
            found = self._of(box, block)
            if found is not None:
                view = found.view(tensor.local, tensor.box)
                view.copy_(come[at : at + view.numel()].view(view.shape))
                at += view.numel()


class _ReadError(Exception):
    def __init__(self, error: OSError | WeightsError) -> None:
        super().__init__(str(error))
        self.error = error


def alone_from(stored: Stored) -> int:
    """Return how many neighbouring bytes a rank needs of ``stored`` to read them alone.

    Chunks that have checksums are read whole: ranks that share each chunk would read it all.
    """
    return FRAGMENT if stored.checksums is None else max(FRAGMENT, stored.checksums.chunk)


def together(
    tensor: ModelTensor, piece: Piece, stored: Stored, buffer_bytes: int
) -> Together | None:
    """Return how ranks read ``piece`` together; None: each reads its own.

    Every rank on the axis gets an equal result: it looks at their common part, and at the shard of
    the first rank that has elements of the piece.

    Args:
        tensor: the sharded parameter.
        piece: of it.
        stored: the tensor of the files.
        buffer_bytes: of each rank.
    """
    assert stored.dtype is not None, "it was matched"
    itemsize = stored.dtype.itemsize
    for sharing in sharing_of(tensor.tensor):
        shared = piece.of_shard(sharing.box)
        if shared is None or len(sharing.boxes) == 1:
            continue
        found = (shared.of_shard(box) for box in sharing.boxes if box.numel > 0)
        first = next((each for each in found if each is not None), None)
        if first is None:
            continue
        count, length = runs_of(first.in_file, piece.shape)
        longer = runs_of(shared.in_file, piece.shape)[1]
        if count == 1 or length * itemsize >= alone_from(stored) or longer <= length:
            continue
        blocks = _blocks(shared, sharing, buffer_bytes // _SLICES // itemsize)
        if blocks:
            return Together(shared, sharing, tuple(blocks))
    return None


def _blocks(shared: Piece, sharing: Sharing, limit: int) -> list[Box]:
    """Return rows of what is shared, as many blocks to each rank.

    Return None if a row, or the part of a row that one rank gets from another rank, is above
    ``limit``.
    """
    box, ranks = shared.in_file, len(sharing.boxes)
    dim = next(dim for dim, size in enumerate(box.size) if size > 1)
    rows, row = box.size[dim], box.numel // box.size[dim]
    for one in sharing.boxes:
        part = shared.of_shard(one) if one.numel > 0 else None
        if part is not None:
            row = max(row, ranks * (part.in_file.numel // part.in_file.size[dim]))
    if row > limit:
        return []
    rounds = math.ceil(math.ceil(rows / ranks) / (limit // row))
    each = math.ceil(rows / (ranks * rounds))
    return [
        box.along(dim, box.start[dim] + start, min(each, rows - start))
        for start in range(0, rows, each)
    ]


# -- replicas -------------------------------------------------------------------------------------


def replicated_axes(tensor: torch.Tensor) -> list[int]:
    """Return the axes of the tensor's mesh on which all ranks have equal shards."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
        return []
    return [
        axis
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate() and tensor.device_mesh.size(axis) > 1
    ]


def send_to_replicas(tensor: ModelTensor, axes: Sequence[int], slice_bytes: int) -> None:
    """Send the shard of the first rank on each of ``axes`` to the other ranks.

    Args:
        tensor: the sharded parameter.
        axes: see ``replicated_axes``.
        slice_bytes: what travels at once where the shard lives on another device.
    """
    mesh, local = tensor.tensor.device_mesh, tensor.local  # type: ignore[attr-defined]  # DTensor
    here = mesh.get_coordinate()
    packed = local if local.is_contiguous() else local.contiguous()
    if local.numel() == 0:
        return
    flat = packed.reshape(-1).view(torch.uint8)
    for position, axis in enumerate(axes):
        if any(here[later] for later in axes[position + 1 :]):
            continue  # a later axis sends them
        process_group = mesh.get_group(axis)
        device = carrier_of(process_group, device_of_mesh(mesh))
        for part in flat.split(slice_bytes if device != local.device else flat.numel()):
            there = part.to(device)
            check_collective(EventKind.ALL_GATHER, "weights", process_group, nbytes=there.nbytes)
            with waiting("weights"):
                dist.broadcast(there, group=process_group, group_src=0)
            if there is not part:
                part.copy_(there)
    if packed is not local:
        local.copy_(packed)

"""Brings parts of files together on the ranks that write them, in rounds of bounded memory.

Plans which rank sends which part of a shard to which rank, in each round. All ranks know the layout
of all, so none asks. [Note: rounds] A writer takes the tensors of its files in blocks of
neighbouring bytes. In each round every writer gets the blocks that fit its share of the buffer, by
one all-to-all, and writes them. A rank that fails to write continues to send: it raises when all
are done.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from fullshard.checkpoint.boxes import Box
from fullshard.checkpoint.files.headers import WeightsError
from fullshard.checkpoint.files.runs import divided, span_of
from fullshard.checkpoint.rules.pieces import Piece
from fullshard.checkpoint.transfer import Sender
from fullshard.checkpoint.weights.layout import FileTensor
from fullshard.checkpoint.weights.tensors import ModelTensor
from fullshard.comm import EventKind, check_collective, waiting

__all__ = ["FileBlock", "Rounds", "Share", "blocks_of", "shares_of"]

_ALIGNED = 16  # bytes: the widest dtype


@dataclass(frozen=True)
class Share:
    """The part of a file's tensor that one rank sends.

    Attributes:
        rank: in the process group that saves.
        position: of the model's tensor.
        piece: of that tensor, and of the file's.
    """

    rank: int
    position: int
    piece: Piece


@dataclass(frozen=True)
class Shares:
    """Parts of a file's tensor, by sending rank, in the order of first elements."""

    tensor: FileTensor
    shares: tuple[Share, ...]

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        spans = [span_of(each.piece.in_file, self.tensor.shape) for each in self.shares]
        return [(first, first + length) for first, length in spans]

    def of(self, box: Box) -> Iterator[Share]:
        """Yield what of ``box`` each rank gives."""
        first, length = span_of(box, self.tensor.shape)
        until = bisect.bisect_left(self._ranges, (first + length, 0))
        for index in range(until):
            if self._ranges[index][1] > first:
                share = self.shares[index]
                piece = share.piece.of_file(box)
                if piece is not None:
                    yield Share(share.rank, share.position, piece)


def shares_of(
    tensor: FileTensor, boxes: Sequence[Sequence[Box]], sharded: Sequence[bool], writer: int
) -> Shares:
    """Return who gives which part of ``tensor``.

    Of replicas, the writer itself if it has one. Tensors that are not sharded may differ on ranks,
    as statistics of batches do: those of the first rank count.

    Args:
        tensor: of a file.
        boxes: for each rank, what it has of each tensor of the model.
        sharded: for each tensor of the model, whether ranks share it.
        writer: the rank that writes it.

    Raises:
        WeightsError: if the shards are not all of it.
    """
    found = []
    for position, piece in tensor.sources:
        ranks = range(len(boxes)) if sharded[position] else range(1)
        owners: dict[Box, list[int]] = {}
        for rank in ranks:
            owners.setdefault(boxes[rank][position], []).append(rank)
        total = 0
        for box, holders in owners.items():
            part = piece.of_shard(box) if box.numel > 0 else None
            if part is not None:
                rank = writer if writer in holders else holders[position % len(holders)]
                found.append(Share(rank, position, part))
                total += part.in_file.numel
        if total != piece.in_file.numel:
            raise WeightsError(
                f"{tensor.name} has {piece.in_file.numel} elements, and the shards of all ranks "
                f"{total}; save with a process group of all ranks that hold the model"
            )
    found.sort(key=lambda share: span_of(share.piece.in_file, tensor.shape))
    return Shares(tensor, tuple(found))


@dataclass(frozen=True)
class FileBlock:
    """Neighbouring bytes of a file, a part of one tensor.

    Attributes:
        file: the number of the file.
        shares: of its tensor.
        box: of the tensor.
        offset: of the first byte in the file.
    """

    file: int
    shares: Shares
    box: Box
    offset: int

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self.box.numel * self.shares.tensor.dtype.itemsize


def blocks_of(file: int, shares: Shares, start: int, limit: int) -> Iterator[FileBlock]:
    """Yield the blocks of a tensor that begins at byte ``start``, of at most ``limit`` bytes."""
    tensor = shares.tensor
    size = tensor.dtype.itemsize
    for box in divided(Box.whole(tensor.shape), lambda part: part.numel * size, limit):
        first, _ = span_of(box, tensor.shape)
        yield FileBlock(file, shares, box, start + first * size)


class Rounds:
    """The rounds in which all blocks come to their writers.

    Attributes:
        sent: bytes that this rank sent to others.
    """

    def __init__(
        self,
        tensors: Sequence[ModelTensor],
        sender: Sender | None,
        batches: Sequence[Sequence[Sequence[FileBlock]]],
    ) -> None:
        """Take who saves; ``batches``: per rank and round what it writes."""
        self._tensors = tensors
        self._sender = sender
        self._rank = 0 if sender is None else sender.process_group.rank()
        self._batches = batches
        self._buffers: dict[str, torch.Tensor] = {}
        self._block = bytearray()
        self.sent = 0

    def run(self, write: Callable[[FileBlock, memoryview], None]) -> Exception | None:
        """Run all rounds, and return what ``write`` raised on this rank.

        Args:
            write: given a block and its bytes on the CPU, which the next block overwrites.
        """
        error: Exception | None = None
        for number in range(max(map(len, self._batches), default=0)):
            now = [
                [_Parts(block) for block in batch[number]] if number < len(batch) else []
                for batch in self._batches
            ]
            come = self._exchanged(now)
            for parts in now[self._rank] if error is None else ():
                try:
                    write(parts.block, self._assembled(parts, come))
                except Exception as caught:
                    error = caught
                    break
        return error

    def _exchanged(self, now: Sequence[Sequence[_Parts]]) -> list[torch.Tensor]:
        """Return what each rank sent this one: the parts of its blocks, one after the other."""
        if self._sender is None:
            return []
        mine, ranks = self._rank, range(len(now))
        send = [[] if rank == mine else self._from(mine, now[rank]) for rank in ranks]
        come = [[] if rank == mine else self._from(rank, now[mine]) for rank in ranks]
        send_sizes = [sum(_aligned(block, each) for block, each in parts) for parts in send]
        come_sizes = [sum(_aligned(block, each) for block, each in parts) for parts in come]
        device = self._sender.device
        packed = self._buffer("send", sum(send_sizes), device)
        at = 0
        for block, share in (each for parts in send for each in parts):
            self._copy(share, _typed(packed[at:], block, share))
            at += _aligned(block, share)
        received = self._buffer("come", sum(come_sizes), device)
        process_group = self._sender.process_group
        nbytes = sum(parts.block.nbytes for blocks in now for parts in blocks)
        check_collective(EventKind.ALL_GATHER, "weights", process_group, nbytes=nbytes)
        with waiting("weights"):
            dist.all_to_all_single(received, packed, come_sizes, send_sizes, group=process_group)
        self.sent += at
        return list(received.cpu().split(come_sizes))

    @staticmethod
    def _from(rank: int, blocks: Sequence[_Parts]) -> list[tuple[FileBlock, Share]]:
        return [
            (parts.block, share) for parts in blocks for share in parts.shares if share.rank == rank
        ]

    def _assembled(self, parts: _Parts, come: list[torch.Tensor]) -> memoryview:
        """Return the bytes of a block; take what it needs from the front of each of ``come``."""
        block = parts.block
        if len(self._block) < block.nbytes:
            self._block = bytearray(block.nbytes)
        flat = torch.frombuffer(self._block, dtype=torch.uint8, count=block.nbytes)
        whole = flat.view(block.shares.tensor.dtype).view(block.box.size)
        for share in parts.shares:
            part = share.piece.in_file.of(whole, block.box)
            if share.rank == self._rank:
                self._copy(share, part)
            else:
                part.copy_(_typed(come[share.rank], block, share))
                come[share.rank] = come[share.rank][_aligned(block, share) :]
        return memoryview(self._block)[: block.nbytes]

    def _copy(self, share: Share, into: torch.Tensor) -> None:
        tensor = self._tensors[share.position]
        into.copy_(share.piece.view(tensor.local, tensor.box))

    def _buffer(self, name: str, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return the first ``nbytes`` of a buffer that is kept from round to round."""
        kept = self._buffers.get(name)
        if kept is None or kept.numel() < nbytes:
            self._buffers.pop(name, None)
            kept = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return kept[:nbytes]


class _Parts:
    """A block and its parts by sending rank, in order."""

    def __init__(self, block: FileBlock) -> None:
        self.block = block
        self.shares = list(block.shares.of(block.box))


def _aligned(block: FileBlock, share: Share) -> int:
    nbytes = share.piece.in_file.numel * block.shares.tensor.dtype.itemsize
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _typed(memory: torch.Tensor, block: FileBlock, share: Share) -> torch.Tensor:
    """Return the front of ``memory`` as the tensor of what ``share`` gives."""
    dtype, size = block.shares.tensor.dtype, share.piece.in_file.size
    nbytes = share.piece.in_file.numel * dtype.itemsize
    return memory[:nbytes].view(dtype).view(size)

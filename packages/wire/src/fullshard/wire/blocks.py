"""The layout of a tensor's blocks on the wire: codes, and behind them a scale for each block.

Owns the arithmetic, the views of a code and the order of the work: in tiles, since temporary
tensors are as large as a tile. A shard is lines of columns: rows of the whole parameter's last dim,
or parts of rows, if the last dim is cut. Blocks are counted from the start of the whole row.
Refuses: what a block becomes (see ``quantised``).
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from fullshard.comm import TensorSpec
from fullshard.comm.spi import PacksItself, full_views, pieces_of, traits_of
from fullshard.wire.draws import drawn_bits
from fullshard.wire.feedback import Residual, ResidualUpdate
from fullshard.wire.quantised import Quantised
from fullshard.wire.runs import runs_of

__all__ = ["BlockSpec", "in_blocks"]

_WORD = torch.int32  # of a code: no transport reads it, and scales are aligned for fp32
_TILE = 1 << 18  # numbers that are worked on at once: fewer, and launches cost more than the work
_BITS = 24  # of a draw: the precision of fp32
_TILE_ON_STREAMS = 1 << 24  # where each launch costs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """A few blocks of one width.

    Attributes:
        numbers: ``[..., width]``.
        codes: the same shape.
        scales: ``[...]``.
        places: ``[...]``, of the first number of each in the whole tensor; None: nobody asked.
    """

    numbers: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    places: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec(PacksItself):
    """The code of a tensor that travels in blocks, ``[holders, words]``; see ``in_blocks``.

    Attributes:
        tensor: what is sent and arrives.
        quantised: what of numbers travels.
        ranks: how many share it.
        number: of the tensor, for draws.
        steps: counts what a rank encoded by draws.
        residual: of what this rank sends; None without error feedback.
    """

    tensor: TensorSpec
    quantised: Quantised
    ranks: int
    number: int = 0
    steps: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)
    residual: Residual | None = field(default=None, compare=False, repr=False)

    @property
    def arrives_as(self) -> TensorSpec:
        """The tensor that is sent and arrives."""
        return self.tensor

    @property
    def form(self) -> str:
        """The wire format, for people to read."""
        return str(self.quantised)

    def pack(self, shard: torch.Tensor, target: torch.Tensor, rank: int) -> None:
        """Fill ``target``, ``[1, words]``, with the code of the ``shard`` of ``rank``."""
        self.encode(shard.unsqueeze(0), target, rank)

    def unpack(self, pieces: Sequence[torch.Tensor], full: torch.Tensor, world_size: int) -> None:
        """Fill ``full`` with the values of ``pieces``; see ``PacksItself``."""
        for codes in pieces:
            for part, code, first in self._by_holder(full, codes):
                self.decode(code, part, first)

    @torch.no_grad()
    def rounded(self, shard: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the ``shard`` of ``rank`` with the values that arrive, in their dtype."""
        codes = torch.empty(1, self.row_numel, dtype=self.dtype, device=shard.device)
        arrived = torch.empty_like(shard, dtype=self.tensor.dtype)
        self.pack(shard, codes, rank)
        self.decode(codes, arrived.unsqueeze(0), rank)
        return arrived

    def _by_holder(
        self, full: torch.Tensor, codes: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield the arguments of ``encode`` for all shards of a full tensor.

        Args:
            full: of the shape of the tensor, or flat.
            codes: ``[holders, 1, words]``.
        """
        pieces = pieces_of(self.tensor, self.ranks)
        for piece, part in zip(pieces, full_views(full, self.tensor, pieces), strict=True):
            yield part, codes.squeeze(1).narrow(0, piece.first_rank, piece.ranks), piece.first_rank

    def keys(self, sender: int) -> tuple[int, ...]:
        """Return what the next draws of rank ``sender`` depend on; nothing, if there are none."""
        seed = self.quantised.seed
        return () if seed is None else (seed, self.number, next(self.steps), sender)

    def encode(
        self, parts: torch.Tensor, codes: torch.Tensor, first_rank: int, keys: Sequence[int] = ()
    ) -> None:
        """Fill ``codes``, ``[n, words]``, for the shards of ``n`` ranks from ``first_rank`` on.

        Args:
            parts: their shards, which have the same shape: ``[n, *shard_shape]``.
            codes: in the dtype of the spec; the last dim is contiguous.
            first_rank: whose shard is the first.
            keys: what draws depend on; without any, to the nearest.
        """
        for part, code, rank in self._alike(parts, codes, first_rank):
            starts = self._starts(part, rank) if keys else None
            for tile in self._tiles(_lines_of(part), code, rank, starts):
                draws = None if starts is None else _draws(tile, keys)
                self.quantised.encode(tile.numbers, tile.codes, tile.scales, draws)

    def encode_gradient(
        self, gradient: torch.Tensor, codes: torch.Tensor, sender: int, pre: float | torch.Tensor
    ) -> None:
        """Fill ``codes`` for a full gradient of rank ``sender``, by draws and feedback, if asked.

        Args:
            gradient: multiplied by ``pre`` already.
            codes: ``[holders, 1, words]``.
            sender: this rank.
            pre: what the gradient was multiplied by.
        """
        keys, residual = self.keys(sender), self.residual
        holders = self._by_holder(gradient, codes)
        if residual is None:
            for part, code, first in holders:
                self.encode(part, code, first, keys)
            return
        exchange = residual.exchange(gradient.device, pre)
        before, after = self._cut(exchange.before), self._cut(exchange.after)
        for (part, code, first), old, new in zip(holders, before, after, strict=True):
            self._encode_with(part, code, first, keys, ResidualUpdate(old, new, exchange.factor))

    def _cut(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the contiguous shards of ``_by_holder`` in a flat tensor."""
        for piece in pieces_of(self.tensor, self.ranks):
            shape = piece.stacked_shape
            part, flat = flat.tensor_split((math.prod(shape),))
            yield part.view(shape)

    def _encode_with(
        self,
        parts: torch.Tensor,
        codes: torch.Tensor,
        first_rank: int,
        keys: Sequence[int],
        exchange: ResidualUpdate,
    ) -> None:
        """As ``encode``, of numbers and what was lost of earlier ones; keeps what is lost now.

        The loss is the difference from the value that others decode: they decode in the dtype of
        the tensor. A value decoded as NaN or infinity keeps the earlier loss.
        """
        alike = [
            self._alike(each, codes, first_rank)
            for each in (parts, exchange.before, exchange.after)
        ]
        for (part, code, rank), (before, _, _), (after, _, _) in zip(*alike, strict=True):
            starts = self._starts(part, rank) if keys else None
            tiles = zip(
                self._tiles(_lines_of(part), code, rank, starts),
                self._tiles(_lines_of(before), code, rank),
                self._tiles(_lines_of(after), code, rank),
                strict=True,
            )
            for tile, old, new in tiles:
                lost = old.numbers.to(torch.float32, copy=True).mul_(exchange.factor)
                wide = tile.numbers + lost
                draws = None if starts is None else _draws(tile, keys)
                self.quantised.encode(wide, tile.codes, tile.scales, draws)
                arrived = torch.empty_like(wide, dtype=self.tensor.dtype)
                self.quantised.decode(tile.codes, tile.scales, arrived)
                new.numbers.copy_(_finite_or(wide.sub_(arrived), lost))

    def decode(self, codes: torch.Tensor, parts: torch.Tensor, first_rank: int) -> None:
        """Fill ``parts``, in any dtype, with the values that ``encode`` made ``codes`` of."""
        for part, code, rank in self._alike(parts, codes, first_rank):
            flat = _lies_flat(part)
            lines = _lines_of(part if flat else part.new_empty(part.shape))
            for tile in self._tiles(lines, code, rank):
                self.quantised.decode(tile.codes, tile.scales, tile.numbers)
            if not flat:
                part.copy_(lines.view(part.shape))

    def add(self, codes: Sequence[torch.Tensor], total: torch.Tensor, rank: int) -> None:
        """Fill the shard ``total`` with the sum of what ``codes``, ``[words]`` each, say of it.

        In the dtype of ``total``, in the order of ``codes``; it is contiguous.
        """
        if not total.numel():
            return
        lines = _lines_of(total.unsqueeze(0))
        tiles = [self._tiles(lines, code.unsqueeze(0), rank) for code in codes]
        for first, *others in zip(*tiles, strict=True):
            self.quantised.decode(first.codes, first.scales, first.numbers)
            wide = torch.empty_like(first.numbers)
            for other in others:
                self.quantised.decode(other.codes, other.scales, wide)
                first.numbers.add_(wide)

    def columns(self, rank: int) -> tuple[int, int]:
        """Return the first column of a rank's shard, and that after the last."""
        spec, last = self.tensor, len(self.tensor.laid_shape) - 1
        if spec.dim != last:
            return 0, spec.laid_shape[-1]
        return spec.first_row(rank, self.ranks), spec.first_row(rank + 1, self.ranks)

    def _alike(
        self, parts: torch.Tensor, codes: torch.Tensor, first_rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield both for ranks with equal block positions: all at once, or each by itself."""
        if not parts.numel():
            return
        size = self.quantised.block
        low, high = self.columns(first_rank)
        if (
            len(parts) == 1
            or low == 0 == self.columns(first_rank + 1)[0]
            or (low % size == 0 == (high - low) % size)
        ):
            yield parts, codes, first_rank
            return
        for index in range(len(parts)):
            yield parts.narrow(0, index, 1), codes.narrow(0, index, 1), first_rank + index

    def _views(
        self, code: torch.Tensor, lines: torch.Tensor, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes ``[n, lines, columns]`` and scales ``[n, lines, blocks]`` in ``code``."""
        _, count, width = lines.shape
        low, high = self.columns(rank)
        blocks = _blocks_in(low, high, self.quantised.block)
        codes = code.view(self.quantised.dtype).narrow(1, 0, count * width)
        scales = code.view(torch.float32).narrow(1, _words(count * width), count * blocks)
        return codes.unflatten(1, (count, width)), scales.unflatten(1, (count, blocks))

    def _tiles(
        self,
        lines: torch.Tensor,
        code: torch.Tensor,
        rank: int,
        starts: torch.Tensor | None = None,
    ) -> Iterator[_Tile]:
        """Yield a few blocks at a time. ``starts``: where each line begins, if it is asked."""
        codes, scales = self._views(code, lines, rank)
        most = _TILE_ON_STREAMS if traits_of(lines.device).queued else _TILE
        for run in runs_of(*self.columns(rank), self.quantised.block):
            both = [run.of(each) for each in (lines, codes)]
            of_run, places = run.scales(scales), None
            if starts is not None:
                blocks = torch.arange(run.count, device=starts.device) * run.width + run.start
                places = starts.unsqueeze(-1) + blocks
            for index in _divided(of_run.shape, max(most // run.width, 1)):
                yield _Tile(
                    numbers=both[0][index],
                    codes=both[1][index],
                    scales=of_run[index],
                    places=None if places is None else places[index],
                )

    def _starts(self, parts: torch.Tensor, first_rank: int) -> torch.Tensor:
        """Return the start of each line in the whole tensor, flattened: ``[n, lines]``, int64."""
        spec, device = self.tensor, parts.device
        strides = [math.prod(spec.laid_shape[dim + 1 :]) for dim in range(len(spec.laid_shape))]
        first_rows = [spec.first_row(first_rank + n, self.ranks) for n in range(len(parts))]
        places = torch.tensor(first_rows, device=device).mul_(strides[spec.dim])
        for size, stride in zip(parts.shape[1:-1], strides[:-1], strict=True):
            places = places.unsqueeze(-1) + torch.arange(size, device=device) * stride
        return places.reshape(len(parts), -1)


def _finite_or(numbers: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return ``numbers``, or ``others`` where they are infinite or NaN.

    Arithmetic: a comparison and ``torch.where`` take four times as long on CPUs.
    """
    chosen = (numbers * 0.0).nan_to_num_(nan=1.0)  # 1 where a number is infinite or NaN, or 0
    return numbers.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).addcmul_(chosen, others)


def _draws(tile: _Tile, keys: Sequence[int]) -> torch.Tensor:
    """Return a number from 0 to 1 for each of ``tile``."""
    assert tile.places is not None, "it was asked for"
    width = tile.numbers.shape[-1]
    places = tile.places.unsqueeze(-1) + torch.arange(width, device=tile.places.device)
    return drawn_bits(places, _BITS, *keys).to(torch.float32).mul_(2.0**-_BITS)


def in_blocks(spec: TensorSpec, quantised: Quantised, ranks: int, name: str = "") -> TensorSpec:
    """Return the code of ``spec`` over as many ``ranks``, or ``spec``, if that is no longer.

    Draws depend on ``name``, of its parameter.

    A tensor that is not floating-point travels unchanged; so does one whose rows are too short
    for scales of their own.
    """
    if not (spec.dtype.is_floating_point and spec.numel) or spec.dtype.itemsize == 1:
        return spec
    chunk = spec.chunk_rows(ranks)
    holders = -(-spec.rows // chunk)
    whole = math.prod(spec.with_rows(chunk))
    number = 0 if quantised.seed is None else zlib.crc32(name.encode())
    bare = BlockSpec(
        shape=(holders, 0),
        dtype=_WORD,
        tensor=spec,
        quantised=quantised,
        ranks=ranks,
        number=number,
    )
    words = 0
    for low, high in {bare.columns(rank) for rank in range(holders)}:
        count = whole // chunk if spec.dim == len(spec.laid_shape) - 1 else whole // (high - low)
        blocks = _blocks_in(low, high, quantised.block)
        words = max(words, _words(count * (high - low)) + count * blocks)
    if words * _WORD.itemsize >= whole * spec.dtype.itemsize:
        return spec
    residual = None if quantised.feedback is None else quantised.feedback.residual(spec.numel)
    return replace(bare, shape=(holders, words), residual=residual)


def _words(nbytes: int) -> int:
    return -(-nbytes // _WORD.itemsize)


def _blocks_in(low: int, high: int, size: int) -> int:
    return sum(run.count for run in runs_of(low, high, size))


def _lines_of(parts: torch.Tensor) -> torch.Tensor:
    """Return shards ``[n, ...]`` as ``[n, lines, columns]``: a view, if lines are equidistant."""
    return parts.unsqueeze(1) if parts.ndim == 2 else parts.flatten(1, -2)


def _lies_flat(parts: torch.Tensor) -> bool:
    """Return whether the lines of a shard are at equal distances in memory."""
    inner = range(1, parts.ndim - 2)
    return all(parts.stride(dim) == parts.stride(dim + 1) * parts.size(dim + 1) for dim in inner)


def _divided(shape: Sequence[int], most: int) -> Iterator[tuple[int | slice, ...]]:
    """Yield what indexes a tensor of ``shape`` in parts of ``most`` elements at most."""
    dim, whole = len(shape), 1
    while dim and whole * shape[dim - 1] <= most:
        dim -= 1
        whole *= shape[dim]
    if dim == 0:
        yield ()
        return
    step = most // whole
    for outer in itertools.product(*map(range, shape[: dim - 1])):
        for start in range(0, shape[dim - 1], step):
            yield (*outer, slice(start, start + step))

"""Reads segments by torch's loader: those that this host has, and those that other ranks send.

``SegmentReader`` is the storage of ``torch.distributed.checkpoint.load``, which finds out which
parts of which saved shards fill the shards of this rank, for any number of ranks. [Note: own
values] Each rank may have saved other values under one name, such as the state of a generator. A
rank reads the value of the saved rank of its own number, modulo their count. If that rank saved no
value of the name, the next rank that did so counts.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fullshard.checkpoint.boxes import Box
from fullshard.checkpoint.memory.errors import together
from fullshard.checkpoint.memory.segments import Entry, map_segment

__all__ = ["SegmentReader", "ValuePlanner"]

_TAG = 13


class ValuePlanner(DefaultLoadPlanner):
    """torch's planner, which puts values in place that need not be unpickled."""

    def put(self, item: ReadItem, value: object) -> None:
        """Put a value in the place of an item."""
        path = self.mappings[item.dest_index.fqn]
        at: Any = self.original_state_dict
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value


@dataclass(frozen=True)
class _Request:
    """Bytes of a segment, or a part of the tensor in them.

    Attributes:
        rank: that saved the segment.
        start: first byte.
        nbytes: how many.
        dtype: of the tensor; None: all bytes are wanted.
        shape: of the tensor.
        box: the part of the tensor; None: all bytes are wanted.
    """

    rank: int
    start: int
    nbytes: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    box: Box | None = None

    @property
    def wanted(self) -> int:
        """How many bytes that gives."""
        if self.box is None or self.dtype is None:
            return self.nbytes
        return self.box.numel * self.dtype.itemsize


class SegmentReader(StorageReader):
    """The segments of one step.

    Args:
        group: the ranks that read; None: this one.
        entries: of the segment of each rank that saved.
        here: paths of segments on this host, by the rank that saved.
        holders: for each rank that saved, which rank of the group has the segment.
        mapped: bytes of segments that are mapped already.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        entries: Mapping[int, Sequence[Entry]],
        here: Mapping[int, Path],
        holders: Mapping[int, int],
        mapped: Mapping[int, torch.Tensor],
    ) -> None:
        self._group = group
        self._rank = 0 if group is None else group.rank()
        self._entries = entries
        self._here = here
        self._holders = holders
        self._mapped = dict(mapped)
        self._found: dict[MetadataIndex, tuple[int, Entry]] = {}

    # -- what torch's loader calls ----------------------------------------------------------------

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: there is one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return that no path stands for this storage."""
        return False

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: the constructor got everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what all segments hold, as this rank sees it; see [Note: own values]."""
        ranks = len(self._entries)
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for turn in range(ranks):  # the first one found counts
            saved = (self._rank + turn) % ranks
            for entry in self._entries[saved]:
                name = entry.index.fqn
                known = described.get(name)
                if entry.chunk is None:
                    if known is None:
                        described[name] = BytesStorageMetadata()
                        self._found[MetadataIndex(name)] = (saved, entry)
                    continue
                if known is None:
                    dtype = entry.dtype or torch.get_default_dtype()
                    properties = TensorProperties(dtype=dtype)
                    known = described[name] = TensorStorageMetadata(properties, entry.size, [])
                if isinstance(known, TensorStorageMetadata) and known.size == entry.size:
                    index = MetadataIndex(name, entry.chunk.offsets)
                    if index not in self._found:
                        self._found[index] = (saved, entry)
                        known.chunks.append(entry.chunk)
        return Metadata(described)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what is planned; every rank calls this, and sends what others need."""
        assert isinstance(planner, ValuePlanner), "restore() makes one"
        requests = [self._request(item) for item in plan.items]
        arrived = self._exchanged(requests)
        values: dict[_Request, Any] = {}
        for item, request in zip(plan.items, requests, strict=True):
            content = arrived.get(request)
            content = self._part(request) if content is None else content
            if item.type is LoadItemType.BYTE_IO:
                if request not in values:
                    values[request] = pickle.loads(content.numpy().tobytes())
                planner.put(item, values[request][item.storage_index.fqn])
                continue
            target = planner.resolve_tensor(item).detach()
            if not target.numel():
                continue
            if request.dtype is None:
                target.copy_(_box_of(item).of(pickle.loads(content.numpy().tobytes())))
            else:
                target.copy_(content.view(request.dtype).view(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # -- where bytes come from --------------------------------------------------------------------

    def _request(self, item: ReadItem) -> _Request:
        saved, entry = self._found[item.storage_index]
        if entry.dtype is None or entry.chunk is None:
            return _Request(saved, entry.start, entry.nbytes)
        shape = tuple(entry.chunk.sizes)
        return _Request(saved, entry.start, entry.nbytes, entry.dtype, shape, _box_of(item))

    def _part(self, request: _Request) -> torch.Tensor:
        """Return the bytes of a part of a segment on this host: a view where that is possible."""
        mapped = self._mapped.get(request.rank)
        if mapped is None:
            mapped = self._mapped[request.rank] = map_segment(self._here[request.rank])
        content = mapped[request.start : request.start + request.nbytes]
        if request.box is None or request.dtype is None:
            return content
        whole = content.view(request.dtype).view(request.shape)
        return request.box.of(whole).contiguous().reshape(-1).view(torch.uint8)

    def _exchanged(self, requests: Sequence[_Request]) -> dict[_Request, torch.Tensor]:
        """Return the bytes of the requests that this host cannot fill, and send others theirs."""
        if self._group is None:
            return {}
        asked: dict[int, list[_Request]] = {}
        for each in dict.fromkeys(requests):
            if each.rank not in self._here and each.wanted:
                asked.setdefault(self._holders[each.rank], []).append(each)
        told = together(self._group, "the parts that ranks need", lambda: asked)
        works, kept = [], []  # kept until they are sent
        arrived: dict[_Request, torch.Tensor] = {}
        for holder, theirs in asked.items():
            for each in theirs:
                into = arrived[each] = torch.empty(each.wanted, dtype=torch.uint8)
                works.append(dist.irecv(into, group=self._group, group_src=holder, tag=_TAG))
        for rank, wanted in enumerate(told):
            for each in wanted.get(self._rank, ()):
                kept.append(self._part(each))
                works.append(dist.isend(kept[-1], group=self._group, group_dst=rank, tag=_TAG))
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()
        return arrived


def _box_of(item: ReadItem) -> Box:
    return Box(tuple(item.storage_offsets), tuple(item.lengths))

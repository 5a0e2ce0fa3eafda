"""Send each consumer of an engine its slices, directly from the shards.

Owns the trainer's side. [Note: slices] No rank builds a whole tensor. The boundaries of shards
divide a slice into parts. For each part, one rank that holds the part sends it to the consumer,
once. Therefore the messages have exactly the bytes of the slices. A consumer requests each message:
a slow consumer blocks no other, and a rank needs memory for the copy of its shards and one message
per consumer. A number precedes each message: 0, or the length of an error's text, which replaces
the message.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.agreement import agree_over, format_error
from fullshard.checkpoint.boxes import Box
from fullshard.checkpoint.engines.links import LinkError, receive_number, send, send_number
from fullshard.checkpoint.engines.slices import ConsumerPlan, Part, Wanted, planned
from fullshard.checkpoint.engines.tensors import EngineTensors, ranks_of_model, require_module
from fullshard.checkpoint.files.headers import DTYPE_NAMES
from fullshard.checkpoint.names import ParamNames
from fullshard.checkpoint.streaming.background import check_params, group_for, start_after
from fullshard.checkpoint.streaming.shards import memory
from fullshard.checkpoint.weights.matching import Rename
from fullshard.sharding.spi import Comparison, require_count

__all__ = ["ASK", "GIVE", "GO", "LOST", "STOP", "SliceSender", "SliceTransfer"]

ASK, GIVE = 1, 2  # tags
GO, STOP, LOST = 1, 0, 2  # what a consumer asks for: a message, none, none as another rank failed

_CPU = torch.device("cpu")

_SLICES = Comparison(
    what="the agreement on slices for an engine",
    error="slices of weights cannot be sent, as some ranks found an error; ",
    mismatch="ranks disagree on the slices of weights to send: ",
    advice="Pass the same model and the same arguments on every rank",
)


class SliceTransfer:
    """Slices on their way to the consumers, made by ``SliceSender.send``.

    Attributes:
        sent: bytes of weights that this rank has sent to each consumer.
    """

    def __init__(self, consumers: int) -> None:
        """Begin with nothing sent."""
        self.sent = [0] * consumers
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Return once every consumer has its slices from every rank.

        Raises:
            LinkError: if a consumer stopped or was lost while this rank sent; others have theirs.
            RankMismatchError: if that happened on another rank.
        """
        assert self._thread is not None, "send() started it"
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _begin(self, thread: threading.Thread) -> None:
        self._thread = thread

    def _end(self, error: BaseException | None) -> None:
        self._error = error


class SliceSender:
    """The trainer's side of slices for the consumers of an engine.

    Attributes:
        bytes_wanted: for each consumer, the bytes of its slices.
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: Sequence[Wanted],
        *,
        dtype: torch.dtype | None = None,
        rename: Rename = None,
        bucket_bytes: int = 64 * 2**20,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Plan on every rank alike, and compare; every rank raises if one does.

        Args:
            model: in any sharding, or none.
            wanted: for each consumer its slices, by the name of the tensor.
            dtype: in which floating tensors travel; None: that in which they are stored.
            rename: as for ``weight_source``.
            bucket_bytes: size of a message; a larger slice is a message.
            group: as for ``iter_full``.

        Raises:
            RankMismatchError: if ranks differ, or another rank found an error.
            TypeError: if an argument is of the wrong type.
            ValueError: if there is no tensor of a name, or a slice is outside of its tensor, or the
                layout of a parameter is not known on all ranks.
            WeightsError: if rules do not fit the model, or placements are sums.
        """
        require_count("bucket_bytes", bucket_bytes)
        require_module(model)
        params = ParamNames(model, None).params
        ranks = {*ranks_of_model(params, group)}
        alone = len(ranks) == 1
        self._group = None if alone else group_for(_SLICES, "slices", group, params, ranks)
        error: Exception | None = None
        self._plans: Sequence[ConsumerPlan] = ()
        try:
            self._tensors = EngineTensors(model, dtype, rename, group)
            self._plans = planned(self._tensors, wanted, bucket_bytes)
        except Exception as caught:
            error = caught
        said = [] if error is not None else self._said(bucket_bytes)
        agree_over(_SLICES, self._group, _CPU, said, error)
        self.bytes_wanted = tuple(each.nbytes for each in self._plans)

    def _said(self, bucket_bytes: int) -> list[str]:
        made = self._tensors.made
        lines = [f"bucket_bytes={bucket_bytes}, {len(self._plans)} consumers"]
        for number, plan in enumerate(self._plans):
            for position, box in plan.slices.items():
                tensor = made[position]
                lines.append(
                    f"{tensor.name}: {tensor.dtype} {tensor.shape}, for consumer {number} from "
                    f"{box.start} to {box.stop}"
                )
        return lines

    def init_info(self) -> dict[str, Any]:
        """Return the plan for the consumers in types of JSON; equal on all ranks.

        Pass it to each consumer's ``SliceReceiver``, in vLLM's protocol by
        ``client.init_weight_transfer_engine``.
        """
        return {
            "version": 1,
            "trainers": len(self._tensors.ranks),
            "tensors": [
                {"name": each.name, "dtype": DTYPE_NAMES[each.dtype], "shape": list(each.shape)}
                for each in self._tensors.made
            ],
            "consumers": [
                {
                    "slices": [
                        [position, list(box.start), list(box.size)]
                        for position, box in plan.slices.items()
                    ],
                    "buckets": [
                        {
                            str(source): [
                                [part.tensor, list(part.box.start), list(part.box.size)]
                                for part in parts
                            ]
                            for source, parts in bucket.items()
                        }
                        for bucket in plan.buckets
                    ],
                }
                for plan in self._plans
            ],
        }

    @torch.no_grad()
    def send(self, link: dist.ProcessGroup) -> SliceTransfer:
        """Copy the shards, and send the slices in threads; training may continue at once.

        Call it on every rank, between steps.

        Args:
            link: of trainer ranks and consumers, as ``connect_engine`` returns it.

        Raises:
            RankMismatchError: if another rank found an error.
            RuntimeError: inside an ``unsharded`` block.
            ValueError: if ``link`` has another number of processes or order, or parameters have no
                values yet, or changed their layouts.
        """
        error: Exception | None = None
        copies = _Copies()
        try:
            self._tensors.refresh()
            check_params(self._tensors.params, "send()")
            self._check(link)
            copies = _Copies.of(self._tensors, self._plans)
        except Exception as caught:
            error = caught
        agree_over(_SLICES, self._group, _CPU, (), error)
        transfer = SliceTransfer(len(self._plans))
        run = _Run(self._tensors, self._plans, copies, link, self._group, transfer)
        transfer._begin(start_after(run.run, self._group, transfer._end))
        return transfer

    def _check(self, link: dist.ProcessGroup) -> None:
        trainers, consumers = len(self._tensors.ranks), len(self._plans)
        here = self._tensors.ranks.index(self._tensors.rank)
        if link.size() != trainers + consumers or link.rank() != here:
            raise ValueError(
                f"the link has {link.size()} processes and this is its rank {link.rank()}, but "
                f"there are {trainers} trainer ranks, of which this is number {here}, and "
                f"{consumers} consumers; connect trainer ranks first, in order, then consumers"
            )


class _Copies:
    """The shards of which this rank sends parts, as they were, until all were sent."""

    def __init__(self) -> None:
        self._shards: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._uses: Counter[tuple[int, torch.dtype]] = Counter()
        self._boxes: dict[int, Box] = {}
        self._tensors: Any = ()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, tensors: EngineTensors, plans: Sequence[ConsumerPlan]) -> _Copies:
        """Copy what this rank sends, in the dtype in which it travels."""
        found = cls()
        found._tensors = tensors.made
        here = tensors.ranks.index(tensors.rank)
        for part in (p for plan in plans for bucket in plan.buckets for p in bucket.get(here, ())):
            found._uses[part.param, tensors.made[part.tensor].dtype] += 1
        for position, dtype in found._uses:
            param = tensors.param(position)
            local = param.local
            found._boxes[position] = param.box
            found._shards[position, dtype] = memory(local.shape, dtype).copy_(local)
        return found

    def message(self, parts: Sequence[Part]) -> torch.Tensor:
        """Return the bytes of ``parts``, one after another, ``[bytes]`` of uint8."""
        message = memory([sum(part.nbytes for part in parts)], torch.uint8)
        at = 0
        for part in parts:
            shard = self._shards[part.param, self._tensors[part.tensor].dtype]
            view = part.piece.view(shard, self._boxes[part.param])
            flat = view.contiguous().reshape(-1).view(torch.uint8)
            message[at : at + part.nbytes].copy_(flat)
            at += part.nbytes
        return message

    def release(self, parts: Sequence[Part]) -> None:
        """Free the shards of which no part is left to send."""
        with self._lock:
            for part in parts:
                key = part.param, self._tensors[part.tensor].dtype
                self._uses[key] -= 1
                if not self._uses[key]:
                    del self._shards[key]


class _Run:
    """The threads of a transfer: one for each consumer."""

    def __init__(
        self,
        tensors: EngineTensors,
        plans: Sequence[ConsumerPlan],
        copies: _Copies,
        link: dist.ProcessGroup,
        group: dist.ProcessGroup | None,
        transfer: SliceTransfer,
    ) -> None:
        self._plans = plans
        self._copies = copies
        self._link = link
        self._group = group
        self._transfer = transfer
        self._here = tensors.ranks.index(tensors.rank)
        self._trainers = len(tensors.ranks)

    @torch.no_grad()
    def run(self) -> None:
        """Answer all consumers; then compare, so that every rank knows of every error."""
        errors: list[Exception] = []
        lanes = [
            threading.Thread(target=self._answer, args=(number, errors), name="fullshard slices")
            for number in range(len(self._plans))
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        agree_over(_SLICES, self._group, _CPU, (), errors[0] if errors else None)

    def _answer(self, number: int, errors: list[Exception]) -> None:
        buckets = [
            bucket[self._here] for bucket in self._plans[number].buckets if self._here in bucket
        ]
        done = 0
        try:
            for parts in buckets:
                asked = receive_number(self._link, self._trainers + number, ASK)
                if asked == LOST:  # the rank that failed raises on all
                    break
                if asked != GO:
                    raise LinkError(f"it stopped after {done} of {len(buckets)} messages")
                self._give(parts, number)
                done += 1
        except Exception as error:
            text = str(error) if isinstance(error, LinkError) else format_error(error)
            found = LinkError(
                f"consumer {number} does not have all its slices from trainer rank "
                f"{self._here}: {text}; do not finish this update"
            )
            found.__cause__ = error
            errors.append(found)
        for parts in buckets[done:]:
            self._copies.release(parts)

    def _give(self, parts: Sequence[Part], number: int) -> None:
        to = self._trainers + number
        try:
            message = self._copies.message(parts)
        except Exception as error:
            text = torch.frombuffer(bytearray(format_error(error).encode()), dtype=torch.uint8)
            send_number(self._link, text.numel(), to, GIVE)
            send(self._link, text, to, GIVE)
            raise
        send_number(self._link, 0, to, GIVE)
        send(self._link, message, to, GIVE)
        self._transfer.sent[number] += message.numel()
        self._copies.release(parts)

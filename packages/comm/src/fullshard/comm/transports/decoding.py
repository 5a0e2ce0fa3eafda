"""Decoding what came off the wire, once it has come.

Owns: the buffers of one call of a composed collective, and the work handle whose wait also decodes.
Refuses: moving bytes, and choosing a codec.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fullshard.comm.transports.codec import Codec

__all__ = ["DecodingWork", "Transfer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The buffers of one call: given, sent (encoded), arriving on the wire, decoded to output."""

    input: torch.Tensor
    sent: torch.Tensor
    wire: torch.Tensor
    output: torch.Tensor

    @property
    def coded(self) -> bool:
        """Whether anything but the caller's own buffers travels."""
        return self.sent is not self.input or self.wire is not self.output


class DecodingWork(dist.Work):
    """A work handle whose first ``wait()`` also decodes what arrived; keeps ``sent`` until then."""

    def __init__(self, work: dist.Work, codec: Codec, transfer: Transfer) -> None:
        super().__init__()
        self._work = work
        self._codec = codec
        self._transfer: Transfer | None = transfer

    def is_completed(self) -> bool:
        """Whether the transfer is done and decoded."""
        return self._transfer is None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the transfer, then decode; later calls do nothing."""
        if self._transfer is not None:
            self._work.wait(timeout)
            self._codec.decode_into(self._transfer.wire, self._transfer.output)
            self._transfer = None
        return True

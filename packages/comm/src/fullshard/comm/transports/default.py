"""The transport that moves bytes by default: self for one rank, the process group's for several.

A package may offer a better one for several ranks, such as ``fullshard.samehost``: it appends to
``DEFAULTS`` when it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from fullshard.comm.installed import TRANSPORTS, import_installed
from fullshard.comm.transports.collective import DefaultAllGather, DefaultReduceScatter
from fullshard.comm.transports.transport import ProcessGroupTransport, SelfTransport, Transport

__all__ = [
    "DEFAULTS",
    "DefaultTransport",
    "default_all_gather",
    "default_reduce_scatter",
    "default_transport",
]


@dataclass(frozen=True, slots=True)
class DefaultTransport(ProcessGroupTransport):
    """The process group's own collectives, where nobody chose a transport."""

    @property
    def is_automatic(self) -> bool:
        """True."""
        return True


DEFAULTS: list[Transport] = [DefaultTransport()]
"""Transports for several ranks, of which the last is used."""


def default_transport(process_group: dist.ProcessGroup) -> Transport:
    """Return the transport of ``process_group`` where nobody chose one; it communicates nothing."""
    import_installed(TRANSPORTS)
    return SelfTransport() if process_group.size() == 1 else DEFAULTS[-1]


def default_all_gather(process_group: dist.ProcessGroup) -> DefaultAllGather:
    """The default all-gather, by the default transport of ``process_group``."""
    return DefaultAllGather(transport=default_transport(process_group))


def default_reduce_scatter(process_group: dist.ProcessGroup) -> DefaultReduceScatter:
    """The default reduce-scatter, by the default transport of ``process_group``."""
    return DefaultReduceScatter(transport=default_transport(process_group))

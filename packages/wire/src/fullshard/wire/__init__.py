"""Fewer bytes on the wire: parameters and gradients travel narrow, and are summed wide.

Owns the forms of parameters and gradients on the wire: which parameters and gradients travel in
which form, numbers of 8 bits in blocks, what rounding loses of gradients, and reductions whose
parts are widened before they are added. This package requires only ``fullshard.comm``. Refuses:
moving bytes, and knowing how modules are sharded.
"""

from fullshard.wire.feedback import ErrorFeedback
from fullshard.wire.hosts_transport import HostsTransport
from fullshard.wire.policy import WirePolicy
from fullshard.wire.quantised import Quantised
from fullshard.wire.reduction import WidenedReducePlan, sum_widened

__version__ = "0.1.0"

__all__ = [
    "ErrorFeedback",
    "HostsTransport",
    "Quantised",
    "WidenedReducePlan",
    "WirePolicy",
    "sum_widened",
]

"""Before a run is paid for: does it train as the unsharded model would, and does it fit?

``verify`` trains a user's own model both ways and compares; so does the command ``python -m
fullshard.preflight verify``. ``plan`` returns the memory of a rank in a world of any size.
``diagnose`` checks machines and connections; so does ``python -m fullshard.preflight doctor``.
"""

from fullshard.preflight.costs.devices import DEVICES, Device, Efficiency, Host, Link
from fullshard.preflight.costs.here import Here
from fullshard.preflight.costs.links import Links, measure_links
from fullshard.preflight.doctor.findings import Diagnosis, Finding, Level
from fullshard.preflight.doctor.together import diagnose
from fullshard.preflight.planning.choices import Choice, recompute_units, split_batch
from fullshard.preflight.planning.failures import PlanError
from fullshard.preflight.planning.fit import CHOICES, BudgetError, Fit, fit
from fullshard.preflight.planning.memory.ledger import Category
from fullshard.preflight.planning.memory.places import Place
from fullshard.preflight.planning.plan import plan, shard_blocks
from fullshard.preflight.planning.report import Plan
from fullshard.preflight.planning.timeline import Idle, Span, Timeline
from fullshard.preflight.verification.program import Program
from fullshard.preflight.verification.tolerance import Tolerance
from fullshard.preflight.verification.verdict import (
    Cause,
    Difference,
    Phase,
    Verdict,
    VerificationFailed,
)
from fullshard.preflight.verification.verify import verify
from fullshard.preflight.wording import parse_bytes

__version__ = "0.1.0"

__all__ = [
    "CHOICES",
    "DEVICES",
    "BudgetError",
    "Category",
    "Cause",
    "Choice",
    "Device",
    "Diagnosis",
    "Difference",
    "Efficiency",
    "Finding",
    "Fit",
    "Here",
    "Host",
    "Idle",
    "Level",
    "Link",
    "Links",
    "Phase",
    "Place",
    "Plan",
    "PlanError",
    "Program",
    "Span",
    "Timeline",
    "Tolerance",
    "Verdict",
    "VerificationFailed",
    "diagnose",
    "fit",
    "measure_links",
    "parse_bytes",
    "plan",
    "recompute_units",
    "shard_blocks",
    "split_batch",
    "verify",
]

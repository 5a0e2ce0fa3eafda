"""Before a run is paid for: does the sharded model train as the unsharded one?

``verify`` trains a user's own model both ways and compares; so does the command
``python -m fullshard.preflight verify``.
"""

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

__all__ = [
    "Cause",
    "Difference",
    "Phase",
    "Program",
    "Tolerance",
    "Verdict",
    "VerificationFailed",
    "verify",
]

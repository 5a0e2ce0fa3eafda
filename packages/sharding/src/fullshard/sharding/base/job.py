"""The job of a rank, as far as its launcher names it.

[Note: two jobs] Two jobs with one port, or one file, may meet in one store: the second job's rank 1
then takes the place of the first job's rank 1. The ranks of such a mixture see the same store,
process groups, model and code. A fact that the ranks of one job share, but ranks of different jobs
do not, must come from outside: the launcher gives it to each process in its environment. A token
that a rank makes by itself would not help: ranks of both jobs would read it in the store.

Where a launcher gives no such number, ranks agree: nothing they could compare is sure to be equal
in one job, neither the parent process nor the session, the user or the time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["OTHER_JOBS", "differing_jobs", "job_of_this_rank"]

_OWN = "FULLSHARD_RUN_ID"
_VARIABLES = (
    _OWN,
    "TORCHELASTIC_RUN_ID",  # torchrun; "none" unless --standalone or --rdzv-id give one
    "PMIX_NAMESPACE",  # mpirun of Open MPI, srun --mpi=pmix
    "SLURM_HET_JOB_ID",  # parts of a heterogeneous job have a SLURM_JOB_ID each
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "FLUX_JOB_ID",
)
"""The first one that is set counts: a job that torchrun started may span several of SLURM's."""

_UNSET = ("", "none")

OTHER_JOBS = "ranks of different jobs have met in one process group: "
"""How the text about them begins."""

_ADVICE = (
    "Two jobs use the same MASTER_ADDR and MASTER_PORT, or the same file, to find their ranks; "
    f"stop one, and give each its own. If this is one job, set {_OWN} to the same text on every "
    "rank"
)


def job_of_this_rank() -> str:
    """Return the variable that names this rank's job, and its value; empty if there is none."""
    for name in _VARIABLES:
        value = os.environ.get(name, "")
        if value not in _UNSET:
            return f"{name}={value}"
    return ""


def differing_jobs(jobs: Mapping[int, str]) -> str:
    """Return which ranks are of different jobs; nothing if they may be of one.

    A rank without a variable may be of any job, and so may one that has another variable: ranks of
    one job may have been started in different ways.

    Args:
        jobs: what ``job_of_this_rank`` returned on each rank.
    """
    found: dict[str, set[str]] = {}
    for job in filter(None, jobs.values()):
        found.setdefault(job.partition("=")[0], set()).add(job)
    if all(len(values) == 1 for values in found.values()):
        return ""
    said = "; ".join(f"rank {rank} has {job or 'none'}" for rank, job in jobs.items())
    return f"{OTHER_JOBS}{said}. {_ADVICE}"

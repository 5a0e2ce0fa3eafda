"""The faults of a campaign: what happens, on which rank, at which place of which step.

A fault is drawn from a seed, so that it can be repeated by its number and the name of its kind.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from support.elastic.faults import STAGES

__all__ = ["KINDS", "PLACES", "SAVED_AT", "SAVING", "SLOW_IN", "STEPS", "Fault", "Kind", "Settings"]

STEPS = 6
SAVED_AT = (1, 3)
"""Steps after which the job saves a checkpoint, beside the next steps."""

SAVING = ("state dict", "write", "commit")
"""Places in a save; the last two are passed on a thread of their own."""

PLACES = (
    "batch",
    "forward pre-hook",
    "forward",
    "forward hook",
    "saved tensor",
    "loss",
    "tensor hook",
    "module's backward hook",
    "gradient hook",
    "after backward",
    "clip",
    "optimizer pre-hook",
    "optimizer post-hook",
    *SAVING,
)
"""Places of a step at which a rank may be struck, all of them in a user's code or in a save."""

COPIED = (*PLACES[: -len(SAVING)], "state dict", "copy", "send")
"""Places that each step passes of a job that keeps each step in the memory of the next host."""

SLOW_IN = {
    "batch": "input",
    "forward pre-hook": "forward",
    "forward hook": "forward",
    "loss": "forward",
    "tensor hook": "backward",
    "gradient hook": "backward",
    "clip": "optimizer",
    "optimizer pre-hook": "optimizer",
    "optimizer post-hook": "optimizer",
}
"""Places at which a rank may be slow, and the phase that ``SlowRanks`` has to name."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        ends: whether the job has to end in an error on each rank; None: it may, or go on as if
            nothing had happened.
        places: where it strikes.
        weight: how often it is drawn; 0: only if its name is given, so that the numbers of older
            faults stay.
        steps: the first step that it may strike in, and the one after the last.
    """

    ends: bool | None
    places: tuple[str, ...] = PLACES
    weight: int = 1
    steps: tuple[int, int] = (1, STEPS - 1)


KINDS = {
    "exception": Kind(ends=True, places=PLACES[: -len(SAVING)], weight=6),
    "exception in a save": Kind(ends=None, places=SAVING),
    "interrupt": Kind(ends=True, places=PLACES[: -len(SAVING)]),
    "exit": Kind(ends=True, weight=2),
    "kill": Kind(ends=True, weight=4),
    "pause": Kind(ends=False, weight=2),
    "clock": Kind(ends=False),
    "open files": Kind(ends=None, weight=2),
    "full disk": Kind(ends=None, places=("batch",)),
    "small /dev/shm": Kind(ends=False, places=("batch",)),
    "damaged shard": Kind(ends=True, places=("shards at rest",)),
    "corrupted checkpoint": Kind(ends=True, places=("batch",)),
    "two jobs": Kind(ends=None, places=("batch",)),
    "damaged gradient": Kind(
        ends=True, places=tuple(each for each in STAGES if "gradients" in each), weight=0
    ),
    "damaged optimizer state": Kind(ends=True, places=("optimizer state at rest",), weight=0),
    # from the third step on there is a step that is whole in memory
    "lost host": Kind(ends=True, places=COPIED, weight=0, steps=(2, STEPS - 1)),
    "two neighbours lost": Kind(ends=True, places=COPIED, weight=0, steps=(2, STEPS - 1)),
    "slow rank": Kind(ends=False, places=tuple(SLOW_IN), weight=0, steps=(1, 3)),
    "lost replica group": Kind(
        ends=False, places=("begin", "forward", "backward", "commit", "step"), weight=0
    ),
}


@dataclass(frozen=True)
class Settings:
    """How the job trains; jobs with equal settings have equal numbers.

    Attributes:
        ranks: of the job.
        shared_memory: whether ranks of the host share memory, or talk through gloo.
        bfloat16: whether it computes in bfloat16.
        micro_batches: in a step.
        checkpointed: whether blocks compute their activations again in backward.
        checked: whether each step is checked for damaged numbers.
        hosts: the host of each rank, if the job keeps its steps in the memory of hosts.
        steps: after how many it saves, and ends.
    """

    ranks: int = 2
    shared_memory: bool = True
    bfloat16: bool = False
    micro_batches: int = 1
    checkpointed: bool = False
    checked: bool = False
    hosts: tuple[int, ...] = ()
    steps: int = STEPS


@dataclass(frozen=True)
class Fault:
    """One fault of a campaign.

    Attributes:
        seed: its number.
        kind: a key of ``KINDS``.
        place: where it strikes.
        step: in which step, or the next one that passes the place.
        victim: the rank that it strikes.
        busy: how many other processes compute meanwhile.
        seconds: for which time a rank is stopped.
        settings: those of the job.
    """

    seed: int
    kind: str
    place: str
    step: int
    victim: int
    busy: int
    seconds: float
    settings: Settings

    @classmethod
    def drawn(cls, seed: int, *, kind: str = "", seconds: float = 20.0, worlds: int = 3) -> Fault:
        """Draw the fault of a number.

        Args:
            seed: the number.
            kind: a key of ``KINDS``; empty: any.
            seconds: for which time a rank is stopped.
            worlds: the largest number of ranks.
        """
        generator = random.Random(seed)
        weights = [each.weight for each in KINDS.values()]
        (drawn,) = generator.choices([*KINDS], weights)
        kind = kind or drawn
        settings = Settings(
            ranks=generator.randint(2, worlds),
            shared_memory=generator.random() < 0.7,
            bfloat16=generator.random() < 0.3,
            micro_batches=generator.choice((1, 1, 2)),
            checkpointed=generator.random() < 0.3,
            checked=kind.startswith("damaged"),
        )
        if kind in ("lost host", "two neighbours lost"):
            settings = replace(settings, hosts=tuple(range(settings.ranks)))
        return cls(
            seed=seed,
            kind=kind,
            place=generator.choice(KINDS[kind].places),
            step=generator.randrange(*KINDS[kind].steps),
            victim=generator.randrange(settings.ranks),
            busy=3 if generator.random() < 0.25 else 0,
            seconds=seconds,
            settings=settings,
        )

    @property
    def tensor(self) -> str:
        """The parameter that is damaged, of which each rank has a part."""
        block, linear = 1 + self.seed % 3, ("first", "second")[self.seed % 2]
        return f"{block}.{linear}.{('weight', 'bias')[self.seed // 6 % 2]}"

    def none(self) -> Fault:
        """Return the same job without the fault."""
        return replace(self, kind="none", busy=0)

    def __str__(self) -> str:
        """Say what happens, in a line."""
        load = f", beside {self.busy} busy processes" if self.busy else ""
        return (
            f"fault {self.seed}: {self.kind} on rank {self.victim} of {self.settings.ranks}, "
            f"{self.place} of step {self.step}{load}, {self.settings}"
        )

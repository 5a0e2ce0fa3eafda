"""A part of the campaign: thirty faults, each kind of which is among them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.campaign.faults import KINDS, Fault, Settings
from support.campaign.verdict import MOUNTED, judge, lacking

LONG = (*MOUNTED, "lost replica group")
OTHERS = [kind for kind in KINDS if kind not in LONG]


def _judge(seed: int, kind: str) -> None:
    if lacking(kind):
        pytest.skip(lacking(kind))
    fault = Fault.drawn(seed, kind=kind, seconds=1.0, worlds=2)
    # few settings: each needs a run without a fault, too
    checked, hosts = fault.settings.checked, fault.settings.hosts
    settings = Settings(shared_memory=seed % 2 == 0, checked=checked, hosts=hosts)
    # other tests keep the machine busy; and without descriptors for a first save, ranks wait long
    step = max(fault.step, 2) if kind == "open files" else fault.step
    fault = replace(fault, settings=settings, busy=0, step=step)
    assert judge(fault, restarts=seed % 6 == 1).wrong == [], str(fault)


@pytest.mark.parametrize("seed", range(30))
def test_a_fault_ends_in_the_right_numbers_or_in_a_clear_error_on_each_rank(seed: int) -> None:
    _judge(seed, OTHERS[seed % len(OTHERS)])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", LONG)
def test_so_it_does_on_a_small_disk_and_in_replica_groups(kind: str) -> None:
    _judge(0, kind)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_so_it_does_with_more_ranks_and_longer_pauses(seed: int) -> None:
    verdict = judge(Fault.drawn(seed))
    assert verdict.wrong == [], str(verdict.fault)

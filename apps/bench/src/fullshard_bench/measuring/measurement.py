"""A measurement from beginning to end, as each of its ranks makes it.

Owns the order: the reference, then each contestant alone (verified, built, checked, counted), twins
whose collectives move nothing, then the timed rounds in which all take turns.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullshard_bench.contestants.plain import build_reference
from fullshard_bench.contestants.registry import build_contestant
from fullshard_bench.contestants.training import Trainee
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.arena import Arena, real_arena, silent_arena
from fullshard_bench.launching.job import Job, JobResult
from fullshard_bench.launching.network import bytes_sent
from fullshard_bench.launching.ranks import Ranks
from fullshard_bench.launching.turns import Alone, Turn
from fullshard_bench.measuring.checking import (
    Curve,
    compare_curves,
    compare_last,
    curve_of,
    train_curve,
)
from fullshard_bench.measuring.kernels import copy_kernels_ms
from fullshard_bench.measuring.memory import Memory, cpu_memory, cuda_memory
from fullshard_bench.measuring.observing import StepCounts, count_left, count_step
from fullshard_bench.measuring.recording import record_events
from fullshard_bench.measuring.rounds import Batches, Racer, rounds, synchronize
from fullshard_bench.measuring.verifying import verify_contestant
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import Shape, Workload
from fullshard_bench.records.deriving import derive
from fullshard_bench.records.result import Entry, Figures, Point, Verification

__all__ = ["measure"]

_BATCHES = 2
_WARM_UP = 2  # steps of a twin before it is timed
_COUNTING_STEPS = 3  # of `_count`, on the first batch
_COUNTING_STEPS_CUDA = 4

Tell = Callable[[str, int, int], None]


@dataclass(kw_only=True)
class _Candidate:
    """A contestant on its way through the measurement."""

    name: str
    status: str = "ok"
    reason: str = ""
    racer: Racer | None = None
    twin: Racer | None = None
    curve: Curve | None = None
    first_step_ms: float = 0.0
    counts: StepCounts | None = None
    left_bytes: int = -1
    copy_kernels_ms: float | None = None
    memory: Memory | None = None
    verification: Verification | None = None


@dataclass(frozen=True, kw_only=True)
class _Scene:
    """State that all contestants of a measurement share."""

    job: Job
    workload: Workload
    arena: Arena
    twins: Arena | None
    ranks: Ranks
    batches: Batches
    tell: Tell


def measure(
    job: Job, device: torch.device, tell: Tell, turn: Turn | None = None
) -> JobResult | None:
    """Make the measurement; return it on every rank of the mesh, None on ranks beyond it.

    Args:
        job: what to measure.
        device: where this rank computes.
        tell: hears what is done now, and how many of how many timed rounds.
        turn: when this process may work, entered for each part and each step; None: always.
    """
    turn = Alone() if turn is None else turn
    with turn:
        scene = _set_up(job, device, tell)
        if scene is None:
            return None
        reference = None if scene.arena.silent else _reference(scene)
        candidates = [_prepare(name, scene, reference) for name in job.settings.impl]
        ready = [each for each in candidates if each.racer is not None]
        if scene.twins is not None:
            for candidate in ready:
                _add_twin(candidate, scene, scene.twins)
    racers = [each.racer for each in ready if each.racer is not None]
    racers += [each.twin for each in ready if each.twin is not None]
    steps = job.settings.steps
    for number in rounds(racers, scene.batches, scene.ranks, device, steps, turn):
        tell("timing", number, steps)
    with turn:
        events = _record(scene, ready) if job.trace else ()
        return _finish(scene, candidates, reference, events)


def _set_up(job: Job, device: torch.device, tell: Tell) -> _Scene | None:
    settings = job.settings
    shape = parse_mesh(job.mesh)
    workload = make_workload(settings.model, Shape(rows=settings.rows, tokens=settings.tokens))
    twins = None
    if job.kind == "wide":
        arena = silent_arena(shape, device, settings.wide_group)
    else:
        arena = real_arena(shape, device)
        twins = silent_arena(shape, device) if settings.exposed else None
    if arena is None:
        return None
    batches = []
    for number in range(_BATCHES):
        seed = (settings.seed * _BATCHES + number) * 100_003 + arena.rank
        generator = torch.Generator().manual_seed(seed)
        batches.append([each.to(device) for each in workload.batch(generator)])
    return _Scene(
        job=job,
        workload=workload,
        arena=arena,
        twins=twins,
        ranks=Ranks(None if arena.silent else arena.group),
        batches=batches,
        tell=tell,
    )


def _reference(scene: _Scene) -> Curve:
    scene.tell("training the unsharded model", 0, 0)
    settings = scene.job.settings
    trainee = build_reference(scene.workload, settings, scene.arena)
    # As many steps, on the same batches, as each contestant makes.
    counting = [0] * (
        _COUNTING_STEPS_CUDA
        if scene.arena.device.type == "cuda"
        else _COUNTING_STEPS + (bytes_sent() is not None)
    )
    checked, timed = ([i % _BATCHES for i in range(n)] for n in (settings.checked, settings.steps))
    batches = [scene.batches[index] for index in (*checked, *counting, *timed)]
    return train_curve(trainee, batches, scene.ranks)


def _prepare(name: str, scene: _Scene, reference: Curve | None) -> _Candidate:
    """A contestant built, checked and counted; on every rank with equal status."""
    scene.tell(f"building {name}", 0, 0)
    _warm_up(name, scene)
    candidate = _Candidate(name=name, verification=_verify(name, scene))
    device = scene.arena.device
    reserved = _reserved(device)
    failure = ""
    try:
        trainee = build_contestant(name, scene.workload, scene.job.settings, scene.arena)
        candidate.racer = Racer(name=name, trainee=trainee)
        _first_steps(candidate, trainee, scene)
    except BenchError:
        raise
    except Exception as error:  # a rival may fail in any way: the others still are measured
        failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    failure = scene.ranks.first_failure(failure)
    if failure:
        candidate.status, candidate.reason, candidate.racer = "failed", failure, None
        return candidate
    assert candidate.racer is not None
    trainee = candidate.racer.trainee
    assert candidate.curve is not None
    if reference is None:
        candidate.status = "unchecked"
    else:
        shares = trainee.shares_gradients
        dtype = trainee.rounds_to or scene.job.settings.dtype
        first = reference.first(scene.job.settings.checked)
        candidate.reason = compare_curves(candidate.curve, first, dtype, shares=shares)
        said = candidate.verification
        if said is not None and said.outcome == "different":
            candidate.reason = said.reason
        candidate.status = "wrong" if candidate.reason else "ok"
    _count(candidate, trainee, scene)
    if reserved is not None and candidate.memory is not None:
        candidate.memory["reserved"] = torch.cuda.max_memory_reserved(device) - reserved
    return candidate


def _verify(name: str, scene: _Scene) -> Verification | None:
    settings, arena = scene.job.settings, scene.arena
    if not settings.verify or arena.silent:
        return None
    scene.tell(f"verifying {name}", 0, 0)
    return verify_contestant(name, scene.workload, settings, arena, scene.batches)


def _warm_up(name: str, scene: _Scene) -> None:
    """Run a step of a tiny model, so that the time of a construction has no first imports."""
    settings = scene.job.settings
    tiny = make_workload("many:groups=2,width=32", Shape(rows=1, tokens=1))
    device = scene.arena.device
    batch = [each.to(device) for each in tiny.batch(torch.Generator().manual_seed(0))]
    # An error here appears again with the real model, and is reported then.
    with contextlib.suppress(Exception):
        build_contestant(name, tiny, settings, scene.arena).step(batch)


def _reserved(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_reserved(device)


def _first_steps(candidate: _Candidate, trainee: Trainee, scene: _Scene) -> None:
    steps = scene.job.settings.checked
    start = time.perf_counter()
    outcomes = [trainee.step(scene.batches[0])]
    synchronize(scene.arena.device)
    candidate.first_step_ms = (time.perf_counter() - start) * 1e3
    outcomes += [trainee.step(scene.batches[number % _BATCHES]) for number in range(1, steps)]
    candidate.curve = curve_of(outcomes, scene.ranks)


def _count(candidate: _Candidate, trainee: Trainee, scene: _Scene) -> None:
    """Count copies, collectives and memory, each in a separate untimed step."""
    batch, device = scene.batches[0], scene.arena.device
    candidate.counts = count_step(trainee, batch, scene.arena)

    def step() -> object:
        return trainee.step(batch)

    if device.type == "cuda":
        candidate.memory = cuda_memory(trainee, step, device)
        candidate.copy_kernels_ms = copy_kernels_ms(step)
    else:
        mesh = scene.arena.mesh
        sharers = 1 if scene.arena.silent else mesh.size(mesh.ndim - 1)
        candidate.memory = cpu_memory(trainee, step, sharers)
        if bytes_sent() is not None:
            candidate.left_bytes = count_left(trainee, batch, scene.ranks)


def _add_twin(candidate: _Candidate, scene: _Scene, arena: Arena) -> None:
    """Build the same contestant where collectives move nothing, and let it settle."""
    assert candidate.racer is not None
    if not candidate.racer.trainee.shares_gradients:
        return  # it has no collectives: it is its own twin
    scene.tell(f"building {candidate.name} without communication", 0, 0)
    trainee = build_contestant(candidate.name, scene.workload, scene.job.settings, arena)
    for number in range(_WARM_UP):
        trainee.step(scene.batches[number % _BATCHES])
    candidate.twin = Racer(name=candidate.name, trainee=trainee)


def _record(scene: _Scene, ready: Sequence[_Candidate]) -> tuple[tuple[dict[str, Any], ...], ...]:
    """The events of one step of fullshard on every rank."""
    racer = next((each.racer for each in ready if each.name == "fullshard"), None)
    if racer is None:
        return ()
    trainee = racer.trainee
    scene.ranks.meet()
    events = record_events(lambda: trainee.step(scene.batches[0]), scene.arena.device)
    return tuple(tuple(each) for each in scene.ranks.gather(events))


def _finish(
    scene: _Scene,
    candidates: Sequence[_Candidate],
    reference: Curve | None,
    events: tuple[tuple[dict[str, Any], ...], ...],
) -> JobResult:
    if reference is not None:
        for candidate in candidates:
            _check_last(candidate, reference, scene)
    entries = tuple(_entry(each, scene) for each in candidates)
    job, workload = scene.job, scene.workload
    first = None if reference is None else reference.first(job.settings.checked)
    racer = next((each.racer for each in candidates if each.racer is not None), None)
    parameters = [] if racer is None else list(racer.trainee.model.parameters())
    point = Point(
        kind=job.kind,
        mesh=job.mesh,
        ranks=scene.arena.size,
        entries=derive(entries, items=workload.items * scene.arena.size),
        reference_losses=() if first is None else first.losses,
        reference_norms=() if first is None else first.norms,
    )
    return JobResult(
        point=point,
        parameters=sum(each.numel() for each in parameters),
        parameter_bytes=sum(each.numel() * each.element_size() for each in parameters),
        item=workload.item,
        items_per_rank=workload.items,
        events=events,
    )


def _check_last(candidate: _Candidate, reference: Curve, scene: _Scene) -> None:
    """Return whether a contestant that was right at first is still right after the timed steps."""
    racer = candidate.racer
    if candidate.status != "ok" or racer is None or racer.last is None:
        return
    if racer.trainee.shares_gradients:
        (loss,) = scene.ranks.mean([float(racer.last.loss)])
        dtype = racer.trainee.rounds_to or scene.job.settings.dtype
        candidate.reason = compare_last(loss, reference.losses[-1], dtype)
        candidate.status = "wrong" if candidate.reason else "ok"


def _entry(candidate: _Candidate, scene: _Scene) -> Entry:
    racer, ranks = candidate.racer, scene.ranks
    if racer is None:
        return Entry(
            name=candidate.name,
            status="failed",
            reason=candidate.reason,
            figures=None,
            derived=None,
            verification=candidate.verification,
        )
    assert candidate.curve is not None
    assert candidate.counts is not None
    assert candidate.memory is not None
    twin = candidate.twin
    totals = ranks.gather((candidate.counts.copied_bytes, dict(candidate.memory)))
    left_bytes = max(ranks.gather(candidate.left_bytes))
    figures = Figures(
        step_ms=_rounded(ranks.slowest(racer.step_ms)),
        silent_ms=() if twin is None else _rounded(ranks.slowest(twin.step_ms)),
        host_ms=_rounded(ranks.slowest((twin or racer).host_ms)),
        construction_ms=round(racer.trainee.construction_s * 1e3, 3),
        first_step_ms=round(candidate.first_step_ms, 3),
        groups=racer.trainee.groups,
        collectives=candidate.counts.collectives,
        copied_bytes=max(copied for copied, _ in totals),
        left_bytes=left_bytes,
        copy_kernels_ms=candidate.copy_kernels_ms,
        padding_percent=round(racer.trainee.padding_percent, 3),
        memory={key: max(memory[key] for _, memory in totals) for key in candidate.memory},
        losses=() if scene.arena.silent else candidate.curve.losses,
        norms=() if scene.arena.silent else candidate.curve.norms,
    )
    return Entry(
        name=candidate.name,
        status=candidate.status,
        reason=candidate.reason,
        figures=figures,
        derived=None,
        verification=candidate.verification,
    )


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in values)

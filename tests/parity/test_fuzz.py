"""Training runs drawn at random follow the unsharded model, step by step.

A seed is a whole run: model, wrapping, mesh, policies, accumulation, checkpointing, what ranks
skip, and around it placements, offload, wrapped optimizers, and moves of state from run to run; a
third test adds what else programs do. A few seeds run always, more in the matrix. ``nox -s fuzz --
--seeds 0:1000`` runs any, and ``nox -s fuzz -- --seeds 17`` one that failed, again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from support.fuzz.around import (
    BEFORE,
    BETWEEN,
    MORE_BEFORE,
    MORE_BETWEEN,
    MOVES,
    PLACED,
    Norm,
    draw_around,
)
from support.fuzz.blocks import WRITES, Grads
from support.fuzz.carried import KINDS
from support.fuzz.case import draw
from support.fuzz.more import Kept, Loss, MoreCase, draw_more
from support.fuzz.run import run_case
from support.products import few
from support.ranks import RanksFailed, run_on_ranks

# of a program that catches the error of a backward and goes on, without reset_iter_state()
pytestmark = pytest.mark.filterwarnings("ignore:the last backward did not finish:RuntimeWarning")

ALWAYS = (0, 17, 18, 20, 22, 40, 5179)  # on several ranks; they draw every feature twice
# 5179: two modules of one group, both checkpointed, in canonical order
# 304: a parameter that is frozen between backwards without synchronisation, in canonical order
# 1280: a model that diverges, in which a forward runs a layer four times
# 1285: in a checkpointed region, some ranks skip what comes after the sharded modules
# 2316: there, some ranks skip the end of a sharded module that runs twice
# 8160: there, they skip what comes after a sharded module that runs twice
MATRIX = (*range(60), 304, 1280, 1285, 2316, 5179, 8160)
ALWAYS_AROUND = (8, 27, 50, 58, 304)
ALWAYS_MORE = (2, 3)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each seed asked for."""
    if "seed" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--seeds")
        seeds = MATRIX if asked is None else _range(asked)
        values = few(seeds, *_ALWAYS[metafunc.function]) if asked is None else seeds
        metafunc.parametrize("seed", values, ids=[f"seed{seed}" for seed in seeds])


def _range(text: str) -> range:
    start, colon, end = text.partition(":")
    return range(int(start), int(end) if colon else int(start) + 1)


def _run(seed: int, *, around: bool = False, more: bool = False) -> None:
    case = draw(seed)
    try:
        run_on_ranks(run_case, case.world_size, seed, around, more)
    except RanksFailed as failed:
        features = draw_more(case) if more else draw_around(case) if around else ""
        raise AssertionError(
            f"seed {seed} fails; run it again by `nox -s fuzz -- --seeds {seed}`\n"
            f"{case}\n{features}\n{failed}"
        ) from None


def test_a_run_drawn_at_random_equals_the_unsharded_model(seed: int) -> None:
    _run(seed)


def test_so_does_a_run_with_other_features_around_it(seed: int) -> None:
    """Placements, offload, wrapped optimizers, checks, and what programs do between backwards."""
    _run(seed, around=True)


def test_so_does_a_run_of_a_program_that_does_more(seed: int) -> None:
    """Scalers, closures, second backwards, averages, interrupts, settings between backwards.

    Layers write into what a forward gets; blocks read and write full parameters; losses are kept.
    """
    _run(seed, more=True)


_ALWAYS = {
    test_a_run_drawn_at_random_equals_the_unsharded_model: ALWAYS,
    test_so_does_a_run_with_other_features_around_it: ALWAYS_AROUND,
    test_so_does_a_run_of_a_program_that_does_more: ALWAYS_MORE,
}


def test_the_fixed_seeds_draw_every_feature_at_least_twice() -> None:
    cases = [draw(seed) for seed in ALWAYS]
    nodes = [node for case in cases for top in case.nodes for node in (top, *top.children)]
    steps = [step for case in cases for step in case.steps]
    features = {
        "hybrid": [case.hybrid for case in cases],
        "canonical": [
            case.canonical and any(n.skipped and n.shards for n in case.nodes) for case in cases
        ],
        "scale": [node.scale for node in nodes],
        "tied": [node.tied >= 0 for node in nodes],
        "frozen": [node.frozen for node in nodes],
        "post-forward mesh": [node.reshard == 2 and node.sharded for node in nodes],
        "repeated": [node.repeated for node in nodes],
        "checkpointed": [node.checkpointing.value != "none" for node in nodes],
        "not synchronised": [not all(step.synchronise) for step in steps],
        "no all-reduce": [not all(step.all_reduce) for step in steps],
        "not waited for": [not all(step.waits) for step in steps],
        "forwards first": [step.forwards_first for step in steps],
        "clipped": [step.max_norm is not None for step in steps],
        "divided by a tensor": [step.by_count for step in steps],
    }
    rare = [name for name, found in features.items() if sum(found) < 2]
    assert not rare, f"{rare} are hardly drawn"


def test_the_seeds_of_the_matrix_draw_every_feature_around_a_run() -> None:
    found: Counter[object] = Counter()
    for case in map(draw, MATRIX):
        drawn = draw_around(case)
        runs = [(drawn, drawn.moves[0]), *zip(drawn.moved, drawn.moves, strict=True)]
        trained = [run for index, (run, way) in enumerate(runs) if (index == 0) is not bool(way)]
        for run in trained:
            found.update((run.placements, run.offload, run.optimizer, run.norm))
            found.update(["gradients in files"] * run.gradients_in_file)
        found.update(name for names in (*drawn.before, *drawn.between) for name in names)
        found.update(drawn.moves)
        found.update(name for name in ("mixed", "two_groups") if getattr(drawn, name))
    wanted = {*PLACED, *BEFORE, *BETWEEN, *MOVES, *Norm, "gradients in files", "mixed"}
    assert not wanted - {*found}, f"{wanted - {*found}} are never drawn"


def test_the_seeds_of_the_matrix_draw_all_that_a_program_may_do_more() -> None:
    found: Counter[object] = Counter()
    for case in map(draw, MATRIX):
        drawn, more = draw_more(case)
        found.update(name for names in (*drawn.before, *drawn.between) for name in names)
        found.update(loss for losses in more.losses for loss in losses)
        found["closure"] += more.closure
        found["averages"] += more.averages
        found["overflow"] += any(map(more.overflows_in, range(len(case.steps))))
        found.update([more.carried.kind, more.kept, *_names_of(more)])
    wanted = {*MORE_BEFORE, *MORE_BETWEEN, *Loss, "closure", "averages", "overflow"}
    wanted |= {*KINDS, *Kept, *Grads, *ARGUMENTS, *(f"{each} a block" for each in WRITES)}
    rare = {name for name in wanted if found[name] < 2}
    assert not rare, f"{rare} are hardly drawn"


ARGUMENTS = ("keyword", "again", "context", "reads", "casts", "late")


def _names_of(more: MoreCase) -> Iterator[object]:
    """Yield what is drawn of the arguments of forwards, and of blocks with full parameters."""
    carried, blocks = more.carried, more.blocks
    yield from (name for name in ARGUMENTS if vars(carried)[name] and carried.kind)
    for block in (*blocks.before, *(each for step in blocks.inside for each in step)):
        if block is not None:
            yield f"{block.write} a block"
            yield block.grads

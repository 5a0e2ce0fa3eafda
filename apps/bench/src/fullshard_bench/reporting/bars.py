"""The bars that fullshard is held to, and whether a result meets them.

Owns each bar: where it is measured, what ratio it is of, and its limit. A bar is met if the whole
    90 % interval of the ratio is below the limit, and the losses agree; it is not met if the whole
    interval is above; else the measurement is inconclusive, and the bar counts as not met. A bar
    whose measurement is missing in the result is "not measured". If torch's own excess (its host
    time over the unsharded step, its exposed communication) may be zero, the interval of the ratio
    reaches infinity, and is below no limit.

Host time of wide worlds is judged over two groups, by the same limits: torch's `fake` group and the
`silent` one, whose collectives take no time (see `fullshard_bench.launching.silent`). The limits at
world 1024 are those of collectives that move the padding of ranks without rows, as torch's do: the
ratio is highest over `silent`, the growth over `fake`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fullshard_bench.records.result import Entry, Figures, Result, RunResult
from fullshard_bench.records.statistics import Estimate, Excess, excess_growth, excess_ratio, ratio
from fullshard_bench.reporting.format import as_ratio
from fullshard_bench.reporting.report import markdown_table

__all__ = ["BARS", "Bar", "Verdict", "judge", "judge_measured", "verdict_lines", "verdict_rows"]

_Ratio = Callable[[Figures, Figures, Figures], Estimate | None]
"""Takes figures of fullshard, the rival and the unsharded step."""

_Where = tuple[str, str, str]
"""The name of a run, and kind and mesh of its point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Limit on a ratio at one point of a suite.

    To the figures of the contestant `rival`; with `base`, to fullshard's own at that mesh.
    """

    what: str
    run: str
    kind: str
    mesh: str
    ratio: _Ratio
    limit: float
    base: str = ""
    rival: str = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Bar and its measured ratio; None where it was not measured."""

    bar: Bar
    found: Estimate | None
    torch_text: str

    @property
    def word(self) -> str:
        """`met`, `not met`, `inconclusive` or `not measured`."""
        if self.found is None:
            return "not measured"
        if self.found.high <= self.bar.limit:
            return "met"
        return "not met" if self.found.low > self.bar.limit else "inconclusive"


def _exact(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value)


def _step(ours: Figures, theirs: Figures, plain: Figures) -> Estimate | None:
    return ratio(ours.step_ms, theirs.step_ms)


def _step_over_plain(ours: Figures, theirs: Figures, plain: Figures) -> Estimate | None:
    return ratio(ours.step_ms, plain.step_ms)


def _copied(ours: Figures, theirs: Figures, plain: Figures) -> Estimate | None:
    return _exact(ours.copied_bytes / theirs.copied_bytes) if theirs.copied_bytes > 0 else None


def _copy_kernels(ours: Figures, theirs: Figures, plain: Figures) -> Estimate | None:
    first, second = ours.copy_kernels_ms, theirs.copy_kernels_ms
    return _exact(first / second) if first is not None and second else None


def _construction(ours: Figures, theirs: Figures, plain: Figures) -> Estimate | None:
    return _exact(ours.construction_ms / theirs.construction_ms)


def _host(ours: Figures, theirs: Figures, plain: Figures) -> Estimate | None:
    return excess_ratio(_host_excess(ours, plain), _host_excess(theirs, plain))


def _host_excess(figures: Figures, plain: Figures) -> Excess:
    return Excess(values=figures.host_ms, base=plain.host_ms)


def _exposed(ours: Figures, theirs: Figures, plain: Figures) -> Estimate | None:
    if not (ours.silent_ms and theirs.silent_ms):
        return None
    first, second = (Excess(values=each.step_ms, base=each.silent_ms) for each in (ours, theirs))
    return excess_ratio(first, second)


def _peak(ours: Figures, theirs: Figures, plain: Figures) -> Estimate | None:
    return _exact(ours.memory["peak"] / theirs.memory["peak"])


def _memory(ours: Figures, theirs: Figures, plain: Figures) -> Estimate | None:
    """Beyond what is held, and beyond the activations: what the unsharded forward leaves."""
    activations = max(0, plain.memory["forward"] - plain.memory["held"])
    beyond = [
        figures.memory["peak"] - figures.memory["held"] - activations for figures in (ours, theirs)
    ]
    return _exact(max(0, beyond[0]) / beyond[1]) if beyond[1] > 0 else None


def _bar(what: str, where: _Where, ratio: _Ratio, limit: float, **more: str) -> Bar:
    run, kind, mesh = where
    return Bar(what=what, run=run, kind=kind, mesh=mesh, ratio=ratio, limit=limit, **more)


def _wide_bars(group: str, small: _Where, large: _Where) -> list[Bar]:
    """Bars of host time over a silent group, at world 8 and at 1024."""
    what = f"host time over the unsharded model, {group}"
    return [
        _bar(f"{what}, world 8", small, _host, 0.20),
        _bar(f"{what}, world 1024", large, _host, 0.28),
        _bar(f"{what}: world 1024 over fullshard's own at 8", large, _host, 1.7, base="8"),
        _bar(f"construction, {group}, world 1024", large, _construction, 0.15),
    ]


_MINI_2 = ("gpt-mini, 32 tokens", "mesh", "2")
_MINI_4 = ("gpt-mini, 32 tokens", "mesh", "4")
_MINI_HYBRID = ("gpt-mini, 32 tokens", "mesh", "2x2")
_SILENT_8 = ("40 groups of 9", "wide", "8")
_SILENT_1024 = ("40 groups of 9", "wide", "1024")
_FAKE_8 = ("40 groups of 9, torch's fake group", "wide", "8")
_FAKE_1024 = ("40 groups of 9, torch's fake group", "wide", "1024")
_SMALL_16 = ("gpt-small, 16 tokens", "mesh", "2")
_SMALL_256 = ("gpt-small, 256 tokens", "mesh", "2")
_EXPERTS = ("experts, 64 tokens", "mesh", "2")
_SLOW = ("gpt-small, 256 tokens, 1 Gbit/s", "mesh", "2")
_BILLION_8 = ("gpt-1b, bf16, one of many", "wide", "8")
_BILLION_1 = ("gpt-1b, bf16", "mesh", "1")

BARS = (
    _bar("bytes copied outside collectives, gpt-mini, 2 ranks", _MINI_2, _copied, 0.15),
    *_wide_bars("torch's fake group", _FAKE_8, _FAKE_1024),
    *_wide_bars("silent group", _SILENT_8, _SILENT_1024),
    _bar("step, 2 ranks, gpt-small, 16 tokens", _SMALL_16, _step, 0.38),
    _bar("step, 2 ranks, gpt-small, 256 tokens", _SMALL_256, _step, 0.62),
    _bar("the same over the unsharded step", _SMALL_256, _step_over_plain, 1.25),
    _bar("step, 4 ranks, gpt-mini, 32 tokens", _MINI_4, _step, 0.38),
    _bar("step, 2x2 hybrid, gpt-mini, 32 tokens, of DDP's", _MINI_HYBRID, _step, 0.9, rival="ddp"),
    _bar("peak memory, 2 ranks, gpt-small, 16 tokens", _SMALL_16, _peak, 1.05),
    _bar("peak memory, 2 ranks, gpt-small, 256 tokens", _SMALL_256, _peak, 1.05),
    _bar("peak memory, 4 ranks, gpt-mini, 32 tokens", _MINI_4, _peak, 1.05),
    _bar("peak memory, 2 ranks, experts, 64 tokens", _EXPERTS, _peak, 1.05),
    _bar("exposed communication, 2 ranks, 1 Gbit/s", _SLOW, _exposed, 0.7),
    _bar("CUDA, one rank of 8: memory beyond state, activations", _BILLION_8, _memory, 0.6),
    _bar("CUDA, one rank of 8: device time in copies", _BILLION_8, _copy_kernels, 0.3),
    _bar("CUDA, one rank of 8: host time", _BILLION_8, _host, 0.4),
    _bar("CUDA, world 1: step over the unsharded step", _BILLION_1, _step_over_plain, 1.02),
)


def judge(result: Result) -> list[Verdict]:
    """Return a verdict on each bar; an empty list if the result has no measurement of any bar."""
    names = {run.name for run in result.runs}
    if not names & {bar.run for bar in BARS}:
        return []
    return [_judge(bar, result.runs) for bar in BARS]


def judge_measured(runs: Sequence[RunResult]) -> list[Verdict]:
    """Return a verdict on each bar that these runs measured, finished or not."""
    return [each for bar in BARS if (each := _judge(bar, runs)).found is not None]


def _judge(bar: Bar, runs: Sequence[RunResult]) -> Verdict:
    run = next((run for run in runs if run.name == bar.run), None)
    figures = _figures(run, bar, bar.mesh)
    if run is None or figures is None:
        return Verdict(bar=bar, found=None, torch_text="-")
    ours, theirs, plain = figures
    if bar.base:
        base = _figures(run, bar, bar.base)
        if base is None:
            return Verdict(bar=bar, found=None, torch_text="-")
        grown = [
            excess_growth(
                _host_excess(now, plain), _host_excess(was, base[2]), in_turns=run.in_turns
            )
            for now, was in zip((ours, theirs), base[:2], strict=True)
        ]
        return Verdict(bar=bar, found=grown[0], torch_text=as_ratio(grown[1]))
    against_plain = bar.ratio is _step_over_plain
    text = as_ratio(_step_over_plain(theirs, theirs, plain)) if against_plain else "1"
    return Verdict(bar=bar, found=bar.ratio(ours, theirs, plain), torch_text=text)


def _figures(run: RunResult | None, bar: Bar, mesh: str) -> tuple[Figures, Figures, Figures] | None:
    """Return the entries of fullshard, the rival and the unsharded step, if all are right."""
    point = None if run is None else run.point(bar.kind, mesh)
    if point is None:
        return None
    entries = [point.entry(name) for name in ("fullshard", bar.rival, "none")]
    found = [each.figures for each in entries if each is not None and _counts(each)]
    ours, theirs, plain = [*found, None, None, None][:3]
    if ours is None or theirs is None or plain is None:
        return None
    return ours, theirs, plain


def _counts(entry: Entry) -> bool:
    return entry.is_ranked and entry.figures is not None


def verdict_rows(verdicts: Sequence[Verdict]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Heads and rows of the table of bars."""
    heads = ("bar", "ratio to torch's, or as named", "torch", "limit", "verdict")
    rows = [
        [each.bar.what, as_ratio(each.found), each.torch_text, f"{each.bar.limit:g}", each.word]
        for each in verdicts
    ]
    return heads, rows


def verdict_lines(verdicts: Sequence[Verdict]) -> list[str]:
    """The table of bars as Markdown; nothing if there is none."""
    if not verdicts:
        return []
    heads, rows = verdict_rows(verdicts)
    return ["## Bars", "", *markdown_table(heads, rows)]

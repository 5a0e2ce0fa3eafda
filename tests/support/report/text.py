"""The report of a card as Markdown."""

from __future__ import annotations

from typing import Any

MIB = 2**20


def report_text(found: dict[str, Any]) -> str:
    """Return the report; its first line tells whether all held."""
    failed = found["failed"]
    lines = [
        f"**Did not hold: {', '.join(failed)}.**" if failed else "**All held.**",
        "",
        f"Ran on {found['device']}, {found['ranks']} rank(s), torch {found['torch']}, in "
        f"{found['seconds']} s.",
        "",
        "| part | result |",
        "|---|---|",
        f"| tests marked `gpu` | {_tests(found['tests'])} |",
        f"| the same core with `TORCH_CUDA_SANITIZER=1` | {_tests(found['sanitizer'])} |",
        "",
        "Losses are equal to torch's own `fully_shard` to the bit, or not, with deterministic "
        "algorithms. Peaks are of tensors, without what libraries keep beside them "
        f"({found['library_bytes'] / MIB:.2f} MiB).",
        "",
        "| model | losses as torch's | peak MiB | torch's | planned | ours / torch's |",
        "|---|---|---|---|---|---|",
    ]
    for name, of_model in found["models"].items():
        ours, theirs = (of_model[engine]["peak_bytes"] / MIB for engine in ("fullshard", "torch"))
        equal = "yes" if of_model["held"]["losses"] else "no"
        planned = of_model["planned_bytes"] / MIB
        lines.append(
            f"| {name} | {equal} | {ours:.2f} | {theirs:.2f} | {planned:.2f} | "
            f"{ours / theirs:.3f} |"
        )
    lines += [
        "",
        "| model | step ms | torch's | host µs per group | torch's | reserved MiB | torch's |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, of_model in found["models"].items():
        cells = [
            f"{of_model[engine][key] * scale:.{digits}f}"
            for key, scale, digits in (
                ("step_s", 1e3, 2),
                ("host_s_per_group", 1e6, 0),
                ("reserved_bytes", 1 / MIB, 2),
            )
            for engine in ("fullshard", "torch")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    failures = [*found["tests"].get("failed", ()), *found["sanitizer"].get("failed", ())]
    if failures:
        lines += ["", "Tests that failed:", "", *[f"- `{each}`" for each in failures]]
    lines += ["", "`trace.json` holds one step of the first model, for https://ui.perfetto.dev."]
    return "\n".join(lines) + "\n"


def failed_parts(found: dict[str, Any]) -> list[str]:
    failed = [part for part in ("tests", "sanitizer") if not found[part]["held"]]
    for name, of_model in found["models"].items():
        failed += [f"{part} of {name}" for part, held in of_model["held"].items() if not held]
    return failed


def _tests(found: dict[str, Any]) -> str:
    if not found["ran"]:
        return "not run: it watches CUDA only"
    counts = f"{found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} skipped"
    return counts if found["held"] else f"{counts}: **did not hold**"

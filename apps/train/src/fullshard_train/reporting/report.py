"""The report at the end of a run: a picture, a sample, the final numbers, and where they all are.

Owns their form. Refuses to compute: losses come from the trainer, baselines and sample from the
task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard_train.reporting.metrics import finite, read_metrics
from fullshard_train.reporting.pictures import draw_losses, draw_run
from fullshard_train.reporting.run_folder import RunFolder
from fullshard_train.task import Evaluation, Measure, Task

__all__ = ["Result", "summary", "write_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended: the subject of `task`, and the predictions of its model.

    `export` is the file of its full weights, if there is one. `memory` is the peak of each rank in
    bytes, as `memory_is_of` defines it; empty if no step was done.
    """

    task: Task
    held_out: Evaluation
    baselines: Mapping[str, float]
    sample: str
    checkpoint: Path
    export: Path | None
    steps: int
    memory: Sequence[int] = ()
    memory_is_of: str = ""


def write_report(folder: RunFolder, result: Result) -> str:
    """Write sample, numbers and picture into the run's folder; return the summary to print."""
    task = result.task
    folder.sample.write_text(result.sample, encoding="utf-8")
    numbers: dict[str, object] = {
        "held_out_loss": result.held_out.loss,
        "held_out_accuracy": result.held_out.accuracy,
        "judged_by": task.measure.value,
        "baselines": dict(result.baselines),
        "unit": task.unit,
        "steps": result.steps,
        "checkpoint": str(result.checkpoint),
    }
    if result.memory:
        numbers["peak_memory_bytes"] = list(result.memory)
        numbers["peak_memory_is_of"] = result.memory_is_of
    text = json.dumps(finite(numbers), indent=1, allow_nan=False)
    folder.result.write_text(text + "\n", encoding="utf-8")
    records = read_metrics(folder.metrics)
    draw_losses(folder.curve, records, task, result.baselines)
    draw_run(folder.course, records, task)
    return summary(folder, result)


def summary(folder: RunFolder, result: Result) -> str:
    """The lines that rank 0 prints at the end."""
    task, held_out = result.task, result.held_out
    by_loss = task.measure is Measure.LOSS
    unit = task.unit if by_loss else f"of the {task.item}"
    found = {
        task.measure.value: held_out.loss if by_loss else held_out.accuracy,
        **result.baselines,
    }
    width = max(map(len, found))
    numbers = [f"  {name:<{width}}  {value:.4f} {unit}" for name, value in found.items()]
    if not by_loss:
        numbers.append(f"  {Measure.LOSS.value:<{width}}  {held_out.loss:.4f} {task.unit}")
    files = {
        "checkpoint": result.checkpoint,
        "weights": result.export,
        "loss curve": folder.curve,
        "speed, memory": folder.course,
        "profile": folder.profile if folder.profile.exists() else None,
        "metrics": folder.metrics,
        "sample": folder.sample,
        "config": folder.config,
        "numbers": folder.result,
    }
    width = max(map(len, files))
    return "\n".join(
        [
            "",
            "A sample:",
            *(f"  | {line}" for line in result.sample.splitlines()),
            "",
            f"After {result.steps} steps, on held-out data:",
            *numbers,
            f"Baselines: {task.baselines_are}.",
            *_memory(result),
            "",
            "Files:",
            *(f"  {name:<{width}}  {path}" for name, path in files.items() if path is not None),
        ]
    )


def _memory(result: Result) -> list[str]:
    if not result.memory:
        return []
    least, most = min(result.memory), max(result.memory)
    rank = result.memory.index(most)
    others = f", least {least / 2**20:.1f} MiB" if len(result.memory) > 1 else ""
    return [f"Memory: {most / 2**20:.1f} MiB on rank {rank}{others} ({result.memory_is_of})."]

"""From arguments to a plan: which config, which folder, and what to continue.

Owns the rules of `--resume`, and what must stay as it was. Reads files, and writes none before
`claim`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from fullshard.elastic import ElasticOptions
from fullshard_train.checkpoints.checkpoint import Position, read_position, resolve
from fullshard_train.checkpoints.store import CheckpointStore
from fullshard_train.errors import TrainError
from fullshard_train.reporting.loggers import find_logger
from fullshard_train.reporting.metrics import keep_until, require_tensorboard
from fullshard_train.reporting.run_folder import RunFolder, fresh_path, newest_run
from fullshard_train.settings.config import (
    Config,
    default_table,
    differences,
    load_config,
    merge,
    override_table,
    read_table,
)
from fullshard_train.training.schedule import learning_rate
from fullshard_train.training.trainer import Trainer

__all__ = ["SHORT", "Plan", "claim", "make_plan", "require_room", "resume"]

SHORT = {
    "steps": "train.steps",
    "data": "data.source",
    "out": "run.directory",
    "export": "run.export",
    "mesh": "parallel.mesh",
    "device": "parallel.device",
    "seed": "train.seed",
}
"""Options of the command line that are short for a setting."""

# A resumed run must see equal rows in equal order, in a model of equal shape. Its
# name for the data may differ (the fingerprint must not), and where it runs and how long is free.
_KEPT = (
    "run.task",
    "model.",
    "digits.",
    "hf.weights",
    "hf.tokenizer",
    "hf.text_key",
    "hf.learn",
    "hf.block",
    "hf.packing",
    "hf.long_documents",
    "hf.method",
    "hf.lora",
    "hf.base_dtype",
    "data.block_bytes",
    "data.held_out_every",
    "train.batch",
    "train.seed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What rank 0 made of the arguments: the config, where to write, and what to continue.

    `again` means that the folder may hold this very run, stopped before its first checkpoint;
    `verify` that the sharded model is to be compared with the unsharded one first; `foresee` that
    its memory is to be planned first, and `budget` how many bytes it may be. `elastic` says with
    which replica groups the run is, if with any. `rate_rises` is a
    warning about a resumed run's learning rate, or "". `check` means that settings are only
    checked; `origins` then contains the source of each setting.
    """

    config: Config
    folder: RunFolder
    checkpoint: Path | None
    position: Position | None
    again: bool
    verify: bool
    foresee: bool
    budget: int | None
    elastic: ElasticOptions | None = None
    rate_rises: str = ""
    check: bool = False
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def export(self) -> Path | None:
        """Where the full weights go at the end, if anywhere."""
        wanted = self.config.run.export
        if wanted == "none":
            return None
        if wanted:
            return Path(wanted)
        return self.folder.model if self.config.run.task == "hf" else self.folder.weights


def make_plan(options: argparse.Namespace) -> Plan:
    """The plan of the command line; writes nothing.

    Raises:
        TrainError: they make no sense, or do not fit what is to be continued.
    """
    overrides = options.set
    if _begins_anew(options, overrides):
        config = load_config(options.config, overrides)
        folder = RunFolder(root=Path(config.run.directory or fresh_path()))
        plan = Plan(
            config=_named(config, folder),
            folder=folder,
            checkpoint=None,
            position=None,
            again=options.resume == "auto",
            verify=options.verify,
            foresee=options.plan or options.budget is not None,
            budget=_budget(options),
        )
    else:
        plan = _plan_resume(options, overrides)
    plan = replace(plan, elastic=_elastic(options))
    if plan.elastic is not None and plan.config.checkpoint.memory:
        raise TrainError(
            "checkpoint.memory and --elastic: groups that are left have the state already; set"
            " checkpoint.memory=0"
        )
    if plan.config.run.metrics == "tensorboard":
        require_tensorboard()
    if plan.config.run.logger:
        find_logger(plan.config.run.logger)
    return plan


def _elastic(options: argparse.Namespace) -> ElasticOptions | None:
    """The replica group that `--elastic` and `--group` mean, if they are given.

    Raises:
        TrainError: one of the two is missing or wrong, or torchft is not installed.
    """
    if options.elastic is None and options.group is None:
        return None
    if options.elastic is None or options.group is None:
        raise TrainError(
            f"--elastic {options.elastic}, --group {options.group}: give both, the address of the"
            " lighthouse and the name of this replica group"
        )
    if find_spec("torchft") is None:
        raise TrainError(
            "--elastic: torchft is not installed; pip install 'fullshard-train[elastic]'"
        )
    patience = {} if options.timeout is None else {"timeout": options.timeout}
    try:
        return ElasticOptions(
            lighthouse=options.elastic, group=options.group, average=False, **patience
        )
    except ValueError as error:
        raise TrainError(f"--elastic, --group: {error}") from None


def _budget(options: argparse.Namespace) -> int | None:
    """The bytes that `--budget` means, if it is given.

    Raises:
        TrainError: it is no size.
    """
    if options.budget is None:
        return None
    # Imported here: only this needs it.
    from fullshard.preflight import parse_bytes

    try:
        return parse_bytes(options.budget)
    except ValueError as error:
        raise TrainError(f"--budget {error}") from None


def _begins_anew(options: argparse.Namespace, overrides: list[str]) -> bool:
    if options.resume != "auto":
        return options.resume is None
    asked = _asked_folder(options, overrides)
    if asked is None:
        raise TrainError(
            "resume auto: give --out, the run folder whose newest checkpoint is to be continued"
        )
    return CheckpointStore(RunFolder(root=asked).checkpoints).latest() is None


def _plan_resume(options: argparse.Namespace, overrides: list[str]) -> Plan:
    asked = _asked_folder(options, overrides)
    if options.resume in ("latest", "auto"):
        checkpoint = resolve(asked or newest_run())
    else:
        checkpoint = resolve(Path(options.resume))
    position = read_position(checkpoint)
    # A setting that is newer than the checkpoint has its default.
    base = merge(default_table(), position.config)
    old = Config.from_table(base)
    config = load_config(options.config, overrides, base=base)
    changed = [name for name in differences(config, old) if name.startswith(_KEPT)]
    if changed:
        raise TrainError(
            f"resume {checkpoint}: {', '.join(changed)} must stay as in the checkpoint;"
            " start a new run to change it"
        )
    if position.step > config.train.steps:
        raise TrainError(
            f"resume {checkpoint}: it has {position.step} steps, more than train.steps ="
            f" {config.train.steps}; give more --steps"
        )
    folder = RunFolder(root=_folder_to_resume(asked, checkpoint))
    return Plan(
        config=_named(config, folder),
        folder=folder,
        checkpoint=checkpoint,
        position=position,
        again=True,
        verify=options.verify,
        foresee=options.plan or options.budget is not None,
        budget=_budget(options),
        rate_rises=_rate_rises(old, config, position.step),
    )


def _rate_rises(old: Config, new: Config, step: int) -> str:
    """A warning if update `step` (from 0) has a higher rate than in the run of the checkpoint.

    A rate that is up to 1 % higher is not: users copy rates with a few digits.
    """
    before = learning_rate(old.optim, step=step, steps=old.train.steps)
    after = learning_rate(new.optim, step=step, steps=new.train.steps)
    if after <= before * 1.01:
        return ""
    return (
        f"the learning rate of step {step + 1} rises from {before:.3g} to {after:.3g}: the schedule"
        f" is now of {new.train.steps} steps, before of {old.train.steps}; to keep it low, use"
        f" --set optim.learning_rate={before:.3g} --set optim.final_fraction=1"
    )


def _asked_folder(options: argparse.Namespace, overrides: list[str]) -> Path | None:
    """The run folder that the command line names, itself or through its config file."""
    settings = merge(*map(read_table, options.config), override_table(overrides))
    directory = settings.get("run", {}).get("directory", "")
    return Path(str(directory)) if directory else None


def _folder_to_resume(asked: Path | None, checkpoint: Path) -> Path:
    """The run folder to write to: as asked, or the checkpoint's own if it is that run's newest."""
    own = checkpoint.parent.parent
    if asked is not None and asked.resolve() != own.resolve():
        return asked
    newest = CheckpointStore(checkpoint.parent).latest()
    if newest is None or newest.resolve() != checkpoint.resolve():
        raise TrainError(
            f"resume {checkpoint}: the run has a newer checkpoint, {newest}, and nothing is"
            " overwritten; resume that one, or give --out for a new run folder"
        )
    return own


def _named(config: Config, folder: RunFolder) -> Config:
    return replace(config, run=replace(config.run, directory=str(folder.root)))


def require_room(plan: Plan) -> None:
    """Pass if `claim` would find the folder ready; write nothing.

    Raises:
        TrainError: the folder holds something that is not to be continued.
    """
    folder = plan.folder
    if plan.checkpoint is None:
        own = plan.again and folder.holds_a_beginning()
    else:
        own = plan.checkpoint.parent.parent.resolve() == folder.root.resolve()
    if not own:
        folder.require_free()


def resume(plan: Plan, trainer: Trainer) -> bool:
    """Continue what the plan says; return whether the memory of hosts had a newer step than files.

    Raises:
        TrainError: on every rank, if that is damaged or does not fit.
    """
    step = None
    if plan.config.checkpoint.memory:
        # Imported here: only this needs it.
        from fullshard_train.training.memory import HostMemory

        memory = HostMemory(trainer, plan.folder.root)
        step = memory.restore() if plan.again or plan.checkpoint is not None else None
    if plan.checkpoint is None or plan.position is None:
        return step is not None
    if step is None or step <= plan.position.step:
        trainer.resume(plan.checkpoint, plan.position)
        return False
    return True


def claim(plan: Plan, step: int) -> None:
    """Make the run folder ready for what follows `step`; no other code changes a disk before that.

    Raises:
        TrainError: the folder holds something that is not to be continued.
    """
    folder = plan.folder
    if plan.checkpoint is None or plan.position is None:
        if plan.again and folder.holds_a_beginning():
            folder.describe(plan.config)
            keep_until(folder.metrics, folder.metrics, step)
        else:
            folder.create(plan.config)
        return
    own = RunFolder(root=plan.checkpoint.parent.parent)
    if own.root.resolve() == folder.root.resolve():
        folder.describe(plan.config)
    else:
        folder.create(plan.config)
    keep_until(own.metrics, folder.metrics, step)

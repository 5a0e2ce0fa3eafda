"""Writes a script or a configuration from the answers, out of the templates of this folder."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from string import Template

from fullshard.cli.starting.answers import EXAMPLE, AnswerError, Answers

__all__ = ["next_steps", "text_of", "write"]

_TASKS = ("text", "digits")


def write(answers: Answers, target: Path | None) -> Path:
    """Write the file, and return its path.

    Raises:
        AnswerError: if the file exists, or cannot be written.
    """
    default = "train.py" if answers.kind == "script" else "train.toml"
    path = Path(default) if target is None else target
    if path.exists():
        raise AnswerError(f"{path} exists; name another file: fullshard init FILE")
    if not path.parent.is_dir():
        raise AnswerError(f"{path}: there is no folder {path.parent}")
    try:
        path.write_text(text_of(answers))
    except OSError as error:
        raise AnswerError(f"{path} cannot be written: {error.strerror}") from error
    return path


def text_of(answers: Answers) -> str:
    """Return the text of the file."""
    tight, narrow = answers.memory == "tight", answers.precision == "bfloat16"
    if answers.kind == "config":
        return _template("config").substitute(_config(answers, tight))
    own = answers.model != EXAMPLE
    module, _, function = answers.model.partition(":")
    policy = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
    values = {
        "model": _template("own_model").substitute(module=module, function=function)
        if own
        else _template("example_model").substitute(),
        "policy": policy if narrow else "MixedPrecisionPolicy()",
        "precision": answers.precision,
        "steps": str(answers.steps),
        "checkpointing_import": "from torch.utils.checkpoint import checkpoint\n" if tight else "",
        "checkpointing": _template("checkpointing").substitute() if tight else "",
    }
    return _template("script").substitute(values)


def _config(answers: Answers, tight: bool) -> dict[str, str]:
    model = "text" if answers.model == EXAMPLE else answers.model
    return {
        "task": model if model in _TASKS else "hf",
        "hf": "" if model in _TASKS else f'\n[hf]\nmodel = "{model}"\n',
        "steps": str(answers.steps),
        "dtype": answers.precision,
        "checkpointing": "true" if tight else "false",
    }


def _template(name: str) -> Template:
    return Template((files(__package__) / "templates" / f"{name}.txt").read_text())


def next_steps(answers: Answers, path: Path) -> str:
    """Return the commands that come next, one per line."""
    if answers.kind == "config":
        return (
            f"  fullshard train --check-config --config {path}\n"
            f"  fullshard train launch --standalone --nproc-per-node 2 -- --config {path}"
        )
    return (
        f"  fullshard plan {path} --mesh 2 64\n"
        f"  fullshard verify {path}\n"
        f"  fullshard run --record runs/first {path}\n"
        "  fullshard compare runs/first"
    )

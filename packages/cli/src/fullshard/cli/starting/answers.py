"""The five questions, and the check of each answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["EXAMPLE", "QUESTIONS", "AnswerError", "Answers", "Question", "ask"]

EXAMPLE = "example"
"""The answer that takes a small model of the script's own."""


class AnswerError(ValueError):
    """A wrong answer; the message has the allowed answers."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question.

    Attributes:
        name: of the answer.
        text: the question.
        default: the answer of ``--yes``.
        allowed: a regular expression for the whole answer.
        told: the allowed answers in words.
    """

    name: str
    text: str
    default: str
    allowed: str
    told: str

    def check(self, answer: object) -> str:
        """Return the answer as text.

        Raises:
            AnswerError: if it is not allowed.
        """
        text = str(answer).strip()
        if not re.fullmatch(self.allowed, text):
            raise AnswerError(f"--{self.name} {text!r}: {self.told}")
        return text


QUESTIONS = (
    Question(
        name="kind",
        text="A training script of your own (script), or a file for fullshard train (config)?",
        default="script",
        allowed="script|config",
        told="use script or config",
    ),
    Question(
        name="model",
        text="Your model: module:function that returns an nn.Module, or example for a small one; "
        "of a configuration text, digits or a folder of transformers",
        default=EXAMPLE,
        allowed=r"[^'\"\\\n]+",
        told="use module:function, example, or for a configuration text, digits or a folder",
    ),
    Question(
        name="precision",
        text="Compute in float32 or bfloat16 (parameters stay float32)?",
        default="float32",
        allowed="float32|bfloat16",
        told="use float32 or bfloat16",
    ),
    Question(
        name="memory",
        text="Is there plenty of memory for activations, or is it tight (they are recomputed)?",
        default="plenty",
        allowed="plenty|tight",
        told="use plenty or tight",
    ),
    Question(
        name="steps",
        text="How many steps of the optimizer?",
        default="100",
        allowed="[1-9][0-9]*",
        told="use a number from 1 on",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The answers, one for each question."""

    kind: str
    model: str
    precision: str
    memory: str
    steps: int

    def __post_init__(self) -> None:
        """Check the model.

        Raises:
            AnswerError: if a script's model is no ``module:function``.
        """
        if self.kind == "script" and self.model != EXAMPLE:
            module, _, function = self.model.partition(":")
            if not (
                all(part.isidentifier() for part in module.split(".")) and function.isidentifier()
            ):
                raise AnswerError(f"--model {self.model!r}: use module:function, or {EXAMPLE}")


def ask(given: Mapping[str, object], answer: Callable[[str, str], str]) -> Answers:
    """Return all answers: the given ones, and for other questions what ``answer`` returns.

    Args:
        given: by the name of a question; None: not given.
        answer: returns an answer, from the question and its default.

    Raises:
        AnswerError: if an answer is not allowed.
    """
    found = {}
    for each in QUESTIONS:
        value = given.get(each.name)
        found[each.name] = each.check(answer(each.text, each.default) if value is None else value)
    return Answers(**{**found, "steps": int(found["steps"])})  # type: ignore[arg-type]  # the rest are texts

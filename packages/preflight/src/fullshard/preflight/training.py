"""The step of a user's program: a loss and its optimizer, or a function for the whole step.

``plan`` and ``verify`` run the same ``Training``. The module checks what the user's functions
return.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Loss", "MakeOptimizer", "MakeOptimizers", "Step", "Training", "adamw"]

Loss = Callable[[Any, Any], torch.Tensor]
"""Of a model and a batch, a scalar."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

MakeOptimizers = Callable[[Any], Sequence[torch.optim.Optimizer]]
"""Of a model, its optimizers."""

Step = Callable[[Any, Sequence[torch.optim.Optimizer], Any], Iterator[torch.Tensor]]
"""Of a model, its optimizers and a batch; yields each loss where a program calls backward on it."""


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that is used if none is given."""
    return torch.optim.AdamW(params, lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A step: ``loss`` and ``optimizer``, or ``step`` and ``optimizers``.

    Attributes:
        loss: return the loss of model and batch, of which the step needs one backward.
        optimizer: return the optimizer of parameters.
        step: yield each loss of a step, and call the optimizers.
        optimizers: return the optimizers of a model, for ``step``.
    """

    loss: Loss | None = None
    optimizer: MakeOptimizer = adamw
    step: Step | None = None
    optimizers: MakeOptimizers | None = None

    def __post_init__(self) -> None:
        """Check that the functions are those of one kind of step."""
        names = ("loss", "optimizer") if self.step is None else ("step", "optimizers")
        for name in names:
            given = getattr(self, name)
            if not callable(given):
                hint = ", or step= and optimizers=" if name == "loss" else ""
                raise TypeError(f"{name} is a {type(given).__name__}; pass a function{hint}")
        if self.step is None and self.optimizers is not None:
            raise TypeError("optimizers= is given without step=; pass optimizer= for a loss")
        if self.step is not None and (self.loss is not None or self.optimizer is not adamw):
            wrong = "loss" if self.loss is not None else "optimizer"
            raise TypeError(
                f"{wrong} and step= are both given; pass loss and optimizer=, or step= and "
                "optimizers="
            )

    def optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the parameters of ``model``.

        Raises:
            TypeError: if they are no optimizers.
            ValueError: if the step of one needs a closure.
        """
        if self.optimizers is None:
            return [self.optimizer_of(model.parameters())]
        made = self.optimizers(model)
        if not isinstance(made, Sequence):
            raise TypeError(f"optimizers returned a {type(made).__name__}; return a list or tuple")
        return [_checked(each, "optimizers") for each in made]

    def optimizer_of(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of ``params``; raises as ``optimizers_of``."""
        return _checked(self.optimizer(params), "optimizer")

    def losses_of(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Any
    ) -> Iterator[torch.Tensor]:
        """Yield each loss of a step; the caller runs its backward before the next.

        Raises:
            TypeError: if a loss is no tensor, or ``step`` is no generator function.
            ValueError: if a loss is no scalar; if ``step`` yields none, or yields inside
                ``no_grad`` or ``autocast``.
        """
        if self.step is None:
            assert self.loss is not None, "it was checked"
            yield _scalar(self.loss(model, batch), "loss returned")
            return
        made = self.step(model, optimizers, batch)
        if not isinstance(made, Iterator):
            raise TypeError(
                f"step returned a {type(made).__name__}; write `yield loss` in it in place of "
                "loss.backward(), so that it is a generator function"
            )
        modes, count = _modes(), 0
        for count, loss in enumerate(made, 1):
            if _modes() != modes:
                raise ValueError(
                    f"step yielded loss {count} inside a `with` block of no_grad() or autocast(); "
                    "end the block before `yield`"
                )
            yield _scalar(loss, "step yielded")
        if count == 0:
            raise ValueError("step yielded no loss; write `yield loss` for each backward")


def _modes() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), *autocast


def _scalar(loss: object, what: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"{what} a {type(loss).__name__}; it must be a scalar tensor")
    if loss.numel() != 1:
        raise ValueError(
            f"{what} a tensor of shape {tuple(loss.shape)}; it must be a scalar: the mean, or the "
            "sum"
        )
    return loss.reshape(())


def _checked(optimizer: object, name: str) -> torch.optim.Optimizer:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{name} returned a {kind}; return a torch.optim.Optimizer")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} returned a {kind}, whose step() needs a closure and calls it as often as the "
            "loss asks for; pass an optimizer whose step() needs none, such as torch.optim.AdamW"
        )
    return optimizer

"""Records what each layer was given and gave back, forward and backward, and runs it again.

A call is kept on the CPU, with the state of the random numbers at its beginning.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fullshard.preflight.verification.agree import Alone
from fullshard.preflight.verification.comparing.compare import rms
from fullshard.preflight.verification.draws import Draws, State
from fullshard.preflight.verification.trace import Trace, traced
from fullshard.sharding import map_tensors
from fullshard.sharding.spi import tensors_in

__all__ = ["Call", "Recorder", "Replay", "replay"]


@dataclass(kw_only=True)
class Call:
    """A call of a layer; tensors are numbered in the order of ``map_tensors``.

    Attributes:
        given: positional and keyword arguments, as ``torch.save`` writes them.
        wanted: which tensors among them took a gradient.
        draws: the random numbers at the beginning.
        recorded: whether autograd recorded it.
        outputs: the tensors that it returned.
        attached: which of these require a gradient.
        output_grads: what came back for them, by number.
        input_grads: what it handed back, by number.
    """

    given: bytes
    wanted: list[bool]
    draws: State
    recorded: bool
    outputs: list[torch.Tensor] = field(default_factory=list)
    attached: list[bool] = field(default_factory=list)
    output_grads: dict[int, torch.Tensor] = field(default_factory=dict)
    input_grads: dict[int, torch.Tensor] = field(default_factory=dict)


class Recorder:
    """Records the calls of layers inside a ``with`` block.

    Attributes:
        calls: by layer, in order.
        outside: parameters that were used while no layer ran, by the name of their module.
        in_backward: set by who runs it, between forward and backward. A layer that is run again
            there by checkpointing has been recorded.
    """

    def __init__(self, layers: dict[str, nn.Module], draws: Draws) -> None:
        self._layers = layers
        self._draws = draws
        self._open: list[tuple[str, Call]] = []
        self.calls: dict[str, list[Call]] = {name: [] for name in layers}
        self.outside: set[tuple[str, str]] = set()
        self.in_backward = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records; hooks come last, so that they see what the layer itself sees."""
        with ExitStack() as stack:
            for name, layer in self._layers.items():
                before, after = partial(self._before, name), partial(self._after, name)
                stack.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
                stack.enter_context(layer.register_forward_hook(after))
            yield

    def watching(self) -> TorchFunctionMode:
        """Return a context that notes parameters used outside the layers; for the forward."""
        return _ParameterMode(self._note_outside)

    def _before(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.in_backward and any(call.recorded for call in self.calls[name]):
            return None
        _require_plain(name, (args, kwargs), "is given")
        call = Call(
            given=_saved(name, (args, kwargs)),
            wanted=[],
            draws=self._draws.state(),
            recorded=torch.is_grad_enabled(),
        )
        self._open.append((name, call))

        def pass_on(number: int, tensor: torch.Tensor) -> torch.Tensor:
            wanted = call.recorded and tensor.requires_grad
            call.wanted.append(wanted)
            if not wanted:
                return tensor
            # A view of its own: its gradient is what this layer alone hands back.
            passed = tensor.view_as(tensor)
            passed.register_hook(partial(_keep, call.input_grads, number))
            return passed

        passed: tuple[tuple[Any, ...], dict[str, Any]] = _numbered(pass_on, (args, kwargs))
        return passed

    def _after(self, name: str, layer: nn.Module, args: Any, output: Any) -> None:
        if not self._open or self._open[-1][0] != name:
            return
        _, call = self._open.pop()
        _require_plain(name, output, "returns")
        for number, tensor in enumerate(tensors_in(output)):
            call.outputs.append(tensor.detach().cpu().clone())
            call.attached.append(tensor.requires_grad)
            if tensor.requires_grad:
                tensor.register_hook(partial(_keep, call.output_grads, number))
        self.calls[name].append(call)

    def _note_outside(self, param: nn.Parameter) -> None:
        if self._open:
            return
        for path, layer in self._layers.items():
            for name, each in layer.named_parameters():
                if each is param:
                    self.outside.add((path, name))


class _ParameterMode(TorchFunctionMode):
    """A mode that reports each parameter that a torch function takes."""

    def __init__(self, tell: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.grad_fn is not None:
            for each in args:
                for inner in each if isinstance(each, (tuple, list)) else (each,):
                    if isinstance(inner, nn.Parameter):
                        self._tell(inner)
        return result


@dataclass(kw_only=True)
class Replay:
    """The results of a layer's second run; as in `Call`.

    ``size`` is the mean size of an element of its inputs, and ``trace`` what its modules did.
    """

    outputs: list[torch.Tensor]
    attached: list[bool]
    size: float
    input_grads: dict[int, torch.Tensor]
    trace: Trace


def replay(name: str, layer: nn.Module, call: Call, device: torch.device) -> Replay:
    """Run a call of the layer called ``name`` again, forward and backward.

    Gradients of parameters add up in ``layer``.
    """
    given = torch.load(io.BytesIO(call.given), map_location=device, weights_only=False)
    floating = [each.dtype for each in layer.parameters() if each.is_floating_point()]
    leaves: dict[int, torch.Tensor] = {}

    def enter(number: int, tensor: torch.Tensor) -> torch.Tensor:
        if floating and tensor.is_floating_point() and tensor.dtype != torch.float64:
            tensor = tensor.to(floating[0])
        if not call.wanted[number]:
            return tensor
        leaves[number] = tensor.requires_grad_()
        return tensor.clone()  # a layer may write into its inputs, and not into a leaf

    args, kwargs = _numbered(enter, given)
    size = rms(each.detach() for each in tensors_in(given))
    with torch.set_grad_enabled(call.recorded), traced(layer, name) as trace, Alone():
        outputs = tensors_in(layer(*args, **kwargs))
    pairs = [
        (outputs[number], grad.to(outputs[number]))
        for number, grad in call.output_grads.items()
        if number < len(outputs) and outputs[number].requires_grad
    ]
    if pairs:
        torch.autograd.backward([each for each, _ in pairs], [grad for _, grad in pairs])
    grads = {number: leaf.grad for number, leaf in leaves.items() if leaf.grad is not None}
    return Replay(
        outputs=[each.detach() for each in outputs],
        attached=[each.requires_grad for each in outputs],
        size=size,
        input_grads=grads,
        trace=trace,
    )


def _keep(kept: dict[int, torch.Tensor], number: int, grad: torch.Tensor) -> None:
    came = grad.detach().cpu()
    kept[number] = kept[number] + came if number in kept else came.clone()


def _numbered(fn: Callable[[int, torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``map_tensors`` with the number of each tensor; one that comes twice is passed once."""
    done: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = fn(len(done), tensor)
        return done[id(tensor)]

    return map_tensors(once, value)


def _require_plain(name: str, value: Any, does: str) -> None:
    """Return if no tensor is distributed: alone on one rank a layer can have no such."""
    if any(isinstance(each, DTensor) for each in tensors_in(value)):
        raise TypeError(
            f"layer {name} {does} a DTensor, as tensor parallel modules do; pass layers=, a "
            "function that returns modules between which plain tensors pass, or compare the whole "
            "model with layers=False"
        )


def _saved(name: str, given: Any) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(_numbered(lambda number, tensor: tensor.detach().clone(), given), file)
    except Exception as error:
        kinds = [type(each).__name__ for each in (*given[0], *given[1].values())]
        raise TypeError(
            f"layer {name} is given {kinds}, which cannot be pickled ({error}); pass layers=, a "
            "function that returns modules that take tensors and plain values"
        ) from error
    return file.getvalue()

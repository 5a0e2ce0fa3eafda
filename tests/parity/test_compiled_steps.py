"""``torch.compile`` of functions that hold forward and backward: ways to shard, and programs.

Right is the unsharded model, trained on the whole batch and not compiled. Where a way rounds, it is
the same way, not compiled, to the last bit. The compiler sees no frame of the engine: whatever
autograd and hooks call there, and what a user calls, runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import convert_frame
from torch.utils.checkpoint import checkpoint

import fullshard.comm
from fullshard.insight import set_gather_on_read
from fullshard.optim import clip_grad_norm_
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard, unsharded
from fullshard.wire import Quantised, WirePolicy
from support.apart import private_memory
from support.modules import Residual, in_turn
from support.parity.compare import EXACT, assert_equal, parameters_of, rounding
from support.parity.engines import TORCH, tell
from support.products import few
from support.ranks import cpu_mesh, distributed

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

_FOLDER = f"{fullshard.comm.__path__[0].rpartition('/packages/')[0]}/packages/"

# -- programs: forward and backward of a model on its rows ----------------------------------------


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).double().square().mean()
    return loss


def _plain(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    _loss(model, x).backward()


def _step_too(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    _loss(model, x).backward()
    optimizer.step()


def _to_inputs(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    _loss(model, x).backward()
    assert x.grad is not None


def _two_forwards(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    one, other = x.chunk(2)
    (_loss(model, one) + _loss(model, other)).backward()


def _accumulated(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    for last, part in enumerate(x.chunk(2)):
        tell(model, "set_requires_gradient_sync", bool(last))
        tell(model, "set_is_last_backward", bool(last))
        _loss(model, part).backward()


def _clipped(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    _loss(model, x).backward()
    if hasattr(model, "unshard"):
        clip_grad_norm_(model, 0.01)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def _by_hand(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    tell(model, "unshard")
    _loss(model, x).backward()
    tell(model, "reshard")


def _loaded(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    _loss(model, x).backward()
    model.load_state_dict(model.state_dict())


def _with_closure(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model, x)
        loss.backward()
        return loss

    optimizer.step(closure)


def _checkpointed(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    model.head(x).double().square().mean().backward()


def _gathered_on_read(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    if hasattr(model, "unshard"):
        set_gather_on_read(model, True)
    _loss(model, x).backward()


def _changed_in_a_block(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    sharded = hasattr(model, "unshard")
    with unsharded(model, writeback=True) if sharded else nullcontext(), torch.no_grad():
        model.head.bias.add_(0.5)
    _loss(model, x).backward()


PROGRAMS = {
    "plain": _plain,
    "step": _step_too,
    "inputs": _to_inputs,
    "two forwards": _two_forwards,
    "accumulation": _accumulated,
    "clipping": _clipped,
    "by hand": _by_hand,
    "state dict": _loaded,
    "closure": _with_closure,
    "checkpointing": _checkpointed,
    "gathered on read": _gathered_on_read,
    "unsharded block": _changed_in_a_block,
}

# -- ways to shard --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is sharded.

    Attributes:
        options: of ``fully_shard``.
        rounds: what travels is rounded, so the unsharded model is no reference.
        inside: makes a context, whose mesh is used if it has one.
    """

    options: dict[str, Any] = field(default_factory=dict)
    rounds: bool = False
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext


_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS = {
    "shared memory": Way(),
    "kept": Way(options={"reshard_after_forward": False}),
    "process group": Way(inside=private_memory),
    "mixed precision": Way(options={"mp_policy": _bf16}, rounds=True),
    "wire": Way(
        options={
            "wire_policy": WirePolicy(gathers=Quantised(torch.int8), reductions=torch.bfloat16)
        },
        rounds=True,
    ),
}


def _build() -> Any:
    """Blocks and a head."""
    torch.manual_seed(41)
    blocks = nn.Sequential(*(Residual(6, 9) for _ in range(2)))
    return in_turn(blocks=blocks, head=nn.Linear(6, 3)).double()


def _train(
    program: Callable[..., None],
    backend: str | None,
    rows: slice,
    shard: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """A model after three steps; ``backend``: None: they are not compiled."""
    torch.compiler.reset()
    model = _build()
    if shard is not None:
        for part in (*model.blocks, model.head, model):
            shard(part, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run(x: torch.Tensor) -> None:
        program(model, optimizer, x)

    running = run if backend is None else torch.compile(run, backend=backend)
    for step in range(3):
        generator = torch.Generator().manual_seed(50 + step)
        running(torch.randn(8, 6, generator=generator, dtype=torch.float64)[rows])
        if program not in (_step_too, _with_closure):
            optimizer.step()
            optimizer.zero_grad()
    return model


def _my_rows(size: int) -> slice:
    """Every so many rows of a batch, so that halves of a rank's are parts of the whole's halves."""
    return slice(dist.get_rank() % size, None, size)


@contextmanager
def _nothing_seen() -> Iterator[None]:
    """A context after which the compiler has not seen a frame of the packages."""
    seen: list[str] = []
    add = convert_frame.input_codes.add

    def note(code: Any) -> None:
        if code.co_filename.startswith(_FOLDER):
            seen.append(f"{code.co_filename}: {code.co_qualname}")
        add(code)

    with patch.object(convert_frame.input_codes, "add", note):
        yield
    assert not seen, "\n".join(dict.fromkeys(seen))


def _assert_right(program: str, way: str, backend: str, size: int) -> None:
    how, run = WAYS[way], PROGRAMS[program]
    with how.inside() as mesh:
        options = {"mesh": mesh or cpu_mesh(), **how.options}
        with _nothing_seen():
            found = _train(run, backend, _my_rows(size), fully_shard, **options)
        if how.rounds:
            wanted, allowed = _train(run, None, _my_rows(size), fully_shard, **options), EXACT
        else:
            wanted, allowed = _train(run, None, slice(None)), rounding(size, steps=4)
        assert_equal(parameters_of(found), parameters_of(wanted), allowed, "parameters")


@pytest.mark.cross
@pytest.mark.parametrize("backend", few(["eager", "aot_eager"], "eager"))
@pytest.mark.parametrize("way", few(WAYS, "shared memory", "process group", "wire"))
@pytest.mark.parametrize(
    "program",
    few(
        PROGRAMS,
        "plain",
        "step",
        "accumulation",
        "clipping",
        "checkpointing",
        "gathered on read",
        "unsharded block",
    ),
)
@distributed(2)
def test_a_compiled_forward_and_backward_trains_as_the_unsharded_model(
    program: str, way: str, backend: str
) -> None:
    _assert_right(program, way, backend, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("program", ["plain", "step"])
@distributed(1)
def test_so_it_does_in_a_world_of_one(program: str) -> None:
    _assert_right(program, "shared memory", "aot_eager", 1)


@pytest.mark.parametrize("backend", few(["eager", "aot_eager"], "eager"))
@distributed(4)
def test_so_it_does_on_a_hybrid_mesh(backend: str) -> None:
    mesh = cpu_mesh((2, 2), ("copies", "shards"))
    with _nothing_seen():
        found = _train(_plain, backend, _my_rows(4), fully_shard, mesh=mesh)
    wanted = _train(_plain, None, slice(None))
    assert_equal(parameters_of(found), parameters_of(wanted), rounding(4, steps=4), "parameters")


@pytest.mark.matrix
@distributed(2, timeout=180)
def test_with_inductor_it_trains_as_torchs_own_does() -> None:
    ours, theirs = (
        _train(_plain, "inductor", _my_rows(2), shard, mesh=cpu_mesh())
        for shard in (fully_shard, TORCH.fully_shard)
    )
    assert_equal(parameters_of(ours), parameters_of(theirs), rounding(2, steps=4), "parameters")

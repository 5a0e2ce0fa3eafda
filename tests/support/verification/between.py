"""Faults of what layers are given, of their settings, hooks and graphs, and of buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from fullshard.preflight import Phase
from fullshard.sharding import fully_shard
from support.modules import Assembled
from support.verification.fault import Fault, build, is_sharded, loss, shard

ACCUMULATED = "gradients scaled by one factor"
APART = "a buffer that ranks update apart"
BUILT = "values that sharding changes"
DETACHED = "an output that is detached"
FED = "inputs that are not the batch's"
GIVEN = "a module that is given other inputs"
HOOK = "a hook of the sharded model alone"
RECOMPUTED = "a module that computes something else in backward"
SETTING = "a setting of a module that is not the same"
LOSS = "a loss function that is not the same"
OPTIMIZER = "optimizer settings that are not the same"
BETWEEN = "it lies between the layers"
WORDS, LENGTH, WIDTH = 20, 5, 8


# -- a small model of tokens ----------------------------------------------------------------------


class _Block(nn.Module):
    """Attention to what came before, and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(dropout)
        self.is_causal = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: ``[rows, length, width]``, in and out."""
        query, key, value = self.heads(self.norm(x)).chunk(3, dim=-1)
        out = scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return x + self.drop(out)


class _Words(nn.Module):
    """Embeds tokens and positions; ``first`` is the first position."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList([_Block(dropout), _Block(dropout)])
        self.head = nn.Linear(WIDTH, WORDS)
        self.first = [0]
        self.detaches = [False]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shape: ``[rows, length]`` to ``[rows, length, words]``."""
        places = self.first[0] + torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x.detach() if self.detaches[0] else x)
        out: torch.Tensor = self.head(x)
        return out


def _shard_words(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(WORDS, (3, LENGTH + 1), generator=generator)


def _next_word(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def _of_words(
    name: str, phase: Phase, at: str, cause: str, shard: Any = _shard_words, **more: Any
) -> Fault:
    program = {"build_model": _Words, "batch": _tokens, "loss": _next_word, "shard": shard}
    return Fault(name, phase, at, cause, **{**program, **more})


def _after(change: Callable[[Any], object]) -> Callable[[Any], object]:
    """Shards, then changes something of the sharded model."""

    def shard_it(model: Any) -> Any:
        _shard_words(model)
        change(model)
        return model

    return shard_it


def _rolled(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    if is_sharded(model) and dist.get_rank() == 1:
        return nn.functional.cross_entropy(
            model(tokens[:, :-1].roll(1, 1)).flatten(0, 1), tokens[:, 1:].flatten()
        )
    return _next_word(model, tokens)


def _offset(model: Any) -> None:
    model.first[0] = dist.get_rank()


def _not_causal(model: Any) -> None:
    model.blocks[1].is_causal = False


def _detaching(model: Any) -> None:
    model.detaches[0] = True


def _detaching_hook(model: Any) -> None:
    model.words.register_forward_hook(lambda module, inputs, output: output.detach())


def _other_eps(model: Any) -> None:
    model.blocks[0].norm.eps = 1e-2


def _forgetting(model: Any) -> None:
    """Runs blocks again in backward, with other random numbers."""
    for block in model.blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )


def _halving(module: nn.Module, inputs: Any, grads: Any) -> Any:
    return tuple(None if each is None else each / 2 for each in inputs)


def _hooked(model: Any) -> None:
    model.blocks[1].register_full_backward_hook(_halving)


def _forward_hooked(model: Any) -> None:
    model.blocks[1].register_forward_hook(lambda module, inputs, output: 1.5 * output)


# -- buffers --------------------------------------------------------------------------------------


def _centred(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Subtracts a mean of earlier batches, and moves it."""
    out = x - module.centre
    with torch.no_grad():
        module.centre.lerp_(x.mean(0), 0.1)
    return out


def _with_centre() -> Any:
    return build(lambda: Assembled(_centred, centre=nn.Buffer(torch.zeros(9))))


def _with_table() -> Any:
    return build(lambda: Assembled(lambda m, x: x * m.table, table=nn.Buffer(_TABLE.clone())))


_TABLE = torch.linspace(1.0, 2.03, 9)  # 16 bits cannot hold it


def _rounded(model: Any) -> None:
    model.between.table.copy_(model.between.table.bfloat16())
    shard(model)


def _emptied(model: Any) -> None:
    model.between.table.zero_()
    shard(model)


# -- accumulation ---------------------------------------------------------------------------------


def _parts(given: Any, number: int) -> list[Any]:
    return list(zip(*(each.chunk(number) for each in given), strict=True))


def _undivided(model: Any, given: Any, number: int = 4) -> torch.Tensor:
    """Micro-batches whose losses are divided by their number in the unsharded model only."""
    whole = 1 if is_sharded(model) else number
    *first, last = (each for each in _parts(given, number))
    for each in first:
        (loss(model, each) / whole).backward()
    return loss(model, last) / whole


def _undivided_backward(model: Any, given: Any, number: int = 4) -> torch.Tensor:
    """The same, with the right number returned."""
    whole = 1 if is_sharded(model) else number
    *first, last = (each for each in _parts(given, number))
    for each in first:
        (loss(model, each) / whole).backward()
    found = loss(model, last)
    return found / whole + (found / number - found / whole).detach()


FAULTS = [
    _of_words("tokens that rank 1 rolls", Phase.LOSS, "", FED, loss=_rolled, unseen=BETWEEN),
    _of_words(
        "positions by rank", Phase.LOSS, "", GIVEN, _after(_offset), fits=True, unseen=BETWEEN
    ),
    _of_words("a causal mask that is lost", Phase.LOSS, "blocks.1", SETTING, _after(_not_causal)),
    _of_words("another eps of a norm", Phase.LOSS, "blocks.0.norm", SETTING, _after(_other_eps)),
    _of_words(
        "dropout that is drawn again in backward",
        Phase.GRADIENT,
        "words.weight",
        RECOMPUTED,
        _after(_forgetting),
        build_model=partial(_Words, 0.3),
        aligned_seeds=True,
        by_layer=Phase.INPUT_GRADIENT,
    ),
    _of_words(
        "a backward hook",
        Phase.GRADIENT,
        "words.weight",
        HOOK,
        _after(_hooked),
        by_layer=Phase.INPUT_GRADIENT,
    ),
    _of_words("a forward hook", Phase.LOSS, "blocks.1", HOOK, _after(_forward_hooked)),
    _of_words(
        "an embedding that a hook detaches",
        Phase.MISSING,
        "words.weight",
        HOOK,
        _after(_detaching_hook),
        by_layer=Phase.MISSING,
    ),
    _of_words(
        "an embedding that is detached",
        Phase.MISSING,
        "words.weight",
        DETACHED,
        _after(_detaching),
        unseen=BETWEEN,
    ),
    Fault("a centre of batches", Phase.BUFFER, "between.centre", APART, build_model=_with_centre),
    Fault(
        "a buffer that is rounded",
        Phase.BUILD,
        "between.table",
        BUILT,
        build_model=_with_table,
        shard=_rounded,
    ),
    Fault(
        "a buffer that is emptied",
        Phase.BUILD,
        "between.table",
        BUILT,
        build_model=_with_table,
        shard=_emptied,
    ),
    Fault(
        "losses that are not divided",
        Phase.LOSS,
        "",
        LOSS,
        loss=_undivided,
        unseen=BETWEEN,
    ),
    Fault(
        "backwards that are not divided",
        Phase.GRADIENT,
        "up.weight",
        ACCUMULATED,
        loss=_undivided_backward,
        unseen=BETWEEN,
    ),
    Fault(
        "another eps of the optimizer",
        Phase.UPDATE,
        "up.weight",
        OPTIMIZER,
        optimizer=lambda params: _adam(list(params)),
    ),
]


def _adam(params: list[Any]) -> torch.optim.Optimizer:
    wrong = any(hasattr(each, "to_local") for each in params)
    return torch.optim.Adam(params, lr=1e-2, eps=1e-2 if wrong else 1e-8)

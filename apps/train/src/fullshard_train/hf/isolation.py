"""Whether a packed row's documents are apart: one forward shows it, before training begins.

Owns that test. Models of transformers detect documents by positions that start from zero; other
models (recurrent ones, code with its own masks) would learn across documents.
"""

from __future__ import annotations

import torch

from fullshard.sharding import FSDPModule
from fullshard_train.errors import TrainError
from fullshard_train.hf.model import Causal
from fullshard_train.seeds import generator_for

__all__ = ["require_isolation"]

_LONGEST = 64


@torch.no_grad()
def require_isolation(model: Causal, block: int, tokens: int) -> None:
    """Pass if what a document's tokens say does not depend on the document before it.

    Every rank calls this; it runs two forwards of a short row.

    Args:
        model: sharded or not.
        block: the tokens of a row; half of a row is enough for a document.
        tokens: the size of the vocabulary.

    Raises:
        TrainError: on every rank, if it does.
    """
    half = max(min(block, _LONGEST) // 2, 1)
    device = next(model.parameters()).device
    drawn = torch.randint(tokens, (3, half), generator=generator_for("isolation"))
    positions = torch.arange(half).repeat(2)
    rows = [torch.stack((torch.cat((drawn[each], drawn[2])), positions), dim=-1) for each in (0, 1)]
    was_training = model.training
    model.eval()
    said = [model(row[None].to(device))[0, half:] for row in rows]
    model.train(was_training)
    if isinstance(model, FSDPModule):
        model.reshard()  # a root stays whole after its forward; optimizers want shards
    if model.positions and torch.equal(said[0], said[1]):
        return
    raise TrainError(
        f"config hf.packing = 'documents': in a packed row, a {type(model.inner).__name__} lets a"
        " document depend on the one before it; take hf.packing = 'none' (a row for each document)"
        " or 'crossing' (as it is)"
    )

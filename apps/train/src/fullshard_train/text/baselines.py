"""The score of a model that only counts: the losses a trained model must beat.

Owns two of them. Both are cross-entropies: probabilities are counted on the training part with
add-one smoothing and scored on held-out bytes, as the trained model is, so the three numbers can be
compared. (The plain entropy of the held-out part would be lower: it knows the counts it is judged
on.)
"""

from __future__ import annotations

import torch

__all__ = ["bigram_loss", "unigram_loss"]

_BYTES = 256


def unigram_loss(train: torch.Tensor, targets: torch.Tensor, *, classes: int = _BYTES) -> float:
    """Nats per byte of predicting each target by its frequency, p(b) = (n(b) + 1) / (n + 256).

    Args:
        train: the bytes that are counted, uint8 `[n]`; or tokens.
        targets: the bytes that are scored, integers of any shape.
        classes: how many there are: 256 bytes, or the size of a vocabulary.
    """
    counts = torch.bincount(train.long(), minlength=classes).double()
    log_probability = torch.log((counts + 1) / (counts.sum() + _BYTES))
    return -float(log_probability[targets.long()].mean())


def bigram_loss(train: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Nats per byte of predicting each target from the byte before it.

    p(b | a) = (n(ab) + 1) / (n(a) + 256).

    Args:
        train: the bytes whose neighbours are counted, uint8 `[n]`; n(a) counts those that have a
            successor.
        inputs: the byte before each target, integers, same shape as `targets`.
        targets: the bytes that are scored.
    """
    pairs = train[:-1].long() * _BYTES + train[1:].long()
    counts = torch.bincount(pairs, minlength=_BYTES * _BYTES).double().view(_BYTES, _BYTES)
    log_probability = torch.log((counts + 1) / (counts.sum(dim=1, keepdim=True) + _BYTES))
    return -float(log_probability[inputs.long(), targets.long()].mean())

"""The baselines against counting by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from fullshard_train.text.baselines import bigram_loss, unigram_loss


def _tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def test_the_unigram_loss_is_that_of_smoothed_frequencies() -> None:
    # a: (3 + 1) / (4 + 256), b: (1 + 1) / 260, c, never seen: 1 / 260
    expected = -(math.log(4 / 260) + math.log(2 / 260) + math.log(1 / 260)) / 3
    assert unigram_loss(_tensor(b"aaba"), _tensor(b"abc")) == pytest.approx(expected)


def test_the_bigram_loss_is_that_of_smoothed_pair_frequencies() -> None:
    # In aabab: aa once, ab twice, ba once; so a has three successors and b one.
    expected = -(math.log(3 / 259) + math.log(2 / 257) + math.log(1 / 256)) / 3
    loss = bigram_loss(_tensor(b"aabab"), _tensor(b"abz"), _tensor(b"baz"))
    assert loss == pytest.approx(expected)


def test_both_agree_with_a_count_in_plain_python() -> None:
    train, held_out = b"the cat sat on the mat, the end" * 3, b"that hat, the sea"
    ones, pairs = Counter(train), Counter(itertools.pairwise(train))
    before = Counter(train[:-1])
    unigram = [math.log((ones[b] + 1) / (len(train) + 256)) for b in held_out[1:]]
    bigram = [
        math.log((pairs[a, b] + 1) / (before[a] + 256)) for a, b in itertools.pairwise(held_out)
    ]
    inputs, targets = _tensor(held_out[:-1]), _tensor(held_out[1:])
    assert unigram_loss(_tensor(train), targets) == pytest.approx(-sum(unigram) / len(unigram))
    assert bigram_loss(_tensor(train), inputs, targets) == pytest.approx(-sum(bigram) / len(bigram))

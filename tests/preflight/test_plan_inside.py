"""Memory that no tensor of a program shows: inside operations and collectives, on CPU ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from fullshard.preflight.compat import memory_changes
from fullshard.preflight.costs.call import Call, Items, Operand
from fullshard.preflight.planning.memory import inside
from fullshard.preflight.planning.memory.inside import Inside
from fullshard.preflight.planning.memory.ledger import Ledger
from fullshard.preflight.planning.memory.places import Places
from fullshard.preflight.planning.world import lonely_world

CONVOLUTION = "aten::convolution"


def _floats(*shape: int) -> Operand:
    return Operand(shape, torch.empty(shape, device="meta").stride(), torch.float32)


def _convolution(rows: int) -> Call:
    constants = (None, *(Items((each, each), is_list=True) for each in (1, 1, 1)))
    rest = (*constants, False, Items((0, 0), is_list=True), 1)
    args = (_floats(rows, 32, 28, 28), _floats(64, 32, 3, 3), *rest)
    return Call(CONVOLUTION, "", Items(args, is_list=True), ())


def _lstm(length: int) -> Call:
    weights = (_floats(256, 64), _floats(256, 64), _floats(256), _floats(256))
    rest = (False, Items((), is_list=True), 2, 64, 1, True, False, False, True)
    args = (_floats(length, 8, 64), *weights, _floats(8, 64), _floats(8, 64), *rest)
    return Call("aten::mkldnn_rnn_layer", "", Items(args, is_list=True), ())


def _turned(rows: int) -> Call:
    """2,048 columns: some CPUs copy up to 256 for each thread, and smaller calls need as many."""
    gradient = Operand((2048, rows), (1, 2048), torch.bfloat16)
    given = Operand((rows, 128), (128, 1), torch.bfloat16)
    return Call("aten::mm", "", Items((gradient, given), is_list=True), ())


def _found(call: Call, flops: int, result: int) -> inside.Memory:
    with patch.object(inside, "_known", {}):
        return inside._memory_of(call, flops, [result])


def test_an_operation_is_called_and_its_allocations_counted_beyond_its_result() -> None:
    x, weights = torch.randn(4, 32, 28, 28), torch.randn(64, 32, 3, 3)
    functional.conv2d(x, weights, padding=1)
    kept: list[torch.Tensor] = []
    changes = memory_changes(lambda: kept.append(functional.conv2d(x, weights, padding=1)))
    sums = [sum(changes[: place + 1]) for place in range(len(changes))]
    (result,) = kept
    expected = max(sums) - result.nbytes
    assert expected > 0, "oneDNN has the weights in an order of its own"
    assert _found(_convolution(4), 0, result.nbytes).inside == pytest.approx(expected, abs=4096)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make", [_convolution, _lstm, _turned])
def test_a_large_call_is_told_from_smaller_ones(make: Any) -> None:
    call = make(64)
    whole = inside._called(call)
    smaller = {"_LARGEST": sum(each.nbytes for each in call.operands) // 2}
    with patch.multiple(inside, _known={}, **smaller):
        found = inside._memory_of(call, 0, [int(each) for each in whole.results])
    assert found.inside == pytest.approx(whole.inside, rel=0.1)
    assert found.results == pytest.approx(whole.results, rel=0.02)


def test_an_lstm_keeps_its_workspace_for_backward() -> None:
    length, rows, width = 32, 8, 64
    with lonely_world({"shard": 1}), Ledger(Places(), None, Inside(kernels=False)) as ledger:
        layer = torch.nn.LSTM(width, width)
        before = ledger.now
        output, _ = layer(torch.empty(length, rows, width))
        kept = ledger.now - before
        del output
    gates = 4 * length * rows * width * 4
    assert kept > gates, "the gates of each step, for backward"

"""The order in which a text is read, and each rank's part of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import Share
from fullshard_train.text.windows import ShuffledWindows, cut, evenly_spaced
from support.trainer.jobs import small_config, small_text_task


@given(length=st.integers(2, 300), context=st.integers(1, 20), seed=st.integers(0, 3))
def test_no_byte_is_a_target_twice_in_an_epoch(length: int, context: int, seed: int) -> None:
    if length < 2 * context:
        with pytest.raises(TrainError, match="too few for windows"):
            ShuffledWindows(length, context=context, seed=seed)
        return
    windows = ShuffledWindows(length, context=context, seed=seed)
    for epoch in range(2):
        first = epoch * windows.per_epoch
        starts = windows.starts(range(first, first + windows.per_epoch))
        targets = (starts[:, None] + torch.arange(1, context + 1)).flatten()
        assert len(targets.unique()) == len(targets)
        assert int(targets.min()) >= 1 and int(targets.max()) < length


def test_the_order_is_the_seeds_own_and_differs_between_epochs() -> None:
    windows = ShuffledWindows(1000, context=10, seed=0)
    epoch = list(range(windows.per_epoch))
    first = windows.starts(epoch).tolist()
    assert ShuffledWindows(1000, context=10, seed=0).starts(epoch).tolist() == first
    assert ShuffledWindows(1000, context=10, seed=1).starts(epoch).tolist() != first
    assert windows.starts([n + windows.per_epoch for n in epoch]).tolist() != first


def test_a_window_is_the_same_whatever_was_asked_for_before() -> None:
    windows = ShuffledWindows(1000, context=10, seed=0)
    late = windows.starts([950])
    windows.starts(range(300))
    assert windows.starts([950]).equal(late)


@given(
    count=st.integers(1, 5), accumulate=st.integers(1, 4), each=st.integers(1, 4), data=st.data()
)
def test_the_shares_of_a_batch_are_disjoint_and_make_up_the_batch(
    count: int, accumulate: int, each: int, data: st.DataObject
) -> None:
    batch = count * accumulate * each
    rows = [
        row
        for index in range(count)
        for micro in range(accumulate)
        for row in Share(index=index, count=count).rows(batch, micro=micro, accumulate=accumulate)
    ]
    assert sorted(rows) == list(range(batch))


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 20))
def test_shares_of_a_batch_that_does_not_divide_differ_by_one_row_at_most(
    count: int, accumulate: int, more: int
) -> None:
    batch = accumulate * (count + more)
    parts = [
        Share(index=index, count=count).rows(batch, micro=micro, accumulate=accumulate)
        for micro in range(accumulate)
        for index in range(count)
    ]
    assert [row for part in parts for row in part] == list(range(batch))
    sizes = {len(part) for part in parts}
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_ranks_of_any_world_size_together_read_the_same_batch() -> None:
    config = small_config()
    task = small_text_task(config)
    whole = task.training_rows(3, range(config.train.batch)).inputs
    for count in (1, 2, 4):
        parts = [Share(index=i, count=count).rows(config.train.batch) for i in range(count)]
        assert torch.cat([task.training_rows(3, part).inputs for part in parts]).equal(whole)


def test_steps_read_on_where_the_last_one_ended() -> None:
    config = small_config()
    task = small_text_task(config)
    batch = config.train.batch
    windows = ShuffledWindows(
        len(task.corpus.train), context=config.model.context, seed=config.train.seed
    )
    starts = windows.starts(range(2 * batch, 3 * batch))
    expected, _ = cut(task.corpus.train, starts, config.model.context)
    assert task.training_rows(2, range(batch)).inputs.equal(expected)


def test_a_target_is_the_byte_after_its_input() -> None:
    inputs, targets = cut(torch.arange(10, dtype=torch.uint8), torch.tensor([0, 6]), 3)
    assert inputs.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert targets.tolist() == [[1, 2, 3], [7, 8, 9]]


@given(length=st.integers(0, 200), context=st.integers(1, 20), count=st.integers(1, 30))
def test_held_out_windows_do_not_overlap(length: int, context: int, count: int) -> None:
    if (length - 1) // context < 1:
        with pytest.raises(TrainError, match="held-out bytes are too few"):
            evenly_spaced(length, context=context, count=count)
        return
    starts = evenly_spaced(length, context=context, count=count)
    assert len(starts) == min(count, (length - 1) // context)
    assert all(step >= context for step in starts.diff().tolist())
    assert int(starts[-1]) + context < length

"""Who contributes and who receives state, and which rows two ranks share."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.comm import Layout, TensorSpec
from fullshard.comm.spi import own_mask, shard_views
from fullshard.elastic import Quorum
from fullshard.elastic.membership import Member, Roster, next_lineage
from fullshard.elastic.pieces import Peer, copied_into, packed, packed_numel, pairs_with


def roster(*states: tuple[int, str], number: int = 1) -> Roster:
    members = [
        Member(name=chr(97 + i), ranks=1, step=step, batches=0, lineage=lineage, model="")
        for i, (step, lineage) in enumerate(states)
    ]
    quorum = Quorum(number=number, names=tuple("abcdefgh"), own=0, store="")
    return Roster(quorum=quorum, members=tuple(members), own=0)


@pytest.mark.parametrize(
    ("states", "contributors", "sources"),
    [
        ([(3, "x"), (3, "x")], (0, 1), {}),
        ([(2, "w"), (3, "x"), (3, "x")], (1, 2), {0: 1}),
        ([(0, "p"), (0, "q"), (0, "r")], (0,), {1: 0, 2: 0}),
        # Equal steps do not make equal states: the state of most groups counts.
        ([(3, "y"), (3, "x"), (3, "x")], (1, 2), {0: 1}),
        ([(3, "y"), (3, "x")], (0,), {1: 0}),
        ([(1, "u"), (1, "u"), (4, "x"), (4, "x")], (2, 3), {0: 2, 1: 3}),
    ],
)
def test_groups_of_the_furthest_state_contribute_and_send_it_to_the_others(
    states: list[tuple[int, str]], contributors: tuple[int, ...], sources: dict[int, int]
) -> None:
    found = roster(*states)
    assert found.contributors == contributors
    assert found.sources == sources


def test_a_lineage_depends_on_all_that_a_step_depends_on() -> None:
    rosters = [
        roster((3, "x"), (3, "x")),
        roster((3, "y"), (3, "y")),
        roster((4, "x"), (4, "x")),
        roster((3, "x"), (2, "w")),
        roster((3, "x"), (3, "x"), number=2),
    ]
    assert len({next_lineage(each) for each in rosters}) == len(rosters)


SPECS = st.lists(
    st.sampled_from(
        [((5, 3), 0), ((), 0), ((3, 7), 1), ((2, 9, 4), 1), ((0, 3), 0), ((7,), 0), ((1,), 0)]
    ).map(lambda each: TensorSpec(shape=each[0], dim=each[1], dtype=torch.float32)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(specs=SPECS, mine=st.integers(1, 5), theirs=st.integers(1, 5))
def test_what_ranks_of_another_group_send_is_a_ranks_own_slice(
    specs: list[TensorSpec], mine: int, theirs: int
) -> None:
    whole = [torch.randn(spec.laid_shape) for spec in specs]
    here = Layout(specs, mine, mask_numel=len(specs))
    there = Layout(specs, theirs, mask_numel=len(specs))

    def slice_of(layout: Layout, rank: int) -> torch.Tensor:
        output = torch.zeros(layout.buffer.slice_numel)
        shards = shard_views(output, layout, rank)
        for spec, full, shard in zip(specs, whole, shards, strict=True):
            start = spec.first_row(rank, layout.world_size)
            shard.copy_(full.narrow(spec.dim, start, shard.shape[spec.dim]))
        own_mask(output, layout).fill_(1)
        return output

    for rank in range(mine):
        arrived = torch.zeros(here.buffer.slice_numel)
        for other in range(theirs):
            me, peer = Peer(rank, mine), Peer(other, theirs)
            sent = packed(slice_of(there, other), there, peer, me, torch.float32)
            assert sent.numel() == packed_numel(here, me, peer)
            copied_into(arrived, sent, here, me, peer)
        assert torch.equal(arrived, slice_of(here, rank))


def test_every_rank_pairs_with_a_rank_of_each_other_group() -> None:
    for mine, theirs in itertools.product(range(1, 6), repeat=2):
        for rank in range(mine):
            pairs = [q for q in range(theirs) if pairs_with(Peer(rank, mine), Peer(q, theirs))]
            assert pairs
            assert rank % theirs in pairs

"""``placements=``: where compute parameters, waiting gradients and optimizer state are sharded.

The reference is the unsharded model on the whole batch. Bytes are compared with the formulas of
``docs/how-to/zero-stages.md``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import permutations, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map, tree_map_only

from fullshard.comm import EventKind, EventLog, observe
from fullshard.optim import clip_grad_norm_
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.sharding import (
    RankMismatchError,
    Schedule,
    ShardingPlacements,
    fully_shard,
    unsharded,
)
from fullshard.wire import Quantised, WirePolicy
from support.apart import private_memory
from support.events.recorder import group_of
from support.failing import failing
from support.modules import Assembled
from support.parity.compare import assert_equal, full, gradients_of, parameters_of, rounding
from support.parity.engines import OURS, shard, tell
from support.parity.models import CASES
from support.parity.reference import ByHand, Pair, my_rows
from support.products import few
from support.ranks import cpu_mesh, distributed

P = ShardingPlacements
PLACEMENTS = {
    "ZeRO-1": P.zero(1),
    "ZeRO-2": P.zero(2),
    "ZeRO-3": P.zero(3),
    "hpZ": P(compute="inner"),
    "inner": P(compute="inner", gradients="inner"),
    "outer": P(compute="outer", gradients="outer"),
    "full, inner": P(compute=(), gradients="inner"),
    "inner, none": P(compute="inner", gradients=()),
    "HSDP": P(optimizer="inner"),
    "ZeRO-1 of HSDP": P(compute=(), gradients=(), optimizer="inner"),
}
TWO_LEVELS = ["hpZ", "inner", "outer", "full, inner", "inner, none"]
SHAPES = {"2x2": (2, 2), "1x4": (1, 4)}


def mesh_of(shape: str = "2x2") -> DeviceMesh:
    """Axes outer and inner."""
    return cpu_mesh(SHAPES[shape], ("outer", "inner"))


def pair_of(case: str, placements: P, *, shape: str = "2x2", **options: Any) -> Pair:
    """A model under ``placements`` and the unsharded one, in float64."""
    made = shard(
        CASES[case],
        OURS,
        dtype=torch.float64,
        mesh=mesh_of(shape),
        placements=placements,
        **options,
    )
    return Pair(CASES[case], made)


def accumulate(pair: Pair, *indices: int) -> None:
    """Backwards of one step, announced as users do."""
    for index in indices:
        if index != indices[0] or pair.model.__dict__.get("ran"):
            tell(pair.model, "set_is_last_backward", index == indices[-1])
        losses = pair.losses(index)
        tell(pair.model, "set_is_last_backward", index == indices[-1])
        pair.model.__dict__["ran"] = True
        for loss in losses:
            loss.backward()
        pair._backwards += 1


@pytest.mark.cross
@pytest.mark.device(paces=True)
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("case", ["uneven", "transformer", "empty", "tied-across-groups", "lora"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("memory", [nullcontext, private_memory])
@distributed(4)
def test_steps_of_several_backwards_equal_those_of_the_unsharded_model(
    name: str, case: str, shape: str, memory: Any
) -> None:
    with memory():
        pair = pair_of(case, PLACEMENTS[name], shape=shape)
        for step in range(3):
            accumulate(pair, 3 * step, 3 * step + 1, 3 * step + 2)
            pair.check(what=name)
            for model in (pair.model, pair.whole):
                clip_grad_norm_(model.parameters(), 0.1)
            pair.step()
        pair.check(what=name)


@pytest.mark.parametrize("name", few(PLACEMENTS, "ZeRO-2", "inner"))
@distributed(4)
def test_mixed_precision_equals_its_definition(name: str) -> None:
    case = CASES["transformer"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = shard(case, OURS, mp_policy=policy, mesh=mesh_of(), placements=PLACEMENTS[name])
    by_hand = ByHand(case, 4, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index in range(2):
        inputs, targets = case.batch(index, torch.float32)
        loss = case.loss(model(inputs[my_rows()]), targets[my_rows()])
        model.set_is_last_backward(index == 1)
        loss.backward()
        by_hand.backward(index)
    # The sums are the same ones in another order.
    want = gradients_of(by_hand.masters)
    assert_equal(gradients_of(model), want, rounding(4, steps=2), "gradients")


# -- parameters that not every backward reaches ---------------------------------------------------


def _of_all_kinds() -> Any:
    """One of no dim, one that is frozen, one that no forward uses, one of fewer rows than ranks."""
    return Assembled(
        lambda m, x, index: (m.linear(x) * m.scale * m.few) @ m.frozen,
        linear=nn.Linear(6, 7),
        scale=nn.Parameter(torch.tensor(1.5)),
        frozen=nn.Parameter(torch.ones(7, 2), requires_grad=False),
        unused=nn.Parameter(torch.ones(5)),
        few=nn.Parameter(torch.ones(1, 7)),
    )


def _with_a_layer_of_the_first() -> Any:
    """The first micro-batch alone uses the layer in the middle."""
    return Assembled(
        lambda m, x, index: m.last(m.first(x) if index else m.middle(m.first(x))),
        **{name: nn.Linear(6, 6) for name in ("first", "middle", "last")},
    )


def _of_two_layers() -> Any:
    layers = {name: nn.Linear(6, 6) for name in ("first", "last")}
    return Assembled(lambda m, x, index: m.last(m.first(x)), **layers)


REACHED: dict[str, Callable[[], Any]] = {
    "of all kinds": _of_all_kinds,
    "a layer of the first": _with_a_layer_of_the_first,
    "trained in the first": _of_two_layers,
    "trained in the others": _of_two_layers,
}
TRAINS_FIRST = {"trained in the first": True, "trained in the others": False}
"""Whether a weight trains in the first micro-batch alone, or in the others alone."""
BY_HAND, SYNC = "HSDP by hand", "not synchronised"


@pytest.mark.parametrize(
    ("made", "name"),
    few(
        product(REACHED, [*PLACEMENTS, BY_HAND, SYNC]),
        *product(["of all kinds"], ["ZeRO-1", "inner", "full, inner"]),
        *product(["a layer of the first"], ["ZeRO-1", "inner", "full, inner", BY_HAND]),
        *product(TRAINS_FIRST, ["ZeRO-1", "inner", BY_HAND, SYNC]),
        together=True,
    ),
)
@distributed(4)
def test_parameters_that_some_backwards_do_not_reach_have_the_gradients_of_all(
    made: str, name: str
) -> None:
    torch.manual_seed(0)
    whole = REACHED[made]().double()
    model: Any = copy.deepcopy(whole)
    placements = PLACEMENTS.get(name, P.zero(3) if name == SYNC else None)
    for each in (*model.children(), model):
        fully_shard(each, mesh=mesh_of(), placements=placements)
    announce = {
        BY_HAND: model.set_requires_all_reduce,
        SYNC: model.set_requires_gradient_sync,
    }.get(name, model.set_is_last_backward)
    for step in range(2):
        for index in range(3):
            generator = torch.Generator().manual_seed(3 * step + index)
            batch = torch.randn(8, 6, dtype=torch.float64, generator=generator)
            for each in (whole, model) if made in TRAINS_FIRST else ():
                each.last.weight.requires_grad_((index == 0) is TRAINS_FIRST[made])
            whole(batch, index).square().mean().backward()
            out = model(batch[my_rows()], index)
            announce(index == 2)
            out.square().mean().backward()
        allowed = rounding(4, steps=3)
        assert_equal(gradients_of(model), gradients_of(whole), allowed, f"gradients, step {step}")
        model.zero_grad()
        whole.zero_grad()


# -- what is communicated, and what is held -------------------------------------------------------

WIDTH, ITEM = 16, 8  # float64


def _slice(numel: int, ranks: int, marks: int = 0) -> int:
    """Bytes of one rank's slice of a collective: a part of the tensor and marks, padded to 16."""
    return -(-(numel // ranks + marks) * ITEM // 16) * 16


def _sent(log: EventLog, kind: EventKind, *, second: bool) -> int:
    """Bytes of all collectives of a kind, of the second level or the first."""
    events = [each for each in log.of(kind) if each.name.endswith("(second level)") is second]
    return sum(event.nbytes for event in events)


@pytest.mark.parametrize("name", few(PLACEMENTS, "ZeRO-1", "ZeRO-2", "hpZ", "inner"))
@distributed(4)
def test_bytes_that_travel_and_are_held_equal_the_formulas(name: str) -> None:
    placements, micro_batches, numel = PLACEMENTS[name], 3, WIDTH * WIDTH
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))).double()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh_of(), placements=placements)
    model.set_schedule(Schedule())  # small groups share no launches
    optimizer = torch.optim.Adam(model.parameters())
    log = EventLog()
    with private_memory():
        for step in range(2):  # the first also checks that ranks agree
            with observe(log) if step else nullcontext():
                for index in range(micro_batches):
                    out = model(torch.ones(2, WIDTH, dtype=torch.float64))
                    model.set_is_last_backward(index == micro_batches - 1)
                    out.sum().backward()
                    if index == 0:
                        held = sum(map(_held_bytes, model))
                assert step == 0 or placements.compute != () or not any(map(_full_bytes, model))
                optimizer.step()
                optimizer.zero_grad()
    optimizer_ranks = 2 if placements.optimizer else 4
    first = 2 if name in TWO_LEVELS else optimizer_ranks
    two_levels = name in TWO_LEVELS
    gathers = 1 if placements.compute == () else 2 * micro_batches
    reductions = 1 if placements.gradients == () else micro_batches
    later = micro_batches if placements.gradients is None else 1
    layers = 2
    for kind, marks, level_1, level_2 in (
        (EventKind.ALL_GATHER, 0, gathers, 1),
        (EventKind.REDUCE_SCATTER, 1, reductions, later),
    ):
        wanted = layers * level_1 * first * _slice(numel, first, marks)
        assert _sent(log, kind, second=False) == wanted
        wanted = layers * two_levels * level_2 * 2 * _slice(numel // first, 2, marks)
        assert _sent(log, kind, second=True) == wanted
    local = [each.to_local() for each in model.parameters()]
    assert sum(each.nbytes for each in local) == layers * numel * ITEM // optimizer_ranks
    states = [state["exp_avg"].to_local() for state in optimizer.state.values()]
    assert sum(each.nbytes for each in states) == layers * numel * ITEM // optimizer_ranks
    compute = layers * numel * ITEM // first if two_levels else 0
    assert held == compute + (layers * numel * ITEM if placements.compute == () else 0)


def _held_bytes(layer: nn.Module) -> int:
    """Bytes of full parameters and compute shards that a layer holds now."""
    group = group_of(layer)
    sent: Any = group.gathering.setup.prepare().inputs.sends(group.gathering.config)
    stored = {each.shard.untyped_storage().data_ptr() for each in group.params}
    others = [each for each in sent.tensors if each.untyped_storage().data_ptr() not in stored]
    return _full_bytes(layer) + sum(each.untyped_storage().nbytes() for each in others)


def _full_bytes(layer: nn.Module) -> int:
    params = group_of(layer).params
    return sum(each.unsharded.untyped_storage().nbytes() for each in params)


# -- what a user's program does around a step -----------------------------------------------------


@pytest.mark.parametrize("name", ["ZeRO-2", "inner"])
@distributed(4)
def test_a_copy_is_used_again_within_a_step_only(name: str) -> None:
    pair = pair_of("uneven", PLACEMENTS[name])
    model: Any = pair.model
    model.set_schedule(Schedule())
    groups = 3
    log = EventLog()

    def gathers() -> tuple[int, bool]:
        levels = [each.name.endswith("(second level)") for each in log.of(EventKind.ALL_GATHER)]
        found = len(log.of(EventKind.UNSHARD)), any(levels)
        log.clear()
        return found

    first = (groups, False) if name == "ZeRO-2" else (2 * groups, True)
    again = (0, False) if name == "ZeRO-2" else (2 * groups, False)
    with private_memory(), observe(log):
        for is_last, want in [(False, first), (False, again), (True, again), (True, first)]:
            losses = pair.losses(0)
            model.set_is_last_backward(is_last)
            for loss in losses:
                loss.backward()
            pair._backwards += 1
            assert gathers() == want
            assert all(isinstance(each, DTensor) for each in model.parameters())
        pair.step()
        model.set_requires_gradient_sync(False)  # says as much
        pair.backward(1)
        assert gathers() == first
        model.set_requires_gradient_sync(True)
        pair.backward(2)
        assert gathers() == again
    pair.step()
    pair.check()


@pytest.mark.parametrize("name", ["ZeRO-2", "inner", "full, inner"])
@distributed(4)
def test_parameters_may_change_by_hand_between_steps(name: str) -> None:
    """As weights averages in and out of an evaluation do, and a loop without an optimizer."""
    pair = pair_of("uneven", PLACEMENTS[name])
    batch = torch.ones(2, 6, dtype=torch.float64)
    for step in range(3):
        pair.backward(step)
        outputs = []
        for model in (pair.model, pair.whole):
            params: Any = list(model.parameters())
            with torch.no_grad():
                torch._foreach_add_(params, [each.grad for each in params], alpha=-0.1)
                before = [each.detach().clone() for each in params]
                torch._foreach_mul_(params, 0.5)
                outputs.append(model(batch))
                for each, then in zip(params, before, strict=True):
                    each.data.copy_(then)
                outputs.append(model(batch))
                with torch.enable_grad():
                    model(batch)  # whose backward never comes
                for each in params:
                    each.mul_(0.9)
                    each.grad = None
        for mine, wanted in zip(outputs[:2], outputs[2:], strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
    pair.check(steps=4)


@pytest.mark.parametrize("name", ["inner", "full, inner"])
@distributed(4)
def test_what_is_written_back_is_told_from_what_codes_rounded(name: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(64, 64)
    policy = WirePolicy(gathers=Quantised(torch.int8))
    fully_shard(model, mesh=mesh_of(), placements=PLACEMENTS[name], wire_policy=policy)
    before = full(model.weight)
    with unsharded(model, writeback=True), torch.no_grad():
        model.weight[3].fill_(7.0)
    after = full(model.weight)
    assert (after[3] == 7.0).all()
    assert torch.equal(after[4:], before[4:])


@pytest.mark.parametrize("name", ["ZeRO-2", "inner"])
@distributed(4)
def test_a_kept_copy_that_a_user_may_have_written_to_is_not_used_again(name: str) -> None:
    pair = pair_of("uneven", PLACEMENTS[name])
    pair.backward(0)
    layer: Any = pair.model.get_submodule("first")
    layer.unshard()
    with torch.no_grad():
        layer.weight.fill_(100.0)
    layer.reshard()
    pair.backward(1)
    pair.step()
    pair.check()


@pytest.mark.parametrize("name", ["ZeRO-1", "inner", "full, inner"])
@distributed(4)
def test_local_accumulation_and_a_backward_that_raises(name: str) -> None:
    pair = pair_of("uneven", PLACEMENTS[name])
    model: Any = pair.model
    model.set_requires_gradient_sync(False)
    pair.backward(0)
    model.set_requires_gradient_sync(True)
    pair.backward(1)
    pair.check()
    pair.step()
    with failing(model.get_submodule("last"), backward=True):
        pair.losses(2)[0].backward()
    model.reset_iter_state()
    pair.backward(3)
    pair.step()
    pair.check()


@pytest.mark.parametrize("name", few(["ZeRO-2", "inner", "outer"], "inner", "ZeRO-2"))
@distributed(4)
def test_shards_may_live_on_the_host_and_blocks_may_be_recomputed(name: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    case = CASES["transformer"]
    pair = pair_of("transformer", PLACEMENTS[name], offload_policy=CPUOffloadPolicy())
    blocks = [type(pair.model.get_submodule(case.units[0]))]
    apply_activation_checkpointing(
        pair.model,
        checkpoint_wrapper_fn=checkpoint_wrapper,
        check_fn=lambda module: any(kind in type(module).__mro__ for kind in blocks),
    )
    for step in range(2):
        accumulate(pair, 2 * step, 2 * step + 1)
        pair.step()
    pair.check()


# -- changes --------------------------------------------------------------------------------------

CHANGES = [
    ("ZeRO-3", "ZeRO-1"),
    ("ZeRO-1", "ZeRO-2"),
    ("ZeRO-2", "ZeRO-3"),
    ("hpZ", "inner"),
    ("inner", "full, inner"),
    ("full, inner", "inner, none"),
    ("HSDP", "ZeRO-1 of HSDP"),
]


@pytest.mark.parametrize(
    "change", few(CHANGES, CHANGES[0], CHANGES[2], CHANGES[4]), ids=" to ".join
)
@distributed(4)
def test_placements_change_between_steps_where_the_optimizer_keeps_its_shards(
    change: tuple[str, str],
) -> None:
    pair = pair_of("uneven", PLACEMENTS[change[0]])
    for step in range(4):
        if step == 2:
            tell(pair.model, "set_placements", PLACEMENTS[change[1]])
        accumulate(pair, 2 * step, 2 * step + 1)
        pair.step()
    pair.check()


@distributed(4)
def test_placements_that_need_other_shards_are_refused() -> None:
    pair = pair_of("uneven", PLACEMENTS["ZeRO-3"])
    with pytest.raises(ValueError, match=r"compute='?\('inner',\).*load a state dict"):
        tell(pair.model, "set_placements", PLACEMENTS["inner"])
    with pytest.raises(TypeError, match="placements is a str"):
        tell(pair.model, "set_placements", "inner")
    accumulate(pair, 0, 1)
    pair.step()
    pair.check()


MOVES = [("inner", "ZeRO-3"), ("ZeRO-2", "outer")]  # the others run in the matrix


@pytest.mark.parametrize("move", few(permutations(PLACEMENTS, 2), *MOVES), ids=" to ".join)
@distributed(4)
def test_state_dicts_move_between_placements_and_into_plain_torch(move: tuple[str, str]) -> None:
    """Model and optimizer, by torch's own functions; both runs go on to the same numbers."""
    first, second = (pair_of("uneven", PLACEMENTS[name]) for name in move)
    accumulate(first, 0, 1)
    first.step()
    model, states = get_state_dict(first.model, first._optimizers[0])
    whole = tree_map_only(torch.Tensor, full, (model, states))
    placed = tree_map(
        lambda like, tensor: (
            distribute_tensor(tensor, like.device_mesh, like.placements)
            if isinstance(like, DTensor)
            else tensor
        ),
        get_state_dict(second.model, second._optimizers[0]),
        whole,
    )
    set_state_dict(
        second.model, second._optimizers[0], model_state_dict=placed[0], optim_state_dict=placed[1]
    )
    plain = first.whole
    assert_equal({**whole[0]}, parameters_of(plain), rounding(4, steps=3), "parameters")
    for pair in (first, second):
        pair.model.__dict__["ran"] = True
        accumulate(pair, 2, 3)
        pair.step()
    got, want = parameters_of(second.model), parameters_of(first.model)
    assert_equal(got, want, rounding(4, steps=3), "parameters after the move")


# -- errors ---------------------------------------------------------------------------------------

BAD = {
    "unknown axis": (
        P(compute="left"),
        ValueError,
        r"compute .* \('left',\).*\('outer', 'inner'\)",
    ),
    "other order": (P(optimizer=("inner", "outer")), ValueError, "optimizer of ShardingPlacements"),
    "no optimizer": (P(optimizer=()), ValueError, "use replicate"),
    "two parts": (P(compute="outer", gradients="inner"), ValueError, "the same part"),
    "finer compute": (P(gradients="inner"), ValueError, "the other is"),
    "no placements": ("inner", TypeError, "placements is a str; pass a ShardingPlacements"),
}


@pytest.mark.parametrize("name", BAD)
@distributed(4)
def test_placements_that_cannot_be_are_refused(name: str) -> None:
    placements, error, words = BAD[name]
    model = nn.Linear(4, 4)
    with pytest.raises(error, match=words):
        fully_shard(model, mesh=mesh_of(), placements=placements)  # type: ignore[call-overload]
    assert type(model) is nn.Linear


def test_stages_are_short_for_axes() -> None:
    stages = [P(compute=(), gradients=()), P(compute=()), P()]
    assert [P.zero(stage) for stage in (1, 2, 3)] == stages
    assert [str(each) for each in stages] == ["ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert str(P(compute="inner")) == "placements, compute over inner"
    with pytest.raises(ValueError, match="stage is 4"):
        P.zero(4)


def test_a_field_that_names_no_axis_is_refused() -> None:
    with pytest.raises(TypeError, match="gradients of ShardingPlacements is 3"):
        P(gradients=3)  # type: ignore[arg-type]


@distributed(4)
def test_arguments_that_contradict_placements_are_refused() -> None:
    from fullshard.sharding import DataParallelMeshDims

    mesh = mesh_of()
    with pytest.raises(ValueError, match="dp_mesh_dims both name axes"):
        dims = DataParallelMeshDims(shard="inner")
        fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=dims, placements=P())
    with pytest.raises(ValueError, match="reshard_after_forward is 2"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=2, placements=P())


@distributed(4)
def test_ranks_with_different_placements_are_told_which() -> None:
    name = "ZeRO-1" if dist.get_rank() == 1 else "ZeRO-2"
    model = fully_shard(nn.Linear(4, 4), mesh=mesh_of(), placements=PLACEMENTS[name])
    with pytest.raises(RankMismatchError, match="gradients that wait reduced over: none"):
        model(torch.ones(1, 4))


@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-2", "inner", "not synchronised"])
@distributed(4)
def test_a_step_is_given_up_between_its_backwards(name: str) -> None:
    """Gradients that wait for its last backward are not in ``.grad`` yet."""
    pair = pair_of("uneven", PLACEMENTS.get(name, PLACEMENTS["ZeRO-3"]))
    model: Any = pair.model
    announce = (
        model.set_is_last_backward if name in PLACEMENTS else model.set_requires_gradient_sync
    )
    losses = pair.losses(0)
    announce(False)
    for loss in losses:
        loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of gradients that are dropped
        model.reset_iter_state()
    for each in (model, pair.whole):
        each.zero_grad()
    announce(True)
    pair.backward(1)
    pair.check()


@pytest.mark.parametrize("name", ["ZeRO-2", "hpZ", "inner"])
@distributed(2, 4)
def test_a_backward_ends_the_reductions_of_the_one_before(name: str) -> None:
    """So the results of all micro-batches are never in memory together."""
    world = dist.get_world_size()
    mesh = cpu_mesh((2, world // 2), ("outer", "inner"))
    model: Any = shard(CASES["uneven"], OURS, mesh=mesh, placements=PLACEMENTS[name])
    log, waiting = EventLog(), []
    with observe(log):
        for index in range(4):
            inputs, targets = CASES["uneven"].batch(index, torch.float32)
            loss = CASES["uneven"].loss(model(inputs[my_rows()]), targets[my_rows()])
            model.set_is_last_backward(index == 3)
            loss.backward()
            launched, done = (log.of(kind) for kind in (EventKind.REDUCE, EventKind.REDUCE_DONE))
            waiting.append(len(launched) - len(done))
            if name == "inner" and index < 3:
                assert not done  # partial sums, which are no gradients yet
    if name != "inner":
        assert waiting == [3, 3, 3, 0]


@pytest.mark.parametrize("name", ["ZeRO-1", "inner"])
@distributed(4)
def test_a_user_who_turns_synchronisation_off_turns_it_on_again(name: str) -> None:
    pair = pair_of("uneven", PLACEMENTS[name])
    model: Any = pair.model
    pair.losses(0)  # finds the root
    model.set_requires_gradient_sync(False)
    model.set_is_last_backward(True)
    pair.backward(1)
    assert all(each.grad is None for each in model.parameters())
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(True)
    pair.backward(2)
    assert all(each.grad is None for each in model.parameters())
    model.set_is_last_backward(True)
    pair.backward(3)
    pair.check()

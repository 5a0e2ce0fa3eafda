"""State dicts of a sharded model: sharded, full, loaded from either, strict about the rest."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard.sharding import full_state_dict, fully_shard, load_full_state_dict
from fullshard.sharding.params.param import FSDPParam
from support.parity.compare import full
from support.ranks import cpu_mesh, distributed
from support.surface.model import WIDTH, batch, build, sharded, train
from support.surface.ranks import assert_equal_state, everyone, full_parameters

# -- saving ---------------------------------------------------------------------------------------


@distributed(1, 2, 4)
def test_a_state_dict_has_the_unsharded_models_keys_and_holds_the_shards() -> None:
    plain, net = build(), sharded(build())
    state = net.state_dict()
    assert_equal_state(state, plain.state_dict())
    for name, param in net.named_parameters():
        assert isinstance(state[name], DTensor)
        assert state[name].placements == (Shard(0),)
        # shares memory with the parameter, as a state dict does
        assert state[name].to_local().data_ptr() == param.to_local().data_ptr()  # type: ignore[attr-defined]  # a DTensor
    assert not isinstance(state["steps"], DTensor)


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_a_state_dict_is_sharded_after_a_forward_that_left_parameters_unsharded(
    reshard: bool | None,
) -> None:
    plain, net = build(), sharded(build(), reshard_after_forward=reshard)
    with torch.no_grad():
        net(batch())
    state = net.state_dict()
    assert all(isinstance(state[name], DTensor) for name, _ in plain.named_parameters())
    assert_equal_state(state, plain.state_dict())
    output = net(batch())
    state = net.state_dict()  # between forward and backward
    assert_equal_state(state, plain.state_dict())
    output.sum().backward()  # still good: the weights are gathered again
    plain(batch()).sum().backward()
    grad: Any = net.head.weight.grad
    torch.testing.assert_close(grad.full_tensor(), plain.head.weight.grad)


@distributed(2)
def test_the_state_dict_of_a_submodule_is_sharded_too() -> None:
    net: Any = sharded(build(), reshard_after_forward=False)
    with torch.no_grad():
        net(batch())
    assert_equal_state(net.blocks[1].state_dict(), build().blocks[1].state_dict())
    assert_equal_state(net.head.state_dict(), build().head.state_dict())
    assert isinstance(net.head.state_dict()["weight"], DTensor)
    net.blocks[0].unshard()
    assert_equal_state(net.state_dict(), build().state_dict())
    assert isinstance(net.state_dict()["blocks.0.fc1.weight"], DTensor)


# -- the full state dict --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"rank0_only": False}, {"rank0_only": False, "cpu_offload": False}],
    ids=["on rank 0", "on every rank", "on every device"],
)
@distributed(2, 4, matrix=[4])
def test_a_full_state_dict_is_the_unsharded_models_where_it_was_asked_for(options: Any) -> None:
    net = sharded(build())
    state = full_state_dict(net, **options)
    net.steps.add_(1)  # buffers are copied, too
    if options or dist.get_rank() == 0:
        assert_equal_state(state, build().state_dict())
        assert not any(isinstance(value, DTensor) for value in state.values())
    else:
        assert state == {}


@distributed(2)
def test_a_full_state_dict_on_rank_0_only_without_offload_is_an_error() -> None:
    net = sharded(build())
    with pytest.raises(ValueError, match=r"rank0_only=True needs cpu_offload=True"):
        full_state_dict(net, cpu_offload=False)
    assert everyone("in step") == ["in step"] * 2


# -- loading --------------------------------------------------------------------------------------


def _assert_trains_as(net: Any, reference: Any) -> None:
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in (net, reference))
    torch.testing.assert_close(train(net, ours, range(2)), train(reference, theirs, range(2)))


@pytest.mark.cross
@pytest.mark.parametrize("assign", [False, True])
@distributed(2, 1, 4, matrix=[4])
def test_a_sharded_state_dict_loads(assign: bool) -> None:
    source, net = sharded(build(7)), sharded(build())
    result = net.load_state_dict(source.state_dict(), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert_equal_state(net.state_dict(), build(7).state_dict())
    for param in net.parameters():
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter)
        assert param.requires_grad
    _assert_trains_as(net, build(7))


@pytest.mark.cross
@pytest.mark.parametrize("assign", [False, True])
@distributed(2, 1, 4, matrix=[4])
def test_a_full_state_dict_loads_without_communication(assign: bool) -> None:
    net = sharded(build())
    if dist.get_rank() == 0:  # alone: it would wait for ever if anything were exchanged
        net.load_state_dict(build(7).state_dict(), assign=assign)
    dist.barrier()
    if dist.get_rank() != 0:
        net.load_state_dict(build(7).state_dict(), assign=assign)
    assert_equal_state(net.state_dict(), build(7).state_dict())
    _assert_trains_as(net, build(7))


@pytest.mark.parametrize("assign", [False, True])
@distributed(2)
def test_a_load_looks_only_at_the_parameters_that_it_replaced(assign: bool) -> None:
    net = fully_shard(build())  # one group, whose parameters are spread over many modules
    state = {name: value.clone() for name, value in net.state_dict().items()}
    real = FSDPParam.adopt_registered
    with patch.object(FSDPParam, "adopt_registered", autospec=True, side_effect=real) as look:
        net.load_state_dict(state, assign=assign)
    assert look.call_count == (len(list(net.parameters())) if assign else 0)


class _Unread:
    """A tensor that is read when a function of torch is called with it, as Lightning's are."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self._tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [each._tensor if isinstance(each, cls) else each for each in args]
        return func(*read, **(kwargs or {}))


@distributed(2)
def test_tensors_that_are_read_when_they_are_used_load_as_others() -> None:
    net = sharded(build())
    net.load_state_dict({name: _Unread(value) for name, value in build(7).state_dict().items()})
    assert_equal_state(net.state_dict(), build(7).state_dict())


@pytest.mark.parametrize("assign", [False, True])
@distributed(2)
def test_a_full_state_dict_stays_the_callers_and_parameters_keep_their_attributes(
    assign: bool,
) -> None:
    net: Any = build()
    net.stem.weight.requires_grad_(False)
    net.head.weight.rule = "rows"
    sharded(net)
    state = build(7).state_dict()
    before = dict(state)
    net.load_state_dict(state, assign=assign)
    assert list(state) == list(before)
    assert all(state[name] is before[name] for name in state)
    assert not any(isinstance(value, DTensor) for value in state.values())
    assert not net.stem.weight.requires_grad
    assert net.head.weight.requires_grad
    assert net.head.weight.rule == "rows"
    for name, _ in net.named_parameters():
        state[name].zero_()
    assert_equal_state(full_parameters(net), full_parameters(build(7)))


@distributed(2)
def test_an_assigned_shard_is_the_memory_that_was_given() -> None:
    net = sharded(build())
    state = {name: value.clone() for name, value in sharded(build(7)).state_dict().items()}
    net.load_state_dict(state, assign=True)
    for name, param in net.named_parameters():
        assert isinstance(param, DTensor) and param is not state[name]
        assert param.to_local().data_ptr() == state[name].to_local().data_ptr()
    given: Any = nn.Parameter(state["head.weight"].detach().clone())
    net.load_state_dict({**state, "head.weight": given}, assign=True)
    assert net.get_parameter("head.weight") is given
    _assert_trains_as(net, build(7))


@distributed(2)
def test_assign_takes_the_dtype_of_a_sharded_state_dict() -> None:
    net, given = sharded(build()), batch()
    assert net(given).dtype == torch.float32
    for dtype in (torch.float64, torch.float64, torch.float32):
        net.load_state_dict(sharded(build(7).to(dtype)).state_dict(), assign=True)
        reference = build(7).to(dtype)
        torch.testing.assert_close(net(given.to(dtype)), reference(given.to(dtype)))
        assert {param.dtype for param in net.parameters()} == {dtype}


@distributed(2)
def test_assign_of_tied_parameters_keeps_them_tied() -> None:
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    fully_shard(net[0])
    fully_shard(net)
    state = {name: torch.full_like(full(v), 0.5) for name, v in net.state_dict().items()}
    net.load_state_dict(state, assign=True)
    net(torch.ones(1, 4)).sum().backward()
    assert net[0].weight is net[2].weight
    assert torch.equal(net[0].weight.full_tensor(), torch.full((4, 4), 0.5))


@distributed(2)
def test_a_state_dict_of_another_dtype_is_cast_as_the_unsharded_model_casts_it() -> None:
    state = build(7).double().state_dict()
    reference, net = build(), sharded(build())
    reference.load_state_dict(state)
    net.load_state_dict(state)
    assert_equal_state(net.state_dict(), reference.state_dict())


@pytest.mark.parametrize("kind", ["full", "sharded"])
@distributed(2)
def test_missing_and_unexpected_keys_are_the_errors_of_load_state_dict(kind: str) -> None:
    net = sharded(build())
    source = sharded(build(7)) if kind == "sharded" else build(7)
    state = source.state_dict()
    state["head.extra"] = state.pop("head.bias")
    with pytest.raises(
        RuntimeError, match=r'(?s)Missing key.*"head\.bias".*Unexpected.*"head\.extra"'
    ):
        net.load_state_dict(state)
    result = net.load_state_dict(state, strict=False)
    assert result.missing_keys == ["head.bias"]
    assert result.unexpected_keys == ["head.extra"]
    assert torch.equal(full(net.stem.weight), build(7).stem.weight)
    assert torch.equal(full(net.head.bias), build().head.bias)


@pytest.mark.parametrize("strict", [True, False])
@distributed(2)
def test_a_tensor_of_the_wrong_shape_is_an_error_that_names_it(strict: bool) -> None:
    net = sharded(build())
    state = build().state_dict() | {"blocks.1.fc1.weight": torch.zeros(WIDTH, WIDTH)}
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch for blocks\.1\.fc1\.weight"):
        net.load_state_dict(state, strict=strict)
    state = dict(net.state_dict())
    state["head.bias"] = distribute_tensor(torch.zeros(5), cpu_mesh(), [Shard(0)])
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch for head\.bias"):
        net.load_state_dict(state, strict=strict)
    assert torch.equal(net(batch()), build()(batch()))


@distributed(2)
def test_a_copy_kept_unsharded_is_fresh_after_load_state_dict() -> None:
    net = sharded(build(), reshard_after_forward=False)
    with torch.no_grad():
        assert torch.equal(net(batch()), build()(batch()))
        net.load_state_dict(build(7).state_dict())
        assert torch.equal(net(batch()), build(7)(batch()))
        net.load_state_dict(sharded(build(8)).state_dict())
        assert torch.equal(net(batch()), build(8)(batch()))
        reference = build(8)
        for model in (net, reference):  # of one of its submodules
            model.head.load_state_dict(build(7).head.state_dict())
        assert torch.equal(net(batch()), reference(batch()))


# -- load_full_state_dict -------------------------------------------------------------------------


@pytest.mark.cross
@pytest.mark.parametrize(
    "elsewhere", ["a copy", "nothing", "other values", "a full state dict", "columns"]
)
@distributed(2, 1, 4, matrix=[4])
def test_load_full_state_dict_takes_every_ranks_copy_or_broadcasts_rank_0s(elsewhere: str) -> None:
    net = sharded(build(), reshard_after_forward=False)
    with torch.no_grad():
        net(batch())  # leaves copies unsharded, which must not serve after the change
    state: dict[str, Any] = build(7).state_dict()
    if elsewhere == "a full state dict":
        state = full_state_dict(sharded(build(7)))  # whole on rank 0 and empty elsewhere
    elif elsewhere == "columns":  # not contiguous, as the transposed weights of other libraries
        state = {
            key: value.mT.contiguous().mT if value.ndim > 1 else value
            for key, value in state.items()
        }
    elif elsewhere != "a copy" and dist.get_rank() != 0:
        state = {} if elsewhere == "nothing" else build(8).state_dict()
    load_full_state_dict(net, state, broadcast_from_rank0=elsewhere != "a copy")
    assert_equal_state(net.state_dict(), build(7).state_dict())
    _assert_trains_as(net, build(7))


@pytest.mark.parametrize("broadcast", [False, True])
@distributed(2)
def test_load_full_state_dict_is_strict_about_keys_on_every_rank(broadcast: bool) -> None:
    net = sharded(build())
    state = build().state_dict()
    del state["head.bias"]
    if broadcast and dist.get_rank() != 0:
        state.clear()
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        load_full_state_dict(net, state, broadcast_from_rank0=broadcast)
    assert everyone("in step") == ["in step"] * 2


@pytest.mark.parametrize(
    ("name", "shape"),
    [("head.bias", (5,)), ("head.bias", (1,)), ("stem.weight", (WIDTH, 1)), ("steps", (3,))],
    ids=["longer", "one that would broadcast", "a column", "a buffer"],
)
@distributed(2)
def test_a_broadcast_is_strict_about_shapes_on_every_rank(
    name: str, shape: tuple[int, ...]
) -> None:
    net = sharded(build())
    state = build(7).state_dict() | {name: torch.zeros(shape)}
    with pytest.raises(RuntimeError, match=rf"size mismatch for {name}") as caught:
        load_full_state_dict(net, state if dist.get_rank() == 0 else {}, broadcast_from_rank0=True)
    assert len(set(everyone(str(caught.value)))) == 1

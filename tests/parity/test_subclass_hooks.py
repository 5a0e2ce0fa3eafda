"""Hooks around the gather of a parameter: called as torch's own ``fully_shard`` calls them.

``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, on tensor subclasses and on plain tensors.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard.comm import EventKind, EventLog, observe
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from fullshard.sharding.hooks.lookup import the_state
from support.gather_hooks import (
    BFloat16Travel,
    Int8Travel,
    Wrapped,
    calls_of_hooks,
    two_tensors,
    two_tensors_hooked,
)
from support.modules import Residual
from support.parity.compare import assert_equal, parameters_of, rounding
from support.products import few
from support.ranks import cpu_mesh, distributed
from support.surface.ranks import everyone

WIDTH = 8


def _net(wrap: Callable[[torch.Tensor], torch.Tensor] | None, hidden: int = 12) -> Any:
    """Two blocks whose weights are made by ``wrap``; the same values on every rank."""
    torch.manual_seed(0)
    net = nn.Sequential(Residual(WIDTH, hidden), Residual(WIDTH, hidden))
    if wrap is not None:
        for module in net.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(wrap(module.weight.detach()))
    return net


def _shard(net: Any, engine: Any = fully_shard, **options: Any) -> Any:
    for block in net:
        engine(block, **options)
    return engine(net, **options)


def _rows(step: int) -> torch.Tensor:
    """Other inputs on each rank."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def _train(net: Any, steps: int = 3) -> list[torch.Tensor]:
    """The losses; an optimizer that needs nothing of a subclass but arithmetic."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = net(_rows(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def _plain(tensor: Any) -> list[torch.Tensor]:
    """What a shard is made of."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach()
    if isinstance(local, Wrapped):
        return [local._data]
    return [local.a, local.b] if hasattr(local, "a") else [local]


KINDS: dict[str, tuple[Any, Any]] = {
    "two tensors": (two_tensors, two_tensors_hooked),
    "bfloat16": (BFloat16Travel, nullcontext),
    "int8 and a scale": (Int8Travel, nullcontext),
    "two tensors, mesh only": (two_tensors, lambda: two_tensors_hooked(mesh_only=True)),
}


HOW: dict[str, Callable[[Any], dict[str, Any]]] = {
    "resharded": lambda policy: {"reshard_after_forward": True},
    "kept": lambda policy: {"reshard_after_forward": False},
    "mixed": lambda policy: {"mp_policy": policy(torch.bfloat16, torch.float32)},
    "reduced in fp32": lambda policy: {"mp_policy": policy(None, torch.float32)},
}


@pytest.mark.cross
@pytest.mark.parametrize("how", few(HOW, "resharded", "kept", "mixed"))
@pytest.mark.parametrize("kind", few(KINDS, "two tensors", "bfloat16"))
@distributed(2)
def test_training_equals_torchs_own_bit_for_bit(kind: str, how: str) -> None:
    wrap, patched = KINDS[kind]
    results = []
    with patched():
        for engine, policy in (
            (fully_shard, MixedPrecisionPolicy),
            (torch_fsdp.fully_shard, torch_fsdp.MixedPrecisionPolicy),
        ):
            net = _shard(_net(wrap), engine, **HOW[how](policy))
            results.append([*_train(net), *(each for p in net.parameters() for each in _plain(p))])
    assert len(results[0]) == len(results[1]) and all(map(torch.equal, *results))


class _Releases(BFloat16Travel):
    """Notes the memory to which it was gathered, and lets go of it."""

    gathered: ClassVar[list[torch.UntypedStorage]] = []
    answer: ClassVar[Any] = True

    def fsdp_post_all_gather(self, outputs: Any, *args: Any, **named: Any) -> Any:
        self.gathered.append(outputs[0].untyped_storage())
        made = super().fsdp_post_all_gather(outputs, *args, **named)
        return made and (made[0], made[:1])

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        answer: bool = self.answer
        return answer


@distributed(2)
def test_what_was_gathered_is_freed_before_the_module_runs_if_the_hook_says_so() -> None:
    """As by torch's own since 2.15."""
    seen: dict[Any, list[int]] = {}
    results = []
    for engine in (fully_shard, torch_fsdp.fully_shard):
        _Releases.gathered.clear()
        net = _shard(_net(_Releases), engine)
        net[1].register_forward_pre_hook(
            lambda *_, engine=engine: seen.setdefault(engine, []).append(
                max(each.nbytes() for each in _Releases.gathered)
            ),
            prepend=False,
        )
        results.append(_train(net))
    assert all(map(torch.equal, *results))
    assert seen[fully_shard] == [0, 0, 0]
    if torch.__version__ >= "2.15":
        assert seen[torch_fsdp.fully_shard] == [0, 0, 0]


@distributed(4)
def test_it_stays_where_it_is_cut_for_the_post_forward_mesh() -> None:
    """Both together are refused by torch's own."""
    losses = []
    for wrap in (_Releases, BFloat16Travel):
        net = _shard(_net(wrap), reshard_after_forward=2)
        losses.append(_train(net))
    assert all(map(torch.equal, *losses))


@pytest.mark.cross
@pytest.mark.parametrize("hidden", [12, 5, 1])
@distributed(2, 4, matrix=[4])
def test_training_equals_the_unsharded_model_with_the_same_rounding(hidden: int) -> None:
    net, plain = _shard(_net(BFloat16Travel, hidden)), _net(None, hidden)
    for step in range(3):
        loss = net(_rows(step)).square().mean()
        loss.backward()
        rounded = copy.deepcopy(plain)
        for module in rounded.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.bfloat16().float()
        expected = rounded(_rows(step)).square().mean()
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for param in rounded.parameters():
            dist.all_reduce(param.grad)
        with torch.no_grad():
            for param, source in zip(plain.parameters(), rounded.parameters(), strict=True):
                param -= 0.1 * source.grad / dist.get_world_size()
            for param in net.parameters():
                local = param.to_local()
                local -= 0.1 * param.grad.to_local()
        net.zero_grad()
    got = {name: _joined(param) for name, param in net.named_parameters()}
    assert_equal(got, parameters_of(plain), rounding(dist.get_world_size(), steps=3), "parameters")


def _joined(param: Any) -> torch.Tensor:
    parts = everyone(_plain(param)[0])
    return torch.cat(parts)[: param.size(0)]


@distributed(2)
def test_hooks_are_called_as_often_and_with_the_same_things_as_torchs() -> None:
    calls = []
    for engine in (fully_shard, torch_fsdp.fully_shard):
        calls_of_hooks()
        net = _shard(_net(BFloat16Travel, 5), engine)
        _train(net, 2)
        # torch gathers the last block ahead of its backward, where we leave what is unsharded alone
        calls.append(sorted(map(repr, calls_of_hooks())))
    assert any("'said before'" in call for call in calls[0])
    assert any("torch.Size([5, 8]), (8, 1)" in call for call in calls[0])
    assert [call.replace("FSDPResidual", "Residual") for call in calls[0]] == [
        call.replace("FSDPResidual", "Residual") for call in calls[1]
    ]


@distributed(2)
def test_the_hook_is_told_the_module_the_policy_and_the_unsharded_parameter() -> None:
    told: dict[str, Any] = {}

    class Curious(Wrapped):
        def fsdp_pre_all_gather(
            self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
        ) -> Any:
            told.update(module=module, policy=mp_policy)
            return (self._data,), None

        def fsdp_post_all_gather(
            self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
        ) -> Any:
            told.update(out=out, dtype=param_dtype)
            return None if out is not None else (outputs[0].to(param_dtype), outputs)

    policy = MixedPrecisionPolicy(param_dtype=torch.float64)
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(Curious(linear.weight.detach()))
    model: Any = fully_shard(linear, mp_policy=policy)
    seen = []
    linear.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    model(torch.ones(1, 4))
    assert told["module"] is linear and told["policy"] is policy
    assert told["dtype"] is torch.float64 and told["out"] is None
    model(torch.ones(1, 4))
    assert told["out"] is seen[0] and seen[1] is seen[0]


@distributed(2)
def test_parameters_with_hooks_and_without_travel_in_one_gather() -> None:
    net = _shard(_net(Int8Travel))
    log = EventLog()
    with observe(log):
        net(_rows(0))
    assert len(log.of(EventKind.ALL_GATHER)) == 2  # one per block


@pytest.mark.parametrize("kind", ["bfloat16", "two tensors"])
@distributed(2)
def test_what_was_gathered_and_made_is_freed_and_used_again(kind: str) -> None:
    wrap, patched = KINDS[kind]
    with patched():
        net = _shard(_net(wrap))
        used = []

        def look(module: nn.Module, args: Any) -> None:
            weight: Any = module.weight
            used.extend([weight.a, weight.b] if hasattr(weight, "a") else [weight])

        net[0].up.register_forward_pre_hook(look)
        loss = net(_rows(0)).square().mean()
        assert used and all(each.untyped_storage().nbytes() == 0 for each in used)
        first = [each.untyped_storage()._cdata for each in used]
        used.clear()
        loss.backward()
        net(_rows(1))
        assert [each.untyped_storage()._cdata for each in used] == first
        assert all(each.untyped_storage().nbytes() == 0 for each in used)


@distributed(2)
def test_a_graph_that_saved_the_unsharded_weight_sees_what_backward_gathers() -> None:
    results = []
    for wrap in (BFloat16Travel, lambda tensor: tensor.bfloat16().float()):
        net = _shard(_net(wrap))
        first, second = net(_rows(0)).sum(), net(_rows(1)).sum()
        (first + second).backward()
        results.append([param.grad.to_local().clone() for param in net.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", few(["bfloat16", "int8 and a scale", "two tensors"], "bfloat16"))
@distributed(4)
def test_a_smaller_world_for_the_backward_gather_changes_nothing(kind: str) -> None:
    wrap, patched = KINDS[kind]
    results = []
    with patched():
        for reshard in (2, True):
            net = _shard(_net(wrap), reshard_after_forward=reshard)
            loss = net(_rows(0)).sum()
            (group,) = the_state(net[0]).own_groups
            assert group.gathering.setup.prepare().inputs.has_copies is (reshard == 2)
            loss.backward()
            net.zero_grad()
            results.append(_train(net))
    assert all(map(torch.equal, *results))


class _Asked(BFloat16Travel):
    """Remembers which operators it was asked for."""

    operators: ClassVar[set[str]] = set()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the function
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        cls.operators.add(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


@distributed(2)
def test_a_subclass_is_asked_for_no_operator_that_torchs_own_does_not_ask_for() -> None:
    asked = []
    for engine in (fully_shard, torch_fsdp.fully_shard):
        net = _net(_Asked)
        _Asked.operators.clear()
        _shard(net, engine)
        net(_rows(0)).sum().backward()
        asked.append(set(_Asked.operators))
    assert asked[0] <= asked[1], asked[0] - asked[1]


@distributed(4)
def test_on_a_hybrid_mesh_the_hook_is_given_the_axis_that_shards() -> None:
    calls_of_hooks()
    mesh = cpu_mesh((2, 2), ("replicate", "shard"))
    _shard(_net(BFloat16Travel), mesh=mesh)(_rows(0))
    before = [call for call in calls_of_hooks() if call[0] == "pre"]
    assert before and all(call[1:3] == (2, 1) for call in before)


@distributed(4)
def test_tensor_parallel_parameters_may_have_hooks() -> None:
    mesh = cpu_mesh((2, 2), ("dp", "tp"))
    losses = []
    for wrap in (BFloat16Travel, lambda tensor: tensor.bfloat16().float()):
        net = _net(None)
        for block in net:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            for linear in (block.up, block.down):
                placed = linear.weight
                local = DTensor.from_local(
                    wrap(placed.to_local().detach()), mesh["tp"], placed.placements, run_check=False
                )
                linear.weight = nn.Parameter(local)
        net = _shard(net, mesh=mesh["dp"])
        generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
        loss = net(torch.randn(4, WIDTH, generator=generator)).square().mean()
        loss.backward()
        grads = [param.grad.full_tensor() for param in net.parameters()]
        losses.append([loss.detach(), *grads])
    assert all(map(torch.equal, *losses))


@distributed(2)
def test_a_parameter_with_hooks_may_be_cut_along_any_dim_that_is_even() -> None:
    class AsItIs(Wrapped):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return (self._data,), None

        def fsdp_post_all_gather(
            self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
        ) -> Any:
            return None if out is not None else (outputs[0], outputs)

    results = []
    for wrap, engine in (
        (AsItIs, fully_shard),
        (AsItIs, torch_fsdp.fully_shard),
        (None, fully_shard),
    ):
        net = _shard(_net(wrap), engine, shard_placement_fn=lambda param: Shard(param.ndim - 1))
        results.append(_train(net))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@distributed(2)
def test_hooks_may_be_put_on_plain_shards_after_the_meta_device() -> None:
    called: list[str] = []

    def before(self: Any, mesh: Any) -> Any:
        called.append("pre")
        return (self.bfloat16(),), None

    def after(self: Any, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        called.append("post")
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(outputs[0])
            return None
        used = outputs[0].to(param_dtype)
        return used, (used,)

    with torch.device("meta"):
        net = _net(None)
    _shard(net).to_empty(device="cpu")
    with torch.no_grad():
        for param in net.parameters():
            param.to_local().fill_(0.3)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            weight: Any = module.weight
            local = weight._local_tensor
            local.fsdp_pre_all_gather = before.__get__(weakref.proxy(local))
            local.fsdp_post_all_gather = after.__get__(weakref.proxy(local))
    used: list[float] = []
    net[0].up.register_forward_pre_hook(
        lambda module, args: used.append(module.weight[0, 0].item())
    )
    net(_rows(0)).sum().backward()
    assert called.count("pre") == called.count("post") > 0
    assert used == [torch.tensor(0.3).bfloat16().item()]


# -- what is refused ------------------------------------------------------------------------------


class _OneHook(Wrapped):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._data,), None


class _Forgetful(Wrapped):
    """What is made of it is a plain tensor."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the function
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return made if "new_zeros" not in str(func) else made._data

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self,), None

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not reached")


class _Answers(Wrapped):
    """Gives what a test wants it to give."""

    gives: Any = None
    makes: Any = None

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return type(self).gives(self._data)

    def fsdp_post_all_gather(self, outputs: Any, *args: Any, out: Any = None) -> Any:
        return type(self).makes(outputs)


class _TwoArguments(_Answers):
    def fsdp_pre_all_gather(self, mesh: Any, size: Any) -> Any:  # type: ignore[override]
        return (self._data,), None


@distributed(2)
def test_one_hook_without_the_other_is_refused_and_leaves_the_module_alone() -> None:
    net = _net(_OneHook)
    weight = net[0].up.weight
    with pytest.raises(ValueError, match=r"up\.weight .*no fsdp_post_all_gather; define both"):
        fully_shard(net[0])
    assert net[0].up.weight is weight


@distributed(2)
def test_a_subclass_that_is_lost_when_it_is_cut_is_refused() -> None:
    net = _net(_Forgetful)
    with pytest.raises(ValueError, match=r"up\.weight was a _Forgetful and became a Tensor"):
        fully_shard(net[0])


@distributed(2)
def test_a_state_dict_loads_into_the_subclass_and_one_without_hooks_cannot_take_its_place() -> None:
    net, other = _shard(_net(BFloat16Travel)), _net(None)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    net.load_state_dict(other.state_dict())
    assert isinstance(net[0].up.weight._local_tensor, BFloat16Travel)
    for param, expected in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(_joined(param), expected)
    with pytest.raises(ValueError, match=r"up\.weight was a BFloat16Travel .*assign=False"):
        net.load_state_dict(other.state_dict(), assign=True)


@distributed(2)
def test_a_wrong_signature_is_refused_by_name_before_any_gather() -> None:
    net = _shard(_net(_TwoArguments))
    with pytest.raises(ValueError, match=r"of 0\.up\.weight has the signature .*or the mesh only"):
        net(_rows(0))


@distributed(2)
def test_an_uneven_cut_along_another_dim_is_refused_by_name() -> None:
    net = _net(Int8Travel, 5)
    _shard(net, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    with pytest.raises(ValueError, match=r"0\.down\.weight has fsdp_pre_all_gather .*dim 1"):
        net(_rows(0))


@pytest.mark.parametrize(
    ("gives", "makes", "message"),
    [
        (lambda data: data, None, r"gave a Tensor; it must give \(tensors to gather, metadata\)"),
        (lambda data: (("a",), 1), None, "gave a str to gather; it must give plain tensors"),
        (lambda data: ((data,), 1), lambda outputs: outputs[0], "must give .*tensors to free"),
        (lambda data: ((data,), 1), lambda outputs: (None, ()), "gave a NoneType"),
        (lambda data: ((data,), 1), lambda outputs: (outputs[0][:1], ()), r"shape \(1, 8\)"),
    ],
)
@distributed(2)
def test_hooks_that_give_something_else_are_refused_by_name(
    gives: Any, makes: Any, message: str
) -> None:
    _Answers.gives, _Answers.makes = staticmethod(gives), staticmethod(makes)
    net = _shard(_net(_Answers))
    with pytest.raises(ValueError, match=rf"of 0\.up\.weight, a _Answers, .*{message}"):
        net(_rows(0))


@distributed(2)
def test_whether_to_free_what_was_gathered_is_a_bool() -> None:
    _Releases.answer = "yes"
    net = _shard(_net(_Releases))
    with pytest.raises(
        ValueError, match=r"of 0\.up\.weight, a _Releases, gave 'yes'; it must give"
    ):
        net(_rows(0))


@distributed(2)
def test_hooks_that_give_other_shapes_later_are_refused() -> None:
    _Answers.gives = staticmethod(lambda data: ((data,), 1))
    _Answers.makes = staticmethod(lambda outputs: (outputs[0], outputs))
    net = _shard(_net(_Answers))
    with torch.no_grad():
        net(_rows(0))
    _Answers.gives = staticmethod(lambda data: ((data[:1],), 1))
    with pytest.raises(ValueError, match=r"0\.up\.weight.* it must give what it did before"):
        net(_rows(0))


@distributed(2)
def test_an_uneven_parameter_may_be_padded_by_us_but_not_otherwise() -> None:
    _Answers.makes = staticmethod(lambda outputs: (outputs[0], outputs))
    _Answers.gives = staticmethod(lambda data: ((data,), 1))
    expected = _shard(_net(None, 5))(_rows(0))
    assert torch.equal(_shard(_net(_Answers, 5))(_rows(0)), expected)
    _Answers.gives = staticmethod(lambda data: ((data, torch.ones(1)), 1))
    with pytest.raises(ValueError, match=r"0\.up\.weight.* gave a tensor of shape \(1,\)"):
        _shard(_net(_Answers, 5))(_rows(0))
    assert len(everyone("raised")) == 2  # all ranks are still in step

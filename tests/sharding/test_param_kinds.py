"""Parameters of every shape and dtype: 0-d, non-contiguous, of whole numbers; plain and hybrid.

They train, are saved, loaded and clipped as in the unsharded model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.comm import EventKind, EventLog, observe
from fullshard.optim import clip_grad_norm_
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import (
    fully_shard,
    load_full_state_dict,
)
from support.checkpoints import assert_full_states_travel
from support.modules import Assembled
from support.parity.compare import assert_equal, full, gradients_of, parameters_of, rounding
from support.ranks import cpu_mesh, distributed
from support.surface.ranks import everyone


class Block(nn.Module):
    """A 0-d gain and limit, a transposed weight, a table of whole numbers, and a plain bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.limit = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(6, 5).t())
        self.bias = nn.Parameter(torch.randn(5))
        self.order = nn.Parameter(torch.tensor([4, 2, 0, 1, 3]), requires_grad=False)
        self.seen = nn.Parameter(torch.tensor(7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ self.weight.t() + self.bias)[..., self.order]
        out = torch.tanh(hidden * self.gain / self.limit) @ self.weight
        return x + out * (self.seen - 6)


def _build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def _sharded(mesh: DeviceMesh | None = None, **options: Any) -> Any:
    model = _build()
    for block in model:
        fully_shard(block, mesh=mesh or cpu_mesh(), **options)
    return fully_shard(model, mesh=mesh or cpu_mesh(), **options)


def _batch(step: int, rank: int | None = None) -> torch.Tensor:
    """The whole batch, or the rows that a rank sees."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return whole if rank is None else whole.chunk(dist.get_world_size())[rank]


def _train(model: nn.Module, steps: int, *, mine: bool, **options: Any) -> Any:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1, eps=0.1, **options)
    for step in range(steps):
        model(_batch(step, dist.get_rank() if mine else None)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _mesh(hybrid: bool) -> DeviceMesh:
    return cpu_mesh((2, 2), ("replicate", "shard")) if hybrid else cpu_mesh()


@pytest.mark.cross
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@distributed(2, 1, 4, matrix=[4])
def test_training_equals_the_unsharded_model(reshard: bool, foreach: bool) -> None:
    model, plain = _sharded(reshard_after_forward=reshard), _build()
    _train(model, 3, mine=True, foreach=foreach)
    _train(plain, 3, mine=False)
    allowed = rounding(dist.get_world_size(), steps=3)
    assert_equal(parameters_of(model), parameters_of(plain), allowed, "parameters")


@pytest.mark.parametrize("reshard", [True, 2])
@distributed(4)
def test_training_on_a_hybrid_mesh_and_through_a_smaller_world_equals_the_unsharded_model(
    reshard: bool | int,
) -> None:
    mesh = _mesh(hybrid=reshard is True)
    model, plain = _sharded(mesh, reshard_after_forward=reshard), _build()
    _train(model, 3, mine=True)
    _train(plain, 3, mine=False)
    assert_equal(parameters_of(model), parameters_of(plain), rounding(4, steps=3), "parameters")


@pytest.mark.parametrize("hybrid", [False, True])
@distributed(4)
def test_a_0d_parameter_is_whole_on_every_rank_and_used_as_a_0d_tensor(hybrid: bool) -> None:
    mesh = _mesh(hybrid)
    model = _sharded(mesh)
    gain: Any = model[0].gain
    assert type(gain.data) is DTensor and gain.placements == (Replicate(),) * mesh.ndim
    assert gain.shape == () and gain.to_local().shape == ()
    seen: list[Any] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.gain))
    model(_batch(0, dist.get_rank())).square().mean().backward()
    assert seen[0].shape == () and not isinstance(seen[0], DTensor)
    assert gain.grad.shape == () and gain.grad.placements == gain.placements
    assert len({value.item() for value in everyone(gain.grad.to_local())}) == 1


@distributed(2)
def test_all_of_a_group_still_travels_in_one_gather_and_one_reduction() -> None:
    model, log = _sharded(), EventLog()
    with observe(log):
        model(_batch(0, dist.get_rank())).square().mean().backward()
    assert len(log.of(EventKind.ALL_GATHER)) == 4  # in forward and in backward
    assert len(log.of(EventKind.REDUCE_SCATTER)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@distributed(2)
def test_mixed_precision_leaves_whole_numbers_alone_and_casts_the_rest(dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = _sharded(mp_policy=policy)
    seen: dict[str, torch.dtype] = {}
    model[0].register_forward_pre_hook(
        lambda module, args: seen.update({n: p.dtype for n, p in module.named_parameters()})
    )
    model(_batch(0, dist.get_rank())).float().square().mean().backward()
    whole = {"order": torch.int64, "seen": torch.int64}
    assert seen == {name: whole.get(name, dtype) for name in seen} and len(seen) == 6
    assert model[0].gain.grad.dtype == torch.float64


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@distributed(2)
def test_gradients_accumulated_without_communication_add_up(
    reduce_dtype: torch.dtype | None,
) -> None:
    model = _sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    plain = _build()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model(_batch(step, dist.get_rank())).square().mean().backward()
        plain(_batch(step)).square().mean().backward()
    allowed = rounding(2, steps=3, dtype=reduce_dtype)
    assert_equal(gradients_of(model), gradients_of(plain), allowed, "gradients")


@distributed(2)
def test_a_0d_parameter_that_one_rank_uses_gets_that_ranks_share() -> None:
    sometimes = Assembled(
        lambda m, x: x + m.bias * (m.gain if dist.get_rank() else 1.0),
        gain=nn.Parameter(torch.ones(())),
        never=nn.Parameter(torch.ones(())),
        bias=nn.Parameter(torch.ones(3)),
    )

    model: Any = fully_shard(sometimes)
    model(torch.ones(3)).sum().backward()
    assert full(model.gain.grad).item() == 3 / 2
    assert model.never.grad is None


@pytest.mark.cross
@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("hybrid", [False, True])
@distributed(4)
def test_a_0d_gradient_counts_once_in_the_norm(hybrid: bool, kind: float) -> None:
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        if clip is not clip_grad_norm_ and kind == float("inf"):
            continue  # torch has no largest element of an empty shard
        model, plain = _sharded(_mesh(hybrid)), _build()
        model(_batch(0, dist.get_rank())).square().mean().backward()
        plain(_batch(0)).square().mean().backward()
        got = clip(model.parameters(), 0.01, kind)
        want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, kind)
        assert_equal({"": full(got)}, {"": want}, rounding(4, steps=2), "norm")
        assert_equal(gradients_of(model), gradients_of(plain), rounding(4, steps=2), "gradients")


@pytest.mark.parametrize("set_to_none", [False, True])
@distributed(2)
def test_zero_grad_clears_a_0d_gradient(set_to_none: bool) -> None:
    model = _sharded()
    model(_batch(0, dist.get_rank())).square().mean().backward()
    model.zero_grad(set_to_none=set_to_none)
    gradient = model[0].gain.grad
    assert gradient is None if set_to_none else full(gradient).item() == 0


# -- state dicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hybrid", [False, True])
@distributed(4)
def test_full_state_dicts_are_made_and_loaded(hybrid: bool) -> None:
    expected = _build().state_dict()
    assert_full_states_travel(_sharded(_mesh(hybrid)), expected)


@distributed(2)
def test_a_meta_0d_parameter_is_materialised() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block()).double()
    for block in model:
        fully_shard(block)
    fully_shard(model).to_empty(device="cpu")
    load_full_state_dict(model, _build().state_dict())
    output = model(_batch(0, dist.get_rank()))
    expected = _build()(_batch(0, dist.get_rank()))
    assert_equal({"": output}, {"": expected}, rounding(2), "output")  # other strides


# -- cuts and refusals ----------------------------------------------------------------------------


@distributed(2)
def test_a_non_contiguous_parameter_has_contiguous_shards_and_its_own_shape_inside() -> None:
    model = _sharded()
    assert model[0].weight.to_local().is_contiguous()
    seen: list[torch.Tensor] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight + 0))
    model(_batch(0, dist.get_rank()))
    assert torch.equal(seen[0], _build()[0].weight)  # type: ignore[arg-type]  # a tensor


@distributed(2)
def test_a_0d_parameter_cannot_be_cut_by_name() -> None:
    with pytest.raises(ValueError, match=r"for gain, which has 0 dimensions"):
        fully_shard(_build()[0], shard_placement_fn=lambda param: Shard(0))


@distributed(2)
def test_a_sparse_gradient_is_reduced_in_another_dtype_after_accumulation() -> None:
    results = []
    for sparse in (True, False):
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model: Any = fully_shard(nn.Embedding(6, 3, sparse=sparse), mp_policy=policy)
        for step in range(2):
            model.set_requires_gradient_sync(step == 1)
            model(torch.tensor([step, dist.get_rank() + 2])).float().square().sum().backward()
        results.append(full(model.weight.grad))
    assert torch.equal(results[0], results[1]) and results[0].abs().sum() > 0

"""Training with weights and gradients in blocks of 8 bits, beside training without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fullshard.comm import EventKind, EventLog, TensorSpec, observe
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard, unsharded
from fullshard.wire import Quantised, WirePolicy
from fullshard.wire.blocks import in_blocks
from support import tp_model
from support.collectives import shard_of
from support.narrow import Net, assert_replicas_equal, batch, full, sharded, train
from support.ranks import distributed

FORMS = [Quantised(dtype, 16) for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)]
forms = pytest.mark.parametrize("form", FORMS, ids=["int8", "e4m3", "e5m2"])
all_forms = pytest.mark.parametrize("form", [*FORMS, torch.bfloat16], ids=str)


EXACT = ("*.1.weight", "*.bias")


def matrices(form: Any) -> WirePolicy:
    """Matrices in this form, both ways; norms and biases as they are, in the same groups."""
    return WirePolicy(gathers=form, reductions=form, exact=EXACT)


def _is_narrow(param: torch.Tensor, form: Any) -> bool:
    """Whether a parameter of ``Net`` travels in the form; a number by itself takes no block."""
    return param.ndim == 2 or (param.ndim == 0 and isinstance(form, torch.dtype))


def _arrived(whole: torch.Tensor, form: Any, ranks: int) -> torch.Tensor:
    """A full tensor as it arrives, of the shards of all ranks."""
    if not _is_narrow(whole, form):
        return whole
    if isinstance(form, torch.dtype):
        return whole.to(form).to(whole.dtype)
    spec = TensorSpec(shape=tuple(whole.shape), dtype=whole.dtype)
    coded = in_blocks(spec, form, ranks)
    return torch.cat([coded.rounded(shard_of(whole, spec, r, ranks), r) for r in range(ranks)])


@pytest.mark.cross
@all_forms
@distributed(2, 3)
def test_all_ranks_compute_with_what_arrives_and_keep_exact_shards(form: Any) -> None:
    net, exact = sharded(wire_policy=matrices(form)), dict(Net().named_parameters())
    with torch.no_grad(), unsharded(net):
        for name, param in net.named_parameters():
            assert param.dtype is torch.float32
            assert torch.equal(param, _arrived(exact[name].detach(), form, dist.get_world_size()))
    for name, param in (*net.named_parameters(), *net.state_dict().items()):
        assert torch.equal(full(param), exact[name])


@pytest.mark.device(paces=True)
@pytest.mark.cross
@all_forms
@distributed(2, 3)
def test_a_gradient_is_the_mean_in_fp32_of_what_arrives_added_in_rank_order(form: Any) -> None:
    net = sharded(wire_policy=WirePolicy(reductions=form, exact=EXACT))
    net(batch()).square().mean().backward()
    alone: Any = Net()
    alone(batch()).square().mean().backward()
    ranks = dist.get_world_size()
    for name, param in alone.named_parameters():
        parts = [torch.empty_like(param.grad) for _ in range(ranks)]
        dist.all_gather(parts, param.grad)
        total, *others = (_arrived(part, form, ranks) for part in parts)
        for part in others:
            total = total + part
        grad = full(net.get_parameter(name).grad)
        if _is_narrow(param, form):
            assert torch.equal(grad, total * (1 / ranks))
        else:
            torch.testing.assert_close(grad, total / ranks, rtol=1e-6, atol=1e-9)


@forms
@distributed(2)
def test_losses_stay_close_to_those_of_exact_training(form: Quantised) -> None:
    exact, _ = train(sharded(), steps=10)
    ours, _ = train(sharded(wire_policy=matrices(form)), steps=10)
    assert ours != exact
    assert ours[-1] < ours[0]
    tolerance = 0.01 if form.dtype is torch.int8 else 0.05
    for mine, other in zip(ours, exact, strict=True):
        assert abs(mine - other) < tolerance * exact[0]


@distributed(2)
def test_a_quarter_of_the_bytes_travels_but_for_scales_and_what_is_exact() -> None:
    def sent(**options: Any) -> dict[EventKind, int]:
        net = fully_shard(nn.Linear(512, 512, bias=False), **options)
        log = EventLog()
        with observe(log):
            net(torch.ones(2, 512)).square().mean().backward()
        kinds = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER)
        return {kind: sum(event.nbytes for event in log.of(kind)) for kind in kinds}

    form = Quantised(torch.int8)
    plain, ours = sent(), sent(wire_policy=WirePolicy(gathers=form, reductions=form))
    for kind, nbytes in plain.items():
        assert 0.25 < ours[kind] / nbytes < 0.255


@distributed(2)
def test_weights_that_are_used_in_bf16_arrive_rounded_once() -> None:
    form = FORMS[0]
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    net: Any = sharded(mp_policy=precision, wire_policy=matrices(form))
    with torch.no_grad(), unsharded(net):
        weight = net.blocks[1][0].weight
        assert weight.dtype is torch.bfloat16
        exact = Net().get_parameter("blocks.1.0.weight").detach()
        assert torch.equal(weight, _arrived(exact, form, 2).bfloat16())
    losses, _ = train(net)
    assert all(loss < 10 for loss in losses)


@distributed(2)
def test_a_matrix_cut_along_its_last_dim_travels_in_blocks_too() -> None:
    form = FORMS[0]
    options = {"shard_placement_fn": lambda param: Shard(param.ndim - 1) if param.ndim else None}
    exact, _ = train(sharded(**options), steps=5)
    ours, _ = train(sharded(wire_policy=matrices(form), **options), steps=5)
    assert ours != exact
    assert all(abs(a - b) < 0.01 * b for a, b in zip(ours, exact, strict=True))


@distributed(4)
def test_a_hybrid_mesh_trains_close_to_exact_and_its_replicas_stay_equal() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    exact, _ = train(sharded(mesh=mesh))
    net = sharded(mesh=mesh, wire_policy=matrices(FORMS[0]))
    ours, _ = train(net)
    assert all(abs(a - b) < 0.01 * b for a, b in zip(ours, exact, strict=True))
    assert_replicas_equal(net, mesh)


@distributed(4)
def test_beside_tensor_parallelism_it_trains_close_to_exact() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def losses(**options: Any) -> list[float]:
        model = tp_model.parallelize(tp_model.build(16, dtype=torch.float32), mesh["tp"])
        tp_model.shard(model, fully_shard, mesh=mesh["dp"], **options)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        for number in range(5):
            whole = tp_model.batch(number, dtype=torch.float32)
            loss = model(tp_model.rows_of(whole, mesh.get_local_rank("dp"), 2)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.item()))
        return found

    exact = losses()
    ours = losses(wire_policy=WirePolicy(gathers=FORMS[0], reductions=FORMS[0], exact=("*norm*",)))
    assert ours != exact
    assert all(abs(a - b) < 0.01 * exact[0] for a, b in zip(ours, exact, strict=True))


@distributed(2)
def test_gradients_accumulate_clip_and_step_and_a_checkpoint_goes_on_to_the_last_bit() -> None:
    def step(net: Any, optimizer: Any, number: int) -> float:
        for micro in range(2):
            net.set_requires_gradient_sync(micro == 1)
            loss = net(batch(2 * number + micro)).square().mean()
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    def made() -> tuple[Any, Any]:
        net = sharded(wire_policy=matrices(FORMS[0]))
        return net, torch.optim.AdamW(net.parameters(), lr=1e-2)

    net, optimizer = made()
    first = [step(net, optimizer, number) for number in range(3)]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    moments = copy.deepcopy(optimizer.state_dict())
    rest = [step(net, optimizer, number) for number in range(3, 6)]
    again, other = made()
    again.load_state_dict(state)
    other.load_state_dict(moments)
    assert [step(again, other, number) for number in range(3, 6)] == rest
    assert rest[-1] < first[0]


@distributed(2)
def test_training_after_inference_is_training_without_it() -> None:
    wanted, _ = train(sharded(wire_policy=matrices(FORMS[0])))
    net = sharded(wire_policy=matrices(FORMS[0]))
    for _ in range(2):
        with torch.inference_mode():
            net(batch())
    assert train(net)[0] == wanted


@distributed(2)
def test_a_step_whose_backward_raised_leaves_the_next_ones_as_they_were() -> None:
    def fails(gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")

    wanted, _ = train(sharded(wire_policy=matrices(FORMS[0])))
    net = sharded(wire_policy=matrices(FORMS[0]))
    output = net(batch())
    output.register_hook(fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        output.square().mean().backward()
    net.reset_iter_state()
    assert train(net)[0] == wanted


@distributed(2)
def test_a_gradient_that_is_not_finite_arrives_so_on_every_rank_that_holds_its_block() -> None:
    net = sharded(wire_policy=matrices(FORMS[0]))
    x = batch()
    if dist.get_rank() == 1:
        x[0, 0] = float("inf")
    net(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert not full(norm).isfinite()


@distributed(2)
def test_gradients_by_draws_differ_by_step_and_are_the_same_in_a_run_of_the_same_seed() -> None:
    def gradients(seed: int | None) -> list[torch.Tensor]:
        form = Quantised(torch.int8, 16, seed)
        net, found = sharded(wire_policy=WirePolicy(reductions=form, exact=("*.bias",))), []
        for _ in range(2):
            net(batch()).square().mean().backward()
            found.append(full(net.blocks[0][0].weight.grad).clone())
            net.zero_grad()
        return found

    nearest, drawn, again, other = (gradients(seed) for seed in (None, 3, 3, 4))
    assert torch.equal(*nearest)
    assert not torch.equal(*drawn)
    assert all(map(torch.equal, drawn, again))
    assert not torch.equal(drawn[0], other[0])
    torch.testing.assert_close(
        drawn[0], nearest[0], rtol=0.0, atol=nearest[0].abs().max().item() / 20
    )


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@distributed(2)
def test_codes_that_torch_cannot_cast_to_are_an_error_on_every_rank_before_any_gather(
    ranks: tuple[int, ...],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() in ranks:
            patch.setattr(Quantised, "casts_on", lambda self, device: False)
        net = sharded(wire_policy=matrices(FORMS[1]))
        with pytest.raises(Exception, match=r"weight is to travel as .*e4m3fn .* on cpu; pass"):
            net(batch())

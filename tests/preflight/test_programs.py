"""What users' programs do, beside what is planted in them: ``verify`` takes it, or says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu, mse_loss

from fullshard.preflight import Verdict, verify
from fullshard.sharding import FSDPModule
from support.modules import Stack
from support.products import few
from support.ranks import distributed
from support.verification.correct import Clipped, shard

WIDTH = 8


class Block(nn.Module):
    def __init__(self, dropout: float = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.drop(self.down(gelu(self.up(self.norm(x)))))
        return out


class Net(Stack):
    def __init__(self, **options: Any) -> None:
        blocks = [Block(**options) for _ in range(2)]
        super().__init__(blocks, head=nn.Linear(WIDTH, WIDTH))


class Words(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(self.embed(x))


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    inputs, targets = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(seed))
    return inputs, targets


def same_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(step, 0)


def loss(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return mse_loss(model(given[0]), given[1])


def verdict_of(layers: bool, **changes: Any) -> Verdict:
    program = {"build_model": Net, "shard": shard, "batch": batch, "loss": loss, "steps": 2}
    return verify(**{**program, "layers": layers, **changes})


@pytest.mark.parametrize("layers", [False, True])
@distributed(1)
def test_one_rank_is_enough(layers: bool) -> None:
    verdict = verdict_of(layers)
    assert verdict.equal, str(verdict)
    assert verdict.largest is not None


@distributed(2)
def test_an_optimizer_that_looks_at_all_gradients_is_compared_as_a_whole_and_not_by_layer() -> None:
    def clipping(params: Any) -> torch.optim.Optimizer:
        return Clipped(list(params), lr=1e-3)

    verdict = verdict_of(False, optimizer=clipping)
    assert verdict.equal, str(verdict)
    assert "not compared" not in str(verdict)
    verdict = verdict_of(True, optimizer=clipping)
    assert verdict.equal, str(verdict)
    assert "not compared: updates of blocks.0.down.bias" in str(verdict)


def _sequence_parallel(model: Any) -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
    kept: dict[str, Any] = {"sequence_dim": 0, "use_local_output": False}
    for block in model.blocks:
        plan: dict[str, Any] = {
            "norm": SequenceParallel(**kept),
            "drop": SequenceParallel(**kept),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(block, mesh["tensor"], plan)
    cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
    joined = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
    parallelize_module(model, mesh["tensor"], {"blocks.0": cut, "head": joined})
    shard(model, mesh=mesh["data"])


@distributed(2)
def test_tensor_parallel_activations_are_compared_whole_and_refused_as_inputs_of_layers() -> None:
    program = {"shard": _sequence_parallel, "batch": same_batch}
    verdict = verdict_of(False, **program)
    assert verdict.equal, str(verdict)
    with pytest.raises((TypeError, RuntimeError), match=r"blocks\.0 is given a DTensor"):
        verdict_of(True, **program)


@distributed(2)
def test_torchs_fsdp1_whose_parts_only_it_puts_together_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    for layers in (False, True):
        for kept in (False, True):
            with pytest.raises((ValueError, RuntimeError), match=r"FSDP1 .* fullshard\.wrappers"):
                verdict_of(
                    layers,
                    shard=lambda model, kept=kept: FullyShardedDataParallel(
                        model, use_orig_params=kept, device_id=cpu
                    ),
                )


@pytest.mark.parametrize("layers", [False, True])
@distributed(2)
def test_an_optimizer_that_needs_a_closure_is_refused(layers: bool) -> None:
    with pytest.raises(ValueError, match=r"a LBFGS, whose step\(\) needs a closure"):
        verdict_of(layers, optimizer=torch.optim.LBFGS)


@distributed(2)
def test_layers_of_a_compiled_model_are_refused() -> None:
    def compiled(model: Any) -> None:
        model.blocks[0].compile(backend="eager")
        shard(model)

    with pytest.raises(TypeError, match=r"blocks\.0 is compiled"):
        verdict_of(True, shard=compiled)


@distributed(2)
def test_a_collective_in_the_loss_is_refused_instead_of_waited_for() -> None:
    def summed(model: Any, given: Any) -> torch.Tensor:
        found = loss(model, given)
        dist.all_reduce(found.detach().clone())
        return found

    with pytest.raises(RuntimeError, match=r"c10d::allreduce_, a collective, and rank 0 runs it"):
        verdict_of(False, loss=summed)
    assert verdict_of(True, loss=summed).equal  # a loss belongs to no layer


@distributed(2)
def test_a_mode_that_sharding_changed_is_a_cause_or_a_note() -> None:
    def evaluating(model: Any) -> None:
        shard(model)
        model.eval()

    program = {"build_model": lambda: Net(dropout=0.2), "shard": evaluating, "aligned_seeds": True}
    verdict = verdict_of(False, **program)
    assert verdict.causes[0].name == "train and eval mode mixed up"
    assert "is in another mode, train or eval" in str(verdict_of(True, **program))


@pytest.mark.parametrize("layers", few([False, True], False))
@distributed(2)
def test_what_both_runs_would_pass_over_is_remarked(layers: bool) -> None:
    def masked(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed = 10 * step + dist.get_rank()
        ids = torch.randint(8, (4, 3), generator=torch.Generator().manual_seed(seed))
        labels = ids.clone()
        labels[:, : 1 + dist.get_rank()] = -100
        return ids, labels

    def token_loss(model: Any, given: Any) -> torch.Tensor:
        return cross_entropy(model(given[0]).flatten(0, 1), given[1].flatten())

    program = {"build_model": Words, "batch": masked, "loss": token_loss}
    told = str(verdict_of(layers, **program))
    assert "unequal numbers of -100 ([4, 8])" in told
    counted = verdict_of(layers, **program, tokens=lambda given: int((given[1] != -100).sum()))
    assert "-100" not in str(counted)
    assert counted.equal is layers  # between the layers lies the loss
    assert "given the same batch" in str(verdict_of(layers, batch=same_batch))
    assert "given the same batch" not in str(verdict_of(layers))


@distributed(2)
def test_gradients_of_a_part_that_is_never_synchronized_are_missing() -> None:
    def forgetful(model: Any, given: Any) -> torch.Tensor:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(False)
        (0.5 * loss(model, (given[0][:2], given[1][:2]))).backward()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)
            blocks: Any = model.blocks
            blocks[0].set_requires_gradient_sync(False)
        return 0.5 * loss(model, (given[0][2:], given[1][2:]))

    for layers in (False, True):
        verdict = verdict_of(layers, loss=forgetful)
        assert verdict.first is not None
        assert verdict.first.name.startswith("blocks.0.")
        assert verdict.causes[0].name == "gradients that are not reduced"

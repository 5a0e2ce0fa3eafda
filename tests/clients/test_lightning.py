"""Lightning: Fabric and its Trainer with ``ModelParallelStrategy`` (FSDP2), and with FSDP1.

Run by ``nox -s clients``. torch's own FSDP1 does not run in Lightning without an accelerator, so
ours is compared with what FSDP2 gives there.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.wrappers import install, uninstall
from support.clients import Run, beside_torch, engine_of
from support.modules import Stack
from support.ranks import distributed

pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # what libraries say of their own parts
]


def two_blocks() -> Stack:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
    return Stack(blocks, head=nn.Linear(8, 4))


def _parallelise(model: Any, mesh: Any) -> Any:
    """What a user of FSDP2 in Lightning writes."""
    fully_shard = importlib.import_module("torch.distributed._composable.fsdp").fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def _rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, 8, generator=drawn), torch.randn(4, 4, generator=drawn)


def _set_up(kind: str, whole: bool) -> tuple[Any, Any, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy

    class OnCPU(FSDPStrategy):  # type: ignore[misc,unused-ignore]  # untyped where it is missing
        """Lightning refuses the strategy itself without an accelerator."""

    strategy: Any = ModelParallelStrategy(
        _parallelise,
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=not whole,
    )
    if kind == "fsdp1":
        strategy = OnCPU(
            auto_wrap_policy={nn.Sequential}, state_dict_type="full" if whole else "sharded"
        )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = two_blocks()
    if kind == "fsdp1":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return fabric, *fabric.setup(model, optimizer)
    made = fabric.setup_module(model)
    return fabric, made, fabric.setup_optimizers(torch.optim.AdamW(made.parameters(), lr=1e-2))


def _fabric(kind: str, whole: bool, folder: Path) -> Run:
    fabric, model, optimizer = _set_up(kind, whole)
    run = Run(engine=engine_of(model.module), losses=[])

    def step(number: int) -> float:
        for micro in range(2):
            x, y = _rows(2 * number + micro)
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = (model(x) - y).square().mean()
                fabric.backward(loss / 2)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
        run.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    run.losses = [step(number) for number in range(3)]
    fabric.save(folder / "saved", {"model": model, "optimizer": optimizer, "step": 3})
    run.losses += [step(number) for number in (3, 4)]
    fabric, model, optimizer = _set_up(kind, whole)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(folder / "saved", state)
    assert state["step"] == 3
    run.resumed = [step(number) for number in (3, 4)]
    return run


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "sharded"])
@distributed(2, timeout=280)
def test_fabric_trains_saves_and_resumes_as_on_torchs_own(whole: bool, tmp_path: Path) -> None:
    beside_torch(lambda folder: _fabric("fsdp2", whole, folder), tmp_path)


@distributed(2, timeout=280)
def test_fabrics_fsdp1_gives_what_its_fsdp2_gives(tmp_path: Path) -> None:
    """With sharded checkpoints: it takes a model with ``DTensor``s for one of FSDP2 otherwise."""
    (tmp_path / "fsdp1").mkdir(exist_ok=True)
    right = _fabric("fsdp2", True, tmp_path)
    install()
    try:
        run = _fabric("fsdp1", False, tmp_path / "fsdp1")
    finally:
        uninstall()
    assert run.engine == "fullshard"
    torch.testing.assert_close(run.losses, right.losses)
    torch.testing.assert_close(run.norms, right.norms)
    assert run.resumed == run.losses[3:]

"""torchao's weights that choose what travels, NF4 and float8, on our engine and on torch's own.

Run by ``nox -s clients``, where torchao is installed; each test trains on both engines and expects
the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import DTensor

from fullshard.wrappers import fsdp
from support.ranks import distributed

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # what torchao says of its own parts
]

WIDTH = 512  # NF4 has blocks of 64 * 256 elements, whole ones on each rank
BOTH = (fsdp, torch_fsdp)


class Adapted(nn.Module):
    """A frozen weight of 4 bits and a LoRA adapter over it."""

    def __init__(self, dtype: torch.dtype) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        base = torch.randn(WIDTH, WIDTH, dtype=dtype) * 0.02
        self.weight = nn.Parameter(to_nf4(base), requires_grad=False)
        self.down = nn.Linear(WIDTH, 4, bias=False, dtype=dtype)
        self.up = nn.Linear(4, WIDTH, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        base: torch.Tensor = linear_nf4(x, self.weight)
        return base + self.up(self.down(x))


def _adapted(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, 4, dtype=dtype)
    return nn.Sequential(Adapted(dtype), nn.Tanh(), Adapted(dtype), nn.Tanh(), head)


def _float8() -> nn.Sequential:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    layers = (nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    model = nn.Sequential(*layers).bfloat16()
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    return model


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a parameter's shard is made of."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flatten = getattr(local, "__tensor_flatten__", None)
    if flatten is None:
        return [local.detach().clone()]
    parts = [getattr(local, name) for name in flatten()[0]]
    return [each.detach().clone() for each in parts]


def _trained(
    door: Any,
    model: Any,
    after_step: Callable[[nn.Module], None] = lambda model: None,
    **options: Any,
) -> list[torch.Tensor]:
    """The losses of three steps, what all parameters are made of then, and an output."""
    for layer in model[::2]:
        door.fully_shard(layer, **options)
    door.fully_shard(model, **options)
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    found = []
    dtype, width = model[-1].weight.dtype, model[-1].in_features
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        rows = torch.randn(8, width, generator=generator).to(dtype)
        loss = model(rows).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)
        found.append(loss.detach())
    model.load_state_dict(model.state_dict())
    found += [part for param in model.parameters() for part in _plain(param)]
    return [*found, model(torch.ones(2, width, dtype=dtype)).detach()]


def _assert_equal_bits(build: Callable[[], nn.Sequential], options: Any, **how: Any) -> None:
    model = build()
    ours, theirs = (_trained(door, copy.deepcopy(model), **how, **options(door)) for door in BOTH)
    same = [torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True)]
    assert all(same), same


OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "defaults": lambda door: {},
    "bf16": lambda door: {"mp_policy": door.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "kept": lambda door: {"reshard_after_forward": False},
    "offload": lambda door: {"offload_policy": door.CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.parametrize("name", OPTIONS)
@distributed(2)
def test_nf4_under_lora_trains_as_under_torchs_own(name: str) -> None:
    _assert_equal_bits(_adapted, OPTIONS[name])


@distributed(2)
def test_nf4_under_lora_in_bfloat16_trains_as_under_torchs_own() -> None:
    _assert_equal_bits(lambda: _adapted(torch.bfloat16), OPTIONS["kept"])


@distributed(2)
def test_nf4_whose_blocks_do_not_fit_the_ranks_is_an_error_that_names_the_parameter() -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    layer = nn.Linear(64, 3 * 256, bias=False)
    layer.weight = nn.Parameter(to_nf4(torch.randn(3 * 256, 64)), requires_grad=False)
    with pytest.raises(AssertionError, match="divisible by") as raised:
        fsdp.fully_shard(nn.Sequential(layer))
    assert "while cutting 0.weight, a NF4Tensor of shape (768, 64)" in raised.value.__notes__[0]


@pytest.mark.parametrize("scales", ["computed in the gather", "precomputed"])
@pytest.mark.parametrize("name", ["defaults", "kept"])
@distributed(2)
def test_float8_weights_are_gathered_and_trained_as_under_torchs_own(
    name: str, scales: str
) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    how = {"after_step": precompute_float8_dynamic_scale_for_fsdp} if scales[0] == "p" else {}
    _assert_equal_bits(_float8, OPTIONS[name], **how)

"""Helpers of training libraries that reach torch's private names, on torch's own and on ours.

Each is skipped where its library is not installed: torchtitan, verl, VeOmni and NeMo-Automodel ask
for versions of other libraries that the rest of ``nox -s clients`` does not run with.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from support.clients import Run, beside_torch, engine_of
from support.modules import Assembled
from support.ranks import cpu_mesh, distributed
from support.surface.ranks import full_parameters

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # what libraries say of themselves
]

WIDTH, VOCABULARY = 16, 32


@pytest.fixture(autouse=True)
def _installed(name: str) -> None:
    """Skips a test where the module ``name`` of a library cannot be imported."""
    library = name.partition(".")[0]
    pytest.importorskip(name, reason=f"{library} is not installed", exc_type=ImportError)


class Layer(Assembled):
    """A block of the decoder."""


def decoder() -> Any:
    """A small decoder, with the attributes that all these libraries look for."""
    torch.manual_seed(0)

    def block(number: int) -> nn.Module:
        experts: Any = nn.Linear(WIDTH, WIDTH, bias=False)
        experts.num_experts = 2
        routed = Assembled(lambda self, x: self.inner_experts(x), inner_experts=experts)
        moe = Assembled(lambda self, x: self.routed_experts(x), routed_experts=routed)
        dense = nn.Linear(WIDTH, WIDTH)
        made: Any = Layer(lambda self, x: x + self.moe(torch.tanh(self.dense(x))), moe=moe)
        made.dense, made.moe_enabled = dense, number == 1
        vars(moe)["experts"] = experts  # no second name in the state dict
        return made

    layers = nn.ModuleDict({str(number): block(number) for number in range(2)})
    return Assembled(
        _run_decoder,
        tok_embeddings=nn.Embedding(VOCABULARY, WIDTH),
        layers=layers,
        norm=nn.LayerNorm(WIDTH),
        lm_head=nn.Linear(WIDTH, VOCABULARY, bias=False),
        enable_weight_tying=False,
    )


def _run_decoder(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = model.tok_embeddings(tokens)
    for layer in model.layers.values():
        x = layer(x)
    logits: torch.Tensor = model.lm_head(model.norm(x))
    return logits


def trained(
    model: Any,
    *,
    between: Callable[[], object] = lambda: None,
    weights: Callable[[nn.Module], dict[str, torch.Tensor]] = full_parameters,
) -> Run:
    """What three steps give; ``between`` runs after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    for step in range(3):
        drawn = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (2, 8), generator=drawn)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        between()
    return Run(engine=engine_of(model), losses=losses, weights=weights(model))


@pytest.mark.parametrize("ep_degree", [2, 1])
@pytest.mark.parametrize("name", ["torchtitan.distributed.fsdp"])
@distributed(4)
def test_torchtitans_decoder_with_experts_on_a_mesh_of_their_own(
    name: str, ep_degree: int, tmp_path: Path
) -> None:
    helpers = importlib.import_module(name)

    def run(_: Path) -> Run:
        model = decoder()
        grid = cpu_mesh((2, 2), ("efsdp", "ep"))
        with mock.patch.object(helpers, "disable_fsdp_gradient_division"):  # gloo has no such sum
            helpers.apply_fsdp_to_decoder(
                model,
                cpu_mesh(),
                torch.float32,
                torch.float32,
                pp_enabled=False,
                ep_degree=ep_degree,
                edp_mesh=grid["efsdp"],
            )
        return trained(model)

    beside_torch(run, tmp_path, tolerance=1e-5)  # gloo adds four ranks in another order


NEMO = "nemo_automodel.components"


@pytest.mark.parametrize(
    "name", [f"{NEMO}.models.{each}.fsdp" for each in ("diffusion_gemma", "deepseek_v4")]
)
@distributed(2)
def test_nemos_helpers_shard_a_module_once_and_read_its_policy(name: str, tmp_path: Path) -> None:
    helpers = importlib.import_module(name)
    heads = importlib.import_module(f"{NEMO}.models.common.utils")
    syncing = importlib.import_module(f"{NEMO}.distributed.utils")

    def run(_: Path) -> Run:
        model = decoder()
        options: Any = {
            "mesh": cpu_mesh(),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": OffloadPolicy(),
        }
        for _again in range(2):  # the second time nothing is left to do
            for layer in model.layers.values():
                if "diffusion_gemma" in name:
                    helpers.fully_shard_diffusion_gemma(layer, **options)
                else:
                    helpers._fully_shard_once(layer, **options)
            helpers._fully_shard_once(model.lm_head, **options)
            helpers._fully_shard_once(model, **options)
        assert helpers._has_fsdp_state(model) and not helpers._has_fsdp_state(model.norm)
        syncs = itertools.cycle([False, True])

        def between() -> None:
            with syncing.get_sync_ctx(model, next(syncs), True):
                pass  # it only says what the next backward does

        found = trained(model, between=between)
        logits = heads.compute_lm_head_logits(model.lm_head, torch.ones(2, WIDTH)).logits
        assert logits.dtype is torch.bfloat16
        return found

    beside_torch(run, tmp_path)


OFFLOADERS = [
    ("veomni.distributed.offloading", "offload_model_to_cpu"),
    ("verl.workers.engine.automodel.utils", "offload_automodel_model_to_cpu"),
    ("verl.workers.engine.veomni.utils", "offload_veomni_model_to_cpu"),
]


@pytest.mark.parametrize(("name", "function"), OFFLOADERS, ids=[name for name, _ in OFFLOADERS])
@distributed(2)
def test_offloading_resets_the_state_of_torchs_and_of_ours(
    name: str, function: str, tmp_path: Path
) -> None:
    helpers = importlib.import_module(name)

    def run(_: Path) -> Run:
        model = decoder()
        shard = importlib.import_module("torch.distributed.fsdp").fully_shard
        for layer in model.layers.values():
            shard(layer, mesh=cpu_mesh())
        shard(model, mesh=cpu_mesh())
        return trained(model, between=lambda: getattr(helpers, function)(model, False))

    beside_torch(run, tmp_path)

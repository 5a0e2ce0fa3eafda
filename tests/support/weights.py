"""A model with all that weights come as, ways to shard it, and files by the safetensors library."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.sharding import fully_shard


class Assorted(nn.Module):
    """Embedding and head are tied; ``ignored`` is not sharded; ``steps`` and ``mean`` persist."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.ignored = nn.Parameter(torch.randn(5, 3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.up.bias.requires_grad_(False)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(self.up(hidden).relu()) * self.scale
        return self.head(hidden)


def untied(model: nn.Module) -> dict[str, torch.Tensor]:
    """A plain model's state dict as transformers writes it: without the tied copy, contiguous."""
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    state.pop("head.weight", None)
    return state


def saved(folder: Path, state: dict[str, torch.Tensor], files: int = 1) -> Path:
    """The folder with ``state`` in one file, or in several with an index, by the library itself."""
    import json

    folder.mkdir(exist_ok=True)
    if files == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    weight_map = {}
    for number in range(files):
        part = {name: state[name] for name in list(state)[number::files]}
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def shard_assorted(model: Assorted, mesh: DeviceMesh, dim: int = 0) -> Assorted:
    """Shards it in two groups, matrices along ``dim``."""

    def placed(param: nn.Parameter) -> Shard:
        return Shard(dim if param.ndim > 1 else 0)

    fully_shard(model.up, mesh=mesh, shard_placement_fn=lambda p: placed(p) if p.ndim else None)
    fully_shard(
        model,
        mesh=mesh,
        shard_placement_fn=lambda p: placed(p) if p.ndim else None,
        ignored_params={model.ignored},
    )
    return model


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers, whole, by name; every rank calls it."""
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of all safetensors files of a folder, read by the library itself."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found

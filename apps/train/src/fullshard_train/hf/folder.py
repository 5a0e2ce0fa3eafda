"""The folder of a model, as `hf download` leaves it, and whether the model can be trained.

Owns reading its small files: the configuration, the headers of its weights, the names of what
belongs to its tokenizer. Refuses the network: a name that is no folder is an error.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fullshard_train.errors import TrainError
from fullshard_train.settings.sections import HFConfig

__all__ = ["DTYPES", "ModelFolder", "open_folder", "read_json"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
)  # the first counts, as for transformers
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
# Files for `from_pretrained` of a tokenizer, a processor or `generate`, in addition to the weights.
_COMPANIONS = (
    *_TOKENIZER,
    "added_tokens.json",
    "chat_template.*",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "tokenizer.*.model",
    "tokenizer_config.json",
    "chat_templates/*",
    "additional_chat_templates/*",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What lies where: `root` is the folder, `config` its config.json.

    `weights` is the safetensors file, or the index of several, and None where weights are random.
    `stored` is the dtype that most of their elements have; float32 for random ones, unless the
    configuration names another.
    """

    root: Path
    config: Path
    weights: Path | None
    stored: torch.dtype

    @property
    def has_tokenizer(self) -> bool:
        """Whether the files of a tokenizer are present."""
        return any((self.root / name).is_file() for name in _TOKENIZER)

    def companions(self) -> Iterator[Path]:
        """Names, in the folder, of the files to hand on: tokenizer, generation defaults."""
        for pattern in _COMPANIONS:
            for path in sorted(self.root.glob(pattern)):
                if path.is_file():
                    yield path.relative_to(self.root)

    def fingerprint(self) -> str:
        """A text that changes when the architecture does, or the files of the weights."""
        digest = hashlib.sha256(self.config.read_bytes())
        for path in _files_of(self.weights):
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            with path.open("rb") as file:
                digest.update(file.read(int.from_bytes(file.read(8), "little")))
                file.seek(-min(1 << 16, path.stat().st_size), 2)
                digest.update(file.read())
        return digest.hexdigest()


def open_folder(section: HFConfig) -> ModelFolder:
    """The model type of the config; called on one rank, reads headers alone.

    Raises:
        TrainError: it is not there, or there is something in it that cannot be trained.
    """
    given = Path(section.model)
    if not section.model:
        raise TrainError(
            "config hf.model = '': give the folder of a model (config.json, *.safetensors; `hf"
            " download NAME --local-dir FOLDER` makes one), or a config.json"
        )
    config = given / "config.json" if given.is_dir() else given
    if not config.is_file():
        what = "no config.json in it" if given.is_dir() else "no such folder"
        raise TrainError(
            f"config hf.model = {section.model!r}: {what}; give a folder that is here (`hf download"
            f" NAME --local-dir FOLDER` fetches one), or a config.json"
        )
    table = read_json(config)
    if table.get("quantization_config"):
        raise TrainError(
            f"config hf.model = {section.model!r}: its weights are quantized"
            f" ({table['quantization_config'].get('quant_method', 'quantization_config')}), which"
            " cannot be trained; give the folder of the model in bfloat16 or float32"
        )
    weights = None if section.weights == "random" else _weights_in(config.parent)
    stored = _dtype_of(table) if weights is None else _most_stored(weights)
    return ModelFolder(root=config.parent, config=config, weights=weights, stored=stored)


def _weights_in(root: Path) -> Path:
    for name in _WEIGHTS:
        if (root / name).is_file():
            return root / name
    others = sorted(path.name for path in root.glob("*.bin")) or ["no weights"]
    raise TrainError(
        f"config hf.model = {str(root)!r}: has no model.safetensors and no index of several, but"
        f" {', '.join(others)}; save it by transformers' save_pretrained first, or begin anew with"
        " --set hf.weights=random"
    )


def _files_of(weights: Path | None) -> list[Path]:
    if weights is None:
        return []
    if weights.suffix != ".json":
        return [weights]
    names = sorted(set(read_json(weights).get("weight_map", {}).values()))
    if not names:
        raise TrainError(f"model {weights}: an index without a weight_map; download it again")
    return [weights.parent / name for name in names]


@functools.cache
def _most_stored(weights: Path) -> torch.dtype:
    elements: Counter[str] = Counter()
    for path in _files_of(weights):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    cut = file.get_slice(name)
                    elements[cut.get_dtype()] += torch.Size(cut.get_shape()).numel()
        except (OSError, SafetensorError) as error:
            raise TrainError(f"model {path}: {error}; download it again") from error
    name = elements.most_common(1)[0][0] if elements else "nothing"
    if name not in _STORED:
        raise TrainError(
            f"model {weights}: its weights are {name}; float32, bfloat16 and float16 can be trained"
        )
    return _STORED[name]


def _dtype_of(table: dict[str, Any]) -> torch.dtype:
    name = str(table.get("dtype") or table.get("torch_dtype") or "float32")
    if name not in DTYPES:
        raise TrainError(
            f"model's config.json: dtype = {name!r}: must be one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        TrainError: there is none.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainError(f"model {path}: cannot be read as JSON: {error}") from error
    if not isinstance(table, dict):
        raise TrainError(f"model {path}: holds no JSON object, but a {type(table).__name__}")
    return table

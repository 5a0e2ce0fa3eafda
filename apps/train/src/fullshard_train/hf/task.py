"""The task of predicting the next token of documents, with a model of transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import nn

from fullshard.sharding import FSDPModule
from fullshard_train.errors import TrainError
from fullshard_train.hf.documents import read_documents
from fullshard_train.hf.extra import require_extra
from fullshard_train.hf.folder import open_folder
from fullshard_train.hf.isolation import require_isolation
from fullshard_train.hf.model import (
    Causal,
    build_model,
    flops_per_token,
    layers_of,
    read_config,
    vocabulary,
)
from fullshard_train.hf.packing import Documents, Rows, pack
from fullshard_train.hf.prompts import Coder
from fullshard_train.hf.sampling import continue_text, prompt_tokens
from fullshard_train.hf.tokens import choose_coder, halves, tokenize
from fullshard_train.hf.weights import fill
from fullshard_train.ranks.distributed import World, broadcast_bytes, on_main, raise_together
from fullshard_train.seeds import generator_for
from fullshard_train.settings.config import Config
from fullshard_train.task import Batch, Measure
from fullshard_train.text.baselines import unigram_loss

__all__ = ["HFTask", "load_task"]


def load_task(config: Config, world: World) -> HFTask:
    """The task with the documents that rank 0 reads and tokenizes.

    Raises:
        TrainError: on every rank, when there are no data, or model, tokenizer and config do
            not fit.
    """
    names = ("transformers", "peft") if config.hf.method == "lora" else ("transformers",)
    raise_together(lambda: require_extra(*names))  # hosts may differ
    read: list[Documents] = []
    fingerprint = on_main(lambda: _read(config, read))
    tokens = broadcast_bytes(_bytes_of(read[0].tokens) if world.is_main else None)
    lengths = broadcast_bytes(_bytes_of(read[0].lengths) if world.is_main else None)
    learned = broadcast_bytes(_bytes_of(read[0].learned) if world.is_main else None)
    documents = Documents(
        tokens=tokens.view(torch.int32),
        learned=learned.view(torch.bool),
        lengths=lengths.view(torch.int64),
    )
    return raise_together(lambda: HFTask(config, documents, model=fingerprint))


def _read(config: Config, read: list[Documents]) -> str:
    """Read everything that may be wrong; return the fingerprint of the model's folder."""
    section = config.hf
    folder = open_folder(section)
    with torch.device("meta"):
        build_model(config)
    described = read_config(folder)
    longest = getattr(described.get_text_config(), "max_position_embeddings", None)
    if longest is not None and section.block > longest:
        raise TrainError(
            f"config hf.block = {section.block}: the model has {longest} positions; give at most"
            " that many"
        )
    coder = choose_coder(section, folder, vocabulary(described))
    prompt_tokens(coder, config.sample)
    found = read_documents(config.data.source, key=section.text_key)
    read.append(tokenize(found, coder, section))
    return folder.fingerprint()


def _bytes_of(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()


class HFTask:
    """Next-token prediction on documents; satisfies `fullshard_train.task.Task`.

    Args:
        config: of the run.
        documents: all of them, in the order of the source.
        model: a text that changes when the model's folder does.

    Raises:
        TrainError: too few documents to hold one out, or this host has no such folder.
    """

    unit = "nats per token"
    item = "tokens"
    measure = Measure.LOSS
    baselines_are = (
        "cross-entropy of token frequencies, counted on what is learned with add-one smoothing, on"
        " the same held-out tokens"
    )

    def __init__(self, config: Config, documents: Documents, *, model: str) -> None:
        self.config = config
        folder = open_folder(config.hf)
        self._vocabulary = vocabulary(read_config(folder))
        self._coder: Coder = choose_coder(config.hf, folder, self._vocabulary)
        train, held_out = halves(documents, config.data.held_out_every)
        self._documents = documents
        self._train = self._rows(train)
        self._held_out = self._rows(held_out)
        # An order is one number per row; two are in use only where a batch spans two epochs.
        self._order = lru_cache(maxsize=2)(self._shuffle)
        digest = hashlib.sha256(f"{model} {config.hf.block} {self._coder.name}".encode())
        digest.update(_bytes_of(documents.tokens))
        digest.update(_bytes_of(documents.lengths))
        if not documents.learned.all():  # so runs from before there were prompts go on
            digest.update(_bytes_of(documents.learned))
        self.fingerprint = digest.hexdigest()

    def _rows(self, documents: Documents) -> Rows:
        section = self.config.hf
        apart = section.packing == "none"
        return Rows(
            documents,
            pack(documents.lengths.tolist(), section.block, apart=apart),
            block=section.block,
            padding=0 if self._coder.end is None else self._coder.end,
            restart=section.packing == "documents",
        )

    @property
    def data_is(self) -> str:
        """The source, the sizes of its two parts, and how full rows are."""
        rows, documents = len(self._train), self._train.documents
        tokens, block = len(documents.tokens), self.config.hf.block
        judged = len(self._held_out.documents.lengths)
        learned = int(documents.learned.sum())
        prompts = "" if learned == tokens else f" ({tokens - learned:,} of them in prompts)"
        return (
            f"{self.config.data.source}: {len(documents.lengths):,} documents of {tokens:,}"
            f" {self._coder.name}{prompts} to learn from, in {rows:,} rows of {block}"
            f" ({tokens / rows / block:.0%} full); {judged:,} held out"
        )

    @property
    def held_out_rows(self) -> int:
        """The number of held-out rows that are judged."""
        return min(len(self._held_out), self.config.train.held_out_rows)

    def build_model(self) -> nn.Module:
        """A `Causal`."""
        return build_model(self.config)

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """The model's own layers."""
        assert isinstance(model, Causal), type(model)
        return layers_of(model)

    def flops_per_item(self, model: nn.Module) -> float:
        """See `fullshard_train.hf.model.flops_per_token`; prompts are computed, but no items."""
        assert isinstance(model, Causal), type(model)
        learned = self._train.documents.learned
        return flops_per_token(model, self.config.hf.block) * learned.numel() / int(learned.sum())

    def fill(self, model: nn.Module, seed: int) -> None:
        """See `fullshard_train.hf.weights.fill`; then packed documents are found to be apart.

        Raises:
            TrainError: weights do not fit, or documents are not apart.
        """
        assert isinstance(model, Causal), type(model)
        fill(model, self.config, seed)
        if self.config.hf.packing == "documents" and isinstance(model, FSDPModule):
            require_isolation(model, self.config.hf.block, self._vocabulary)

    def counted(self, step: int) -> int:
        """The tokens that are predicted in update `step`."""
        rows = range(self.config.train.batch)
        return self._train.counted([self._number(step, row) for row in rows])

    def training_rows(self, step: int, rows: range) -> Batch:
        """Rows `step * batch + row`, for each row, of an endless sequence.

        An epoch contains every row once, in a new order.
        """
        return self._train.batch([self._number(step, row) for row in rows])

    def evaluation_rows(self, rows: range) -> Batch:
        """These held-out rows."""
        return self._held_out.batch(rows)

    def baselines(self) -> Mapping[str, float]:
        """The loss of saying each token's frequency."""
        batch = self.evaluation_rows(range(self.held_out_rows))
        counted = batch.targets[batch.targets >= 0]
        documents = self._train.documents
        tokens = documents.tokens[documents.learned]
        return {"unigram entropy": unigram_loss(tokens, counted, classes=self._vocabulary)}

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """The configured prompt and what the model writes after it."""
        return continue_text(self.config, model, device)

    def _number(self, step: int, row: int) -> int:
        epoch, place = divmod(step * self.config.train.batch + row, len(self._train))
        return int(self._order(epoch)[place])

    def _shuffle(self, epoch: int) -> torch.Tensor:
        generator = generator_for(self.config.train.seed, "order", epoch)
        return torch.randperm(len(self._train), generator=generator)

"""The task of predicting the next byte of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fullshard_train.ranks.distributed import World, broadcast_bytes, on_main
from fullshard_train.seeds import generator_for
from fullshard_train.settings.config import Config
from fullshard_train.task import Batch, Measure
from fullshard_train.text.baselines import bigram_loss, unigram_loss
from fullshard_train.text.corpus import Corpus, read_source, split
from fullshard_train.text.model import GPT, initial_value
from fullshard_train.text.sampling import generate
from fullshard_train.text.windows import ShuffledWindows, cut, evenly_spaced
from fullshard_train.training.sharded import initialise

__all__ = ["TextTask", "build_model", "continue_text", "layers", "load_task"]


def build_model(config: Config) -> nn.Module:
    """The `GPT` of a config."""
    return GPT(config.model, recompute=config.train.activation_checkpointing)


def layers(model: nn.Module) -> list[nn.Module]:
    """The GPT's blocks."""
    assert isinstance(model, GPT), type(model)
    return list(model.blocks)


def continue_text(config: Config, model: nn.Module, device: torch.device) -> str:
    """The configured prompt and what the model writes after it; it needs no corpus."""
    data = generate(
        model,
        config.sample.prompt.encode(),
        config.sample,
        context=config.model.context,
        generator=generator_for(config.train.seed, "sample"),
        device=device,
    )
    return data.decode("utf-8", errors="replace")


def load_task(config: Config, world: World) -> TextTask:
    """The task with the corpus that rank 0 reads.

    Raises:
        TrainError: as `read_source` and `TextTask`.
    """
    # Only rank 0 keeps the bytes that on_main's function reads: they travel as a tensor, not as a
    # pickle.
    read: list[bytes] = []
    on_main(lambda: read.append(read_source(config.data.source)))
    data = broadcast_bytes(read[0] if world.is_main else None)
    return TextTask(config, split(data, config.data))


class TextTask:
    """Next-byte prediction on a corpus; satisfies `fullshard_train.task.Task`.

    Raises:
        TrainError: a part of the corpus is too short for one window.
    """

    unit = "nats per byte"
    item = "bytes"
    measure = Measure.LOSS
    baselines_are = (
        "cross-entropy of byte and byte-pair frequencies, counted on the training part with add-one"
        " smoothing, on the same held-out bytes"
    )

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self.config = config
        self.corpus = corpus
        context = config.model.context
        self._windows = ShuffledWindows(len(corpus.train), context=context, seed=config.train.seed)
        self._held_out = evenly_spaced(
            len(corpus.held_out), context=context, count=config.train.held_out_rows
        )

    @property
    def data_is(self) -> str:
        """The source, the sizes of its two parts, and a block size that was adapted."""
        train, held_out = len(self.corpus.train), len(self.corpus.held_out)
        source = self.config.data.source
        line = f"{source}: {train:,} bytes to learn from, {held_out:,} held out"
        block, configured = self.corpus.block_bytes, self.config.data.block_bytes
        if block == configured:
            return line
        return f"{line} (a short text: blocks of {block:,} bytes, not {configured:,})"

    @property
    def fingerprint(self) -> str:
        """The corpus's."""
        return self.corpus.fingerprint

    @property
    def held_out_rows(self) -> int:
        """The number of held-out windows."""
        return len(self._held_out)

    def build_model(self) -> nn.Module:
        """A `GPT`."""
        return build_model(self.config)

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """The GPT's blocks."""
        return layers(model)

    def flops_per_item(self, model: nn.Module) -> float:
        """6 N + 12 L H Q T of a byte (Chowdhery et al. 2022, PaLM, appendix B).

        N counts the parameters but an embedding of its own, which multiplies nothing; L layers of H
        heads of width Q look back on T bytes.
        """
        assert isinstance(model, GPT), type(model)
        shape = self.config.model
        counted = sum(parameter.numel() for parameter in model.parameters())
        if not shape.tied:
            counted -= model.embedding.weight.numel()
        return 6.0 * counted + 12.0 * shape.layers * shape.width * shape.context

    def initial_value(
        self, name: str, shape: torch.Size, generator: torch.Generator
    ) -> torch.Tensor:
        """See `fullshard_train.text.model.initial_value`."""
        return initial_value(name, shape, layers=self.config.model.layers, generator=generator)

    def fill(self, model: nn.Module, seed: int) -> None:
        """Fill each parameter with its `initial_value`."""
        initialise(model, self.initial_value, seed)

    def counted(self, step: int) -> int:
        """Every byte of the batch."""
        return self.config.train.batch * self.config.model.context

    def training_rows(self, step: int, rows: range) -> Batch:
        """Windows `step * batch + row`, for each row, of one endless shuffled sequence."""
        first = step * self.config.train.batch
        starts = self._windows.starts([first + row for row in rows])
        inputs, targets = cut(self.corpus.train, starts, self.config.model.context)
        return Batch(inputs=inputs, targets=targets)

    def evaluation_rows(self, rows: range) -> Batch:
        """Windows at even distances over the held-out part, without overlap."""
        starts = self._held_out[rows.start : rows.stop]
        inputs, targets = cut(self.corpus.held_out, starts, self.config.model.context)
        return Batch(inputs=inputs, targets=targets)

    def baselines(self) -> Mapping[str, float]:
        """The unigram and bigram losses on exactly the bytes that the model is judged on."""
        batch = self.evaluation_rows(range(self.held_out_rows))
        return {
            "unigram entropy": unigram_loss(self.corpus.train, batch.targets),
            "bigram entropy": bigram_loss(self.corpus.train, batch.inputs, batch.targets),
        }

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """The configured prompt and what the model writes after it."""
        return continue_text(self.config, model, device)

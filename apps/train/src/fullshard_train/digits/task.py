"""The task of telling handwritten digits: the 1797 images that come with scikit-learn."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import nn

from fullshard_train.digits.model import CLASSES, SIDE, Classifier, initial_value
from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import World, broadcast_bytes, on_main
from fullshard_train.seeds import generator_for
from fullshard_train.settings.config import Config
from fullshard_train.task import Batch, Measure
from fullshard_train.training.sharded import initialise

__all__ = ["DigitsTask", "build_model", "load_task", "read_digits"]

_PIXELS = SIDE * SIDE
_BRIGHTEST = 16
_SHOWN = 8
_SHADES = " .:-=+*#%"


def build_model(config: Config) -> nn.Module:
    """The `Classifier` of a config."""
    return Classifier(config.digits, recompute=config.train.activation_checkpointing)


def load_task(config: Config, world: World) -> DigitsTask:
    """The task with the images that rank 0 reads.

    Raises:
        TrainError: as `DigitsTask`.
    """
    read: list[bytes] = []
    on_main(lambda: read.append(read_digits()))
    return DigitsTask(config, broadcast_bytes(read[0] if world.is_main else None))


def read_digits() -> bytes:
    """The images as `DigitsTask` takes them."""
    # Imported here: it takes seconds, and one rank needs it.
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    found = load_digits()
    pixels = torch.from_numpy(found.data).to(torch.uint8)
    classes = torch.from_numpy(found.target).to(torch.uint8)
    return torch.cat((pixels, classes[:, None]), dim=1).numpy().tobytes()


class DigitsTask:
    """Telling digits; satisfies `fullshard_train.task.Task`.

    Args:
        config: which images are held out, and the model's shape.
        data: uint8; of each image 64 pixels from 0 to 16, row by row, and then its digit.

    Raises:
        TrainError: nothing is left to learn from, or nothing is held out.
    """

    unit = "nats per image"
    item = "images"
    measure = Measure.ACCURACY
    baselines_are = (
        "the most frequent digit of the training part, and the digit whose mean training image is"
        " nearest, on the same held-out images"
    )

    def __init__(self, config: Config, data: torch.Tensor) -> None:
        self.config = config
        self.fingerprint = hashlib.sha256(data.numpy().tobytes()).hexdigest()
        table = data.view(-1, _PIXELS + 1)
        pixels = table[:, :_PIXELS].float().view(-1, SIDE, SIDE) / _BRIGHTEST
        classes = table[:, _PIXELS].long()
        every = config.digits.held_out_every
        # The images come in a pattern of digits, so the split shuffles; the same for every seed.
        order = torch.randperm(len(table), generator=generator_for("digits", "split"))
        judged = order % every == every - 1
        if not judged.any():
            raise TrainError(
                f"config digits.held_out_every = {every}: holds out none of {len(table)} images;"
                " give a smaller number"
            )
        self._train = Batch(inputs=pixels[~judged], targets=classes[~judged])
        rows = config.train.held_out_rows
        self._held_out = Batch(inputs=pixels[judged][:rows], targets=classes[judged][:rows])
        # An order is one number per image; two are in use only where a batch spans two epochs.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    @property
    def data_is(self) -> str:
        """How many images there are in the two parts."""
        train, held_out = len(self._train.targets), len(self._held_out.targets)
        return f"scikit-learn's digits: {train:,} images to learn from, {held_out:,} held out"

    @property
    def held_out_rows(self) -> int:
        """The number of held-out images."""
        return len(self._held_out.targets)

    def build_model(self) -> nn.Module:
        """A `Classifier`."""
        return build_model(self.config)

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """The convolutions, then each block."""
        assert isinstance(model, Classifier), type(model)
        return [model.stem, *model.blocks]

    def initial_value(
        self, name: str, shape: torch.Size, generator: torch.Generator
    ) -> torch.Tensor:
        """See `fullshard_train.digits.model.initial_value`."""
        return initial_value(name, shape, layers=self.config.digits.layers, generator=generator)

    def fill(self, model: nn.Module, seed: int) -> None:
        """Fill each parameter with its `initial_value`."""
        initialise(model, self.initial_value, seed)

    def counted(self, step: int) -> int:
        """Every image of the batch."""
        return self.config.train.batch

    def training_rows(self, step: int, rows: range) -> Batch:
        """Images `step * batch + row`, for each row, of an endless sequence.

        An epoch contains every training image once, in a new order.
        """
        first, count = step * self.config.train.batch, len(self._train.targets)
        places = [divmod(first + row, count) for row in rows]
        chosen = torch.tensor([int(self._order(epoch)[place]) for epoch, place in places])
        return Batch(inputs=self._train.inputs[chosen], targets=self._train.targets[chosen])

    def evaluation_rows(self, rows: range) -> Batch:
        """These held-out images."""
        part = slice(rows.start, rows.stop)
        return Batch(inputs=self._held_out.inputs[part], targets=self._held_out.targets[part])

    def baselines(self) -> Mapping[str, float]:
        """The accuracies of always saying the most frequent digit, and of the nearest mean image.

        The baselines learn from the training part, and are scored on the held-out part.
        """
        train, held_out = self._train, self._held_out
        counts = torch.bincount(train.targets, minlength=CLASSES)
        # A digit that is missing in the training part is never predicted: its mean is NaN, and
        # argmin would choose that.
        seen = counts.nonzero().flatten()
        images = train.inputs.flatten(1)
        centroids = torch.stack([images[train.targets == digit].mean(dim=0) for digit in seen])
        nearest = seen[torch.cdist(held_out.inputs.flatten(1), centroids).argmin(dim=1)]
        return {
            "majority class": float((held_out.targets == counts.argmax()).double().mean()),
            "nearest centroid": float((held_out.targets == nearest).double().mean()),
        }

    @torch.no_grad()
    def sample(self, model: nn.Module, device: torch.device) -> str:
        """The first held-out images in characters, and what the model takes them for."""
        batch = self.evaluation_rows(range(_SHOWN))
        model.eval()
        said = model(batch.inputs.to(device)).argmax(dim=-1).cpu()
        model.train()
        shades = (batch.inputs * (len(_SHADES) - 1)).round().int()  # [images, SIDE, SIDE]
        lines = [
            "   ".join("".join(_SHADES[shade] for shade in image[row]) for image in shades).rstrip()
            for row in range(SIDE)
        ]
        answers = "   ".join(
            f"{f'{int(answer)} is {int(digit)}':<{SIDE}}"
            for answer, digit in zip(said, batch.targets, strict=True)
        )
        return "\n".join([*lines, "", answers.rstrip(), "(answer is digit)"])

    def _shuffle(self, epoch: int) -> torch.Tensor:
        generator = generator_for(self.config.train.seed, "order", epoch)
        return torch.randperm(len(self._train.targets), generator=generator)

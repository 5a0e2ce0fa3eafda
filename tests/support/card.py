"""The accelerator that tests run on: CUDA, or the asynchronous device of our own.

``pytest --device async`` chooses the second. Rank processes learn it by their environment. Nothing
here touches CUDA before it is called, so that machines without a card can import it.
"""

from __future__ import annotations

from typing import Any

import torch

from support import device
from support.chosen import chosen

if chosen():
    device.load()

CARD = torch.device(device.NAME if chosen() else "cuda", 0)
"""The device; one that all ranks share."""

card: Any = torch.get_device_module(CARD)
"""Its module: ``torch.cuda``, or one with the same names."""

TRANSPORT = "asyncgloo" if chosen() else "nccl"
"""The process group's backend for the device alone."""

BACKENDS = f"cpu:gloo,{CARD.type}:{TRANSPORT}" if chosen() else "gloo"
"""The backends of the rank processes."""

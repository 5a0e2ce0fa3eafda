"""An optimizer whose state dict goes by names: what ``is_named_optimizer=True`` is for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class NamedAdamW(torch.optim.AdamW):
    """Calls its parameters by their names, as torch's and TorchRec's named optimizers do."""

    def __init__(self, net: nn.Module) -> None:
        """Takes the model."""
        self.names = [name for name, _ in net.named_parameters()]
        super().__init__(net.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        """The state, by names."""
        found = super().state_dict()
        groups = [
            {**g, "params": [self.names[at] for at in g["params"]]} for g in found["param_groups"]
        ]
        state = {self.names[at]: value for at, value in found["state"].items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what ``state_dict`` gives."""
        at = {name: index for index, name in enumerate(self.names)}
        groups = [
            {**group, "params": [at[name] for name in group["params"]]}
            for group in state_dict["param_groups"]
        ]
        state = {at[name]: value for name, value in state_dict["state"].items()}
        super().load_state_dict({"state": state, "param_groups": groups})

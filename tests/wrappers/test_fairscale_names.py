"""The names of our door are FairScale's."""

from __future__ import annotations

import inspect

from fullshard.wrappers import fairscale
from support.fairscale.names import ARGUMENTS, LACKING, METHODS, MODULES


def test_names_and_arguments_are_those_that_were_recorded() -> None:
    wrapper = fairscale.FullyShardedDataParallel
    arguments = inspect.signature(wrapper).parameters
    ours = {name: each.default for name, each in arguments.items() if name != "module"}
    assert next(iter(arguments)) == "module" and ours.pop("others") is inspect.Parameter.empty
    assert list(ours.items()) == list(ARGUMENTS.items())
    settings = fairscale.FairScaleSettings.__dataclass_fields__
    assert settings.keys() >= ARGUMENTS.keys()
    assert {name for name in METHODS if not hasattr(wrapper, name)} == (METHODS & LACKING) | {
        "cpu_offload"  # of an instance only, as all settings
    }
    names = {name for module in MODULES.values() for name in module}
    assert {name for name in names if not hasattr(fairscale, name)} == names & LACKING

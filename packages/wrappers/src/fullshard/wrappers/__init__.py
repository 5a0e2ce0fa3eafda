"""Front doors for existing code. Owns no engine: every door opens on ``fullshard.sharding``.

``fullshard.wrappers.fsdp`` has the names of torch's ``fully_shard``; ``fullshard.wrappers.fsdp1``
and ``fullshard.wrappers.wrap`` those of PyTorch's FSDP1. ``install()`` puts them under libraries.
"""

from fullshard.wrappers import fsdp1
from fullshard.wrappers.equivalent import equivalent_calls
from fullshard.wrappers.fsdp1 import *  # noqa: F403  # it lists them
from fullshard.wrappers.install import Installed, install, uninstall

__all__ = ["Installed", "equivalent_calls", "install", "uninstall"]
__all__ += fsdp1.__all__
__all__.sort()

"""Puts fullshard under libraries that import torch's own FSDP: ``install()`` and ``uninstall()``.

``python -m fullshard.wrappers.install script.py ...`` does so before it runs a script. Owns no
engine: wherever ``torch.distributed.fsdp``'s names are looked up, those of
``fullshard.wrappers.fsdp`` and ``fullshard.wrappers.fsdp1`` are found.
"""

from fullshard.wrappers.install.bindings import Binding, Installed, install, uninstall

__all__ = ["Binding", "Installed", "install", "uninstall"]

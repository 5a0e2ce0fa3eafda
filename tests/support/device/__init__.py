"""A device of our own on which work really runs later, without a GPU.

``load()`` builds it (C++, a minute, once) and adds it to torch as the device ``asynccpu``. A
process that has loaded it has an accelerator from then on, so load it in processes of its own.
"""

from support.device.loading import NAME, load, why_not

__all__ = ["NAME", "load", "why_not"]

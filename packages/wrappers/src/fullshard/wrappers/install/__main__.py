"""``python -m fullshard.wrappers.install script.py ...``: installs, then runs the script.

``-m module ...`` runs a module, as ``python -m`` does. Under torchrun: ``torchrun
--nproc-per-node=2 -m fullshard.wrappers.install script.py ...``.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from fullshard.wrappers.install import install

_USAGE = "usage: python -m fullshard.wrappers.install [-m module | script.py] [arguments ...]"


def main(arguments: list[str]) -> None:
    """Run what the command line names, as ``python`` would, on fullshard.

    Raises:
        SystemExit: if it names nothing to run.
    """
    is_module = arguments[:1] == ["-m"]
    program = arguments[is_module:]
    if not program or program[0].startswith("-"):
        raise SystemExit(_USAGE)
    bindings = install().bindings
    if os.environ.get("RANK", "0") == "0":
        places = {each.where for each in bindings}
        sys.stderr.write(f"fullshard: {len(bindings)} names in {len(places)} places are ours\n")
    sys.argv = program
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

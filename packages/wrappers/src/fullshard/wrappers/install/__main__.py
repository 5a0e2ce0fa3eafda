"""``python -m fullshard.wrappers.install script.py ...``: installs, then runs the script.

``-m module ...`` runs a module, as ``python -m`` does. Under torchrun: ``torchrun
--nproc-per-node=2 -m fullshard.wrappers.install script.py ...``.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from torch import nn

from fullshard.comm.spi import CommandParser
from fullshard.sharding import FSDPModule
from fullshard.wrappers import __version__
from fullshard.wrappers.install import install

_EPILOG = """\
Options of this command come before the program; all that follows the program is the program's own.
"""


def main(arguments: list[str]) -> None:
    """Run what the command line names, as ``python`` would, on fullshard.

    Raises:
        SystemExit: if it names nothing to run, or has an unknown option.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    program = given.program
    if not program:
        parser.error("there is nothing to run; name a script, or -m and a module")
    bindings = install(shard_on_cpu=given.shard_on_cpu).bindings
    if os.environ.get("RANK", "0") == "0":
        places = {each.where for each in bindings}
        sys.stderr.write(f"fullshard: {len(bindings)} names in {len(places)} places are ours\n")
    sys.argv = program
    if given.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")
    if os.environ.get("RANK", "0") == "0" and not _is_any_sharded(FSDPModule):
        sys.stderr.write(
            f"fullshard: {program[0]} sharded no model: each rank had a whole one; call "
            "fully_shard(model) of torch.distributed.fsdp\n"
        )


def _is_any_sharded(mixin: type) -> bool:
    """Return whether a model was sharded in this process: its class then inherits ``mixin``."""
    classes: list[type] = mixin.__subclasses__()
    return any(issubclass(each, nn.Module) or _is_any_sharded(each) for each in classes)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m fullshard.wrappers.install",
        description="Runs a program that imports torch's own FSDP on fullshard.",
        epilog=_EPILOG,
        version=__version__,
    )
    parser.add_argument(
        "--shard-on-cpu",
        action="store_true",
        help="let Accelerate shard on CPU ranks, where it takes DistributedDataParallel",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="run a module, as python -m does"
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, help="script.py, or a module, and its arguments"
    )
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])

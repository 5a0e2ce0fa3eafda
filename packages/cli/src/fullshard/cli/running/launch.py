"""Start a script as torchrun does, on fullshard; torchrun's own parser has the options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.run import get_args_parser, run

from fullshard.comm.spi import CommandParser
from fullshard.preflight.spi import default_ranks, exit_code_of, share_cores

__all__ = ["run_script"]

_DESCRIPTION = """\
Runs a script on several ranks, as torchrun does, with fullshard in the place of torch's own FSDP:
torch.distributed.fsdp's names are fullshard's while it runs. Without options it starts one rank per
accelerator of this machine, or two on the CPU. All other options are torchrun's.

exit codes: 0, 2 after a wrong argument, else that of the first rank that failed (128 and more:
ended by a signal).

examples:
  fullshard run train.py --steps 100
  fullshard run --nproc-per-node 4 --record runs/first train.py
  fullshard run --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host0 train.py
"""
_SINGLE_HOST = ("nnodes", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port")


def run_script(words: Sequence[str], prog: str) -> int:
    """Run the script in ``words`` on its ranks, and return the exit code.

    Raises:
        SystemExit: after a wrong option, or ``--help``.
    """
    parser = CommandParser(
        prog=prog,
        usage=f"{prog} [OPTIONS] script.py [ARGUMENTS OF THE SCRIPT]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[get_args_parser()],
        add_help=False,  # torchrun's parser has it
    )
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER",
        help="write what each rank did into FOLDER, for `fullshard compare FOLDER`",
    )  # fmt: skip
    parser.add_argument(
        "--shard-on-cpu", action="store_true",
        help="let Accelerate shard on CPU ranks, where it takes DistributedDataParallel",
    )  # fmt: skip
    parser.set_defaults(nproc_per_node=str(default_ranks()))
    given = parser.parse_args(list(words))
    if given.no_python or given.run_path:
        parser.error("--no-python and --run-path cannot run on fullshard; pass a script, or -m")
    if not given.module and not Path(given.training_script).is_file():
        parser.error(f"{given.training_script} does not exist; pass a script, or -m and a module")
    if all(getattr(given, name) == parser.get_default(name) for name in _SINGLE_HOST):
        given.standalone = True
    if given.nproc_per_node.isdecimal():
        share_cores(int(given.nproc_per_node))
    program = [given.training_script, *given.training_script_args]
    options = ["--shard-on-cpu"] if given.shard_on_cpu else []
    options += ["-m"] if given.module else []
    if given.record is None:
        given.training_script = "fullshard.wrappers.install"
        given.training_script_args = [*options, *program]
    else:
        given.record.mkdir(parents=True, exist_ok=True)
        given.training_script = "fullshard.cli.running.recorded"
        given.training_script_args = [str(given.record), *options, *program]
    given.module = True
    return exit_code_of(lambda: record(run)(given))

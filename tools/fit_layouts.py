"""Prints the thresholds of the layout table, as measured between the ranks at hand.

Run it on every rank, as ``torchrun`` does: between two hosts, or two network namespaces with a rate
limit (docs/how-to/several-hosts.md says how to make them). What it prints goes into
``fullshard.comm.layouts`` if it is to be everybody's default.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist

from fullshard.comm import fit_layouts


def main() -> None:
    """Fits on the default process group and prints the table's state on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if arguments.device == "cpu" else "nccl")
    group = dist.group.WORLD
    assert group is not None
    table = fit_layouts(group, torch.device(arguments.device), repeats=arguments.repeats)
    if dist.get_rank() == 0:
        print(json.dumps(table.state_dict()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

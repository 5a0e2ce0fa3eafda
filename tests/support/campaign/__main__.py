"""Runs one job, in a process that may have its own /dev/shm: ``support.campaign.verdict`` does."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

from support.campaign.verdict import run_ranks


def main() -> None:
    """Run the fault of the first file, in the folder of the second argument; write the endings."""
    given, folder = Path(sys.argv[1]), Path(sys.argv[2])
    endings = run_ranks(pickle.loads(given.read_bytes()), folder)
    given.with_suffix(".json").write_text(json.dumps(endings))


if __name__ == "__main__":
    main()

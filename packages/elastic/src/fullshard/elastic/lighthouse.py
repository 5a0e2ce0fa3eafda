"""The lighthouse of a run: the one process that knows which replica groups are there.

Owns the command ``fullshard-lighthouse`` and ``Lighthouse``, which starts one in this process. The
lighthouse holds no state of training: groups wait while it is away, and continue when it is back at
its address.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

from fullshard.comm.spi import CommandParser
from fullshard.elastic.compat import coordination

__all__ = ["Lighthouse", "main"]


class Lighthouse:
    """A lighthouse in this process, until ``close()``.

    Args:
        port: of this host; 0: a free one.
        min_groups: a quorum has at least this many groups.
        join_timeout: seconds that a quorum waits for groups that are alive and not ready.
        heartbeat_timeout: seconds after which a silent group counts as lost.

    Raises:
        ModuleNotFoundError: if torchft is not installed.
        RuntimeError: if the port is taken.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        min_groups: int = 1,
        join_timeout: float = 10.0,
        heartbeat_timeout: float = 2.0,
    ) -> None:
        self._server: Any = coordination().LighthouseServer(
            bind=f"[::]:{port}",
            min_replicas=min_groups,
            join_timeout_ms=round(join_timeout * 1000),
            quorum_tick_ms=20,
            heartbeat_timeout_ms=round(heartbeat_timeout * 1000),
        )

    @property
    def address(self) -> str:
        """The address for ``ElasticOptions.lighthouse``."""
        return str(self._server.address())

    def close(self) -> None:
        """End it; groups wait at their next step."""
        self._server.shutdown()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a lighthouse until Ctrl-C or SIGTERM; its first line of output is its address."""
    parser = CommandParser(prog="fullshard-lighthouse", description=main.__doc__)
    parser.add_argument("--port", type=int, default=29510, help="0: a free one")
    parser.add_argument("--min-groups", type=int, default=1)
    parser.add_argument("--join-timeout", type=float, default=10.0, help="seconds")
    parser.add_argument("--heartbeat-timeout", type=float, default=2.0, help="seconds")
    options = parser.parse_args(arguments)
    lighthouse = Lighthouse(
        port=options.port,
        min_groups=options.min_groups,
        join_timeout=options.join_timeout,
        heartbeat_timeout=options.heartbeat_timeout,
    )
    sys.stdout.write(f"{lighthouse.address}\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    lighthouse.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

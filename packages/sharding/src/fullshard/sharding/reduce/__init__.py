"""From full gradients to sharded ones: reductions, replicas, coalesced reductions."""

__all__: list[str] = []

"""From full gradients to sharded ones: reductions, replicas."""

__all__: list[str] = []

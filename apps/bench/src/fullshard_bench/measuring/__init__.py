"""What a rank measures: timed rounds, counts, memory, losses and gradients."""

__all__: list[str] = []

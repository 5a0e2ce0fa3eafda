"""The measurements of a rank: timed rounds, counts, memory, losses and gradients."""

__all__: list[str] = []

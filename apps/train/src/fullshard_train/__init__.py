"""The example trainer of fullshard: real models that learn real data with `fully_shard`.

A byte-level GPT learns text, an image classifier learns digits.

Owns the whole of a small, real training program: configuration, corpus, model, optimiser,
checkpoints, report. The package is an application: no library code may import it, and it uses
fullshard only through its public names.
"""

__version__ = "0.1.0"

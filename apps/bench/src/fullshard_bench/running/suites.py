"""The sets of measurements that `nox -s bench` runs, and in which bars are judged.

Owns which models, meshes and sizes they are. The CPU set takes about ten minutes on two cores. A
step over a slow link takes seconds, so slow links are a separate set, and so are the widest worlds.
"""

from __future__ import annotations

from fullshard_bench.running.run import Run
from fullshard_bench.settings import Settings

__all__ = ["SUITES"]

_SHARDED = ("fullshard", "torch", "none")
_WIDE_STEPS = 150  # a growth of a few percent must be distinguishable from noise

CPU = (
    Run(
        name="gpt-small, 16 tokens",
        settings=Settings(model="gpt-small", tokens=16, impl=_SHARDED),
        meshes=("2",),
    ),
    Run(
        name="gpt-small, 256 tokens",
        settings=Settings(model="gpt-small", tokens=256, impl=_SHARDED),
        meshes=("1", "2"),
        trace=True,
    ),
    Run(
        name="gpt-mini, 32 tokens",
        settings=Settings(model="gpt-mini", tokens=32),
        meshes=("1", "2", "4", "2x2"),
    ),
    Run(
        name="experts, 64 tokens",
        settings=Settings(model="experts", tokens=64),
        meshes=("2",),
    ),
    Run(
        name="40 groups of 9",
        settings=Settings(model="many", tokens=8, impl=_SHARDED, steps=_WIDE_STEPS),
        wide=(8, 1024),
    ),
    Run(
        name="40 groups of 9, torch's fake group",
        settings=Settings(
            model="many", tokens=8, impl=_SHARDED, steps=_WIDE_STEPS, wide_group="fake"
        ),
        wide=(8, 1024),
    ),
)

NETWORK = (
    Run(
        name="gpt-small, 256 tokens, 1 Gbit/s",
        settings=Settings(model="gpt-small", tokens=256, network="1gbit", impl=_SHARDED),
        meshes=("2",),
    ),
)

_SLOW = "fullshard_bench.slow_links"

HOSTS = (
    Run(
        name="gpt-small, 256 tokens, 1 Gbit/s, 2 hosts of 2 ranks",
        settings=Settings(
            model="gpt-small",
            tokens=256,
            network="1gbit",
            ranks_per_host=2,
            impl=(
                "fullshard",
                f"{_SLOW}:hosts",
                f"{_SLOW}:hosts_bf16",
                f"{_SLOW}:inside",
                "torch",
                "none",
            ),
            exposed=False,
            steps=12,
        ),
        meshes=("4",),
    ),
)

WIDE = (
    Run(
        name="40 groups of 9",
        settings=Settings(model="many", tokens=8, impl=_SHARDED),
        wide=(8, 64, 1024, 8192),
    ),
)

GPU = (
    Run(
        name="gpt-1b, bf16",
        settings=Settings(
            model="gpt-1b",
            tokens=1024,
            device="cuda",
            dtype="bfloat16",
            impl=_SHARDED,
            exposed=False,
        ),
        meshes=("1",),
        trace=True,
    ),
    Run(
        name="gpt-1b, bf16, one of many",
        settings=Settings(
            model="gpt-1b", tokens=1024, device="cuda", dtype="bfloat16", impl=_SHARDED
        ),
        wide=(8, 64),
    ),
    Run(
        name="40 groups of 9",
        settings=Settings(model="many", tokens=8, device="cuda", impl=_SHARDED),
        wide=(8, 1024),
    ),
)

# A minute on two cores: the same models and bars as the CPU set, fewer rounds, no twins whose
# collectives move nothing. Its intervals are wider, so a bar that is nearly met is inconclusive.
_FEW = 10

QUICK = (
    Run(
        name="gpt-mini, 32 tokens",
        settings=Settings(model="gpt-mini", tokens=32, impl=_SHARDED, steps=_FEW, exposed=False),
        meshes=("2", "4"),
        brief=True,
    ),
    Run(
        name="gpt-small, 16 tokens",
        settings=Settings(model="gpt-small", tokens=16, impl=_SHARDED, steps=_FEW, exposed=False),
        meshes=("2",),
        brief=True,
    ),
    Run(
        name="40 groups of 9",
        settings=Settings(model="many", tokens=8, impl=_SHARDED, steps=30),
        wide=(8, 1024),
        brief=True,
    ),
)

SUITES = {"cpu": CPU, "quick": QUICK, "network": NETWORK, "hosts": HOSTS, "wide": WIDE, "gpu": GPU}

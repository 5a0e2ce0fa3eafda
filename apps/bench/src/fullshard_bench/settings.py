"""The settings of a measurement: one frozen value, from the command line to every rank.

Owns the settings, what they mean and which values they may have.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard_bench.errors import BenchError

__all__ = ["CONTESTANTS", "DTYPES", "TRANSPORTS", "WIDE_GROUPS", "Settings"]

CONTESTANTS = ("fullshard", "torch", "ddp", "none")
DTYPES = ("float32", "bfloat16")
TRANSPORTS = ("default", "process-group", "same-host")
WIDE_GROUPS = ("silent", "fake")
_RESHARDS = ("default", "always", "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A model, its training, and its contestants.

    Attributes:
        model: as `fullshard_bench.models.make_workload` reads it.
        impl: the contestants, by name or as `module:function`.
        rows: rows of one rank's batch.
        tokens: tokens of one row.
        steps: timed steps of each contestant.
        checked: steps before those, whose losses are compared with the unsharded model's.
        seed: of values and batches.
        device: cpu or cuda.
        dtype: what is computed and gathered in; parameters and optimizer state are float32.
        reduce_dtype: what gradients are reduced in.
        clip: the largest gradient norm; 0 does not clip.
        offload: whether shards, gradients and optimizer state live on the CPU.
        reshard: when parameters are freed after forward: default (all but the root's), always,
            never, or a number of ranks that keep shards among them.
        prefetch: how many units are gathered ahead in forward and backward; -1 is each
            contestant's default.
        checkpointing: whether units drop their activations and compute them again.
        transport: who moves fullshard's bytes: default (its own choice), process-group, same-host.
        comm: `module:Class` of an all-gather and a reduce-scatter for fullshard, "" for its own.
        exposed: whether to time twins whose collectives move nothing.
        verify: whether `fullshard.preflight.verify` compares each contestant before it is measured.
        threads: threads of a rank's operations; 0 shares the cores out evenly.
        network: rate of the links between ranks as hosts, "" for none.
        ranks_per_host: how many consecutive ranks such a host has.
        wide_group: the backend of wide worlds: silent, whose collectives return at once, or fake,
            torch's own, whose gathers copy the input once for each rank.
    """

    model: str = "gpt-small"
    impl: tuple[str, ...] = CONTESTANTS
    rows: int = 1
    tokens: int = 256
    steps: int = 30
    checked: int = 4
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    reduce_dtype: str = "float32"
    clip: float = 1.0
    offload: bool = False
    reshard: str = "default"
    prefetch: int = -1
    checkpointing: bool = False
    transport: str = "default"
    comm: str = ""
    exposed: bool = True
    verify: bool = False
    threads: int = 0
    network: str = ""
    ranks_per_host: int = 1
    wide_group: str = "silent"

    def __post_init__(self) -> None:
        """Check all settings that do not depend on the machine.

        Raises:
            BenchError: naming the option, its value and the allowed values.
        """
        positive = ("rows", "tokens", "steps", "checked", "ranks_per_host")
        for name, least in (*((each, 1) for each in positive), ("seed", 0)):
            _require(getattr(self, name) >= least, name, getattr(self, name), f"at least {least}")
        for name, allowed in (
            ("device", ("cpu", "cuda")),
            ("dtype", DTYPES),
            ("reduce_dtype", DTYPES),
            ("transport", TRANSPORTS),
            ("wide_group", WIDE_GROUPS),
        ):
            value = getattr(self, name)
            _require(value in allowed, name, value, f"one of {', '.join(allowed)}")
        _require(self.clip >= 0, "clip", self.clip, "at least 0")
        _require(self.threads >= 0, "threads", self.threads, "at least 0")
        _require(self.prefetch >= -1, "prefetch", self.prefetch, "at least 0, or -1 for defaults")
        _require(
            bool(self.network) or self.ranks_per_host == 1,
            "ranks_per_host", self.ranks_per_host, "with --network, which makes hosts",
        )  # fmt: skip
        known = self.reshard in _RESHARDS or (self.reshard.isdecimal() and int(self.reshard) > 1)
        _require(known, "reshard", self.reshard, f"{', '.join(_RESHARDS)} or a number above 1")
        _require(len(self.impl) > 0, "impl", self.impl, "at least one contestant")
        _require(len(set(self.impl)) == len(self.impl), "impl", self.impl, "without repetition")
        for name in self.impl:
            allowed_text = f"one of {', '.join(CONTESTANTS)}, or module:function of your own"
            _require(name in CONTESTANTS or ":" in name, "impl", name, allowed_text)


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        option = name.replace("_", "-")
        raise BenchError(f"--{option} {value!r}: must be {allowed}")

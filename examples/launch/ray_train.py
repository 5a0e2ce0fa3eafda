"""Start train.py under Ray Train, on this machine or on a cluster.

    OUT=/shared/runs/launch WORKERS=16 python ray_train.py

A worker is a rank. Ray makes the process group and chooses the device of each worker. Ranks save
straight into OUT, which every host sees, and Ray records the complete checkpoints. After the loss
of a worker Ray starts all workers again, and they continue from the newest checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer


def report(step: int, loss: float, folder: Path) -> None:
    """Tell Ray of a complete checkpoint; every rank calls it."""
    ray.train.report(
        {"step": step, "loss": loss},
        checkpoint=Checkpoint.from_directory(folder),
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it stays where it is
    )


def work(config: dict[str, Any]) -> None:
    """Run on each worker, in the process group that Ray has made."""
    import train  # here, since it is imported on the worker's host

    train.train(Path(config["out"]), config["steps"], report)


def make_trainer(
    out: Path, steps: int, workers: int, work: Callable[[dict[str, Any]], None] = work
) -> TorchTrainer:
    """Return Ray's trainer; ``out`` is absolute, because workers run in another folder."""
    gpus = ray.cluster_resources().get("GPU", 0) >= workers
    return TorchTrainer(
        work,
        train_loop_config={"out": str(out), "steps": steps},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus),
        run_config=RunConfig(
            storage_path=str(out.parent),  # OUT is Ray's folder of the run, too
            name=out.name,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )


if __name__ == "__main__":
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})  # sends train.py to all hosts
    trainer = make_trainer(
        out=Path(os.environ.get("OUT", "runs/launch")).absolute(),
        steps=int(os.environ.get("STEPS", "100")),
        workers=int(os.environ.get("WORKERS", "2")),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.4f}, saved in {result.checkpoint.path}")

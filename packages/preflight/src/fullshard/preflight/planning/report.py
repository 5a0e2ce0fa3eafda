"""The result of a plan: the peak of memory, what it is made of, and when it is reached."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fullshard.preflight.planning.memory.ledger import Category
from fullshard.preflight.planning.memory.places import Place
from fullshard.preflight.planning.picture import Picture
from fullshard.preflight.planning.timeline import Timeline
from fullshard.preflight.wording import size_text

__all__ = ["Plan"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory of one rank in a training step: of rank 0, whose shards are the largest.

    Attributes:
        mesh: the sizes of the mesh's axes: (shards,) or (replicas, shards), or those of the names.
        device: what the ranks compute on.
        parameters: elements of the whole model's parameters, each once.
        peak: bytes of all tensors alive at the worst moment of a step, and of what operations and
            collectives of the CPU may have inside themselves then.
        tensors: bytes of all tensors alive after any operation, at most; no more than ``peak``.
        place: where in the step that is.
        operation: after which operation.
        categories: what the peak is made of, in bytes; they add up to it.
        modules: of the activations at the peak, the bytes that each module made, largest first.
        held: bytes between two steps.
        kept: the part of these bytes that is neither shards nor optimizer state: what the engine
            keeps for the next step, on a CPU the buffers of collectives.
        host: the most bytes of a rank in the host's memory, which are not in the peak: what is
            offloaded from an accelerator.
        construction: the most bytes while the model was built and sharded.
        course: the most bytes at each place of a step, in the order of the step.
        course_parts: what they are made of at each place, in bytes; they add up to them.
        attention: the attention kernels that were assumed; none if the model calls none.
        reads: the lines of code in which the host read a float, which the plan answered with 1.0.
        compiled: whether ``torch.compile`` was used. The plan runs what is compiled operation by
            operation: it counts the memory and the time of no fused kernel.
        time: the step in time, if the plan was made for a device.
    """

    mesh: tuple[int, ...]
    parameters: int
    peak: int
    tensors: int
    place: Place
    operation: str
    categories: dict[Category, int]
    modules: dict[str, int]
    held: int
    kept: int
    host: int
    construction: int
    course: dict[Place, int]
    course_parts: dict[Place, dict[Category, int]]
    attention: tuple[str, ...]
    reads: tuple[str, ...] = ()
    compiled: bool = False
    device: str = "any accelerator"
    time: Timeline | None = None

    def fits(self, budget: int) -> bool:
        """Whether a step stays within ``budget`` bytes."""
        return self.peak <= budget

    @property
    def step_time(self) -> float | None:
        """Seconds of a step; None if the plan was made for no device."""
        return None if self.time is None else self.time.step_time

    @property
    def exposed(self) -> float | None:
        """Seconds of a step in which a collective is waited for; None as for ``step_time``."""
        return None if self.time is None else self.time.exposed

    @property
    def name(self) -> str:
        """The mesh as text: "64", or "8x64" for 8 replicas of 64 shards."""
        return "x".join(map(str, self.mesh))

    def draw(self, path: str | Path, *, budget: int | None = None) -> None:
        """Write a picture: memory over a step, what the peak is made of, and each stream in time.

        Args:
            path: where to; its suffix sets the format, such as ``.png`` or ``.svg``.
            budget: bytes, for a line in the picture of memory.

        Raises:
            RuntimeError: if matplotlib, which nothing else here needs, is not installed.
        """
        picture = Picture(
            where=f"{self.name} ranks, {self.device}",
            course=self.course,
            place=self.place,
            categories=self.categories,
            time=self.time,
            budget=budget,
        )
        picture.save(path)

    def __str__(self) -> str:
        """A table for a person."""
        lines = [
            f"{size_text(self.peak)} at most in a step, on each of {self.name} ranks"
            f" ({self.device})",
            f"  reached in {self.place}, after {self.operation}",
        ]
        if self.tensors < self.peak:
            lines.append(
                f"  tensors alone {size_text(self.tensors)} at most; the rest is inside operations"
                " and collectives, which need not meet"
            )
        lines += [
            f"  {size_text(size):>12}  {category.title}"
            for category, size in self.categories.items()
            if size
        ]
        if self.modules:
            largest = list(self.modules.items())[:5]
            named = ", ".join(f"{name or 'the model'} {size_text(size)}" for name, size in largest)
            lines.append(f"  activations by module, the largest: {named}")
        told = self.kept > max(self.held // 100, 4096)
        kept = f", of which {size_text(self.kept)} are buffers for the next step" if told else ""
        lines.append(f"{size_text(self.held)} between steps{kept}")
        if self.host:
            lines.append(f"{size_text(self.host)} at most in the host's memory, beside it")
        lines.append(f"{size_text(self.construction)} at most while it was built and sharded")
        if self.attention:
            lines.append(f"attention kernels assumed: {', '.join(self.attention)}")
        if self.reads:
            lines.append(f"floats that the host reads are 1.0 here: {', '.join(self.reads)}")
        if self.compiled:
            lines.append("torch.compile fuses operations, which is not counted: planned without it")
        if self.time is not None:
            lines.append(str(self.time))
        return "\n".join(lines)

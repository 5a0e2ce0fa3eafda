"""Finds the causes of a difference: what a run shows, a closer look, and experiments.

An experiment changes one thing about the program and runs both ways again: if they then agree, or
agree for longer, that was a cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fullshard.preflight.compat import hooks_of
from fullshard.preflight.verification.agree import raise_together
from fullshard.preflight.verification.causes.seen import seen_causes
from fullshard.preflight.verification.closer.closer import Closer
from fullshard.preflight.verification.closer.look import Look
from fullshard.preflight.verification.program import Program, Seeds, sgd
from fullshard.preflight.verification.verdict import Cause, Outcome, Phase
from fullshard.preflight.wording import listed

__all__ = ["find_causes"]

Run = Callable[[Program, Look], Outcome]

_OPTIMIZERS = (Phase.UPDATE, Phase.STATE)
_NOT_AGAIN = (
    "it did not come in the same place when the same program ran again: something that the seed "
    "does not decide is behind it, such as a counter, a file, or time"
)


def find_causes(program: Program, outcome: Outcome, run: Run) -> tuple[list[Cause], list[str]]:
    """Return the causes that were shown, or otherwise possible causes, and other findings.

    The same on all ranks, which all call it.
    """
    found = raise_together(lambda: list(seen_causes(program, outcome)))
    shown = [cause for cause in found if cause.tested]
    sizes = raise_together(lambda: {n: p.numel() for n, p in program.built().named_parameters()})
    try:
        closer = run(program, Closer(program, outcome, sizes))
    except Exception as error:
        return shown, [f"the same program, run again, raised {type(error).__name__}: {error}"]
    if closer.again and outcome.first is not None and outcome.first.phase is not Phase.BUILD:
        experiments = _Experiments(program, outcome, run)
        others = [] if closer.decisive else shown
        found += closer.causes
        shown = list(experiments.of_added_hooks())  # what a hook does has other names, too
        if not shown:
            shown = [*experiments.of_program(), *others, *(c for c in closer.causes if c.tested)]
        shown = shown or list(experiments.of_last_resort())
    causes = shown or [cause for cause in found if not cause.tested]
    named: dict[str, Cause] = {}
    for cause in causes:
        named.setdefault(cause.name, cause)
    return list(named.values()), closer.known if closer.again else [_NOT_AGAIN]


class _Experiments:
    """Runs of a program that is changed in one thing."""

    def __init__(self, program: Program, outcome: Outcome, run: Run) -> None:
        self._program = program
        self._outcome = outcome
        self._run = run

    def _helps(self, changed: Program) -> bool:
        """Whether both runs of the changed program agree for longer."""
        try:
            return self._run(changed, Look()).reached > self._outcome.reached
        except Exception:  # it shows nothing, as where ranks that draw apart skip other modules
            return False

    def of_added_hooks(self) -> Iterator[Cause]:
        """Yield a cause if both runs agree without the hooks that ``shard`` registered."""
        hooks = self._outcome.seen.hooks
        if hooks and self._helps(self._program.but(bare=True)):
            yield Cause(
                name="a hook of the sharded model alone",
                evidence=f"{listed(hooks)}, registered by shard, and without these hooks both "
                "agree. Register them in build_model, or leave them out",
            )

    def of_program(self) -> Iterator[Cause]:
        """Yield what the program does that both runs do not do alike."""
        program = self._program
        yield from self._of_draws()
        if program.tokens is not None and self._helps(program.but(weighted=True)):
            yield Cause(
                name="a mean over each rank's own tokens",
                evidence="ranks have unequal numbers of tokens; with each loss times its rank's "
                "share of all tokens, times the world size, both agree. Divide the sum by the "
                "tokens of all ranks, and multiply by the world size",
            )
        yield from self._of_hooks()
        yield from self._of_modes()
        yield from self._of_settings()

    def _of_draws(self) -> Iterator[Cause]:
        name, program = "random numbers drawn per rank", self._program
        if program.seeds is not Seeds.BY_RANK and self._helps(program.but(seeds=Seeds.BY_RANK)):
            yield Cause(
                name=name,
                evidence="with the random numbers of each rank's batch seeded alike in both runs "
                "they agree, or agree for longer. If they are meant (dropout), pass "
                "aligned_seeds=True (--aligned-seeds on the command line); ranks that should draw "
                "apart need seeds of their own",
            )
        elif program.seeds is not Seeds.ALIKE and self._helps(program.but(seeds=Seeds.ALIKE)):
            yield Cause(
                name=name,
                evidence="with the same random numbers for all ranks' batches both runs agree, or "
                "agree for longer, and with others on each rank they do not, as where random "
                "numbers decide which modules run: draw these alike on all ranks",
            )

    def _of_hooks(self) -> Iterator[Cause]:
        params = raise_together(lambda: dict(self._program.built().named_parameters()))
        hooked = {name: hooks_of(param) for name, param in params.items() if hooks_of(param)}
        if hooked and self._helps(self._program.but(unhooked=True)):
            name, kinds = next(iter(hooked.items()))
            yield Cause(
                name="a hook on a parameter",
                evidence=f"{name} has a hook by {kinds[0]} from before it was sharded; the sharded "
                "parameter is another tensor, and does not call it, and without it both agree. "
                "Register one after sharding, by register_post_accumulate_grad_hook",
            )

    def _of_modes(self) -> Iterator[Cause]:
        modes = self._outcome.seen.modes
        if modes and self._helps(self._program.but(modes=modes)):
            names = listed(name or "the model" for name in modes)
            yield Cause(
                name="train and eval mode mixed up",
                evidence=f"{names} is in train mode in one of the models, in eval mode in the "
                "other, and in one mode both agree. Set it in build_model or loss",
            )

    def _of_settings(self) -> Iterator[Cause]:
        changed = self._outcome.seen.changed
        if any(changed) and self._helps(self._program.but(settings=changed)):
            named = {place: value for settings in changed for place, value in settings.items()}
            told = [f"{key} of {name or 'the model'} is {v!r}" for (name, key), v in named.items()]
            yield Cause(
                name="a setting of a module that is not the same",
                evidence=f"{listed(told)} in the sharded model only, and with these values in the "
                "unsharded one both agree. Set it in build_model",
            )

    def of_last_resort(self) -> Iterator[Cause]:
        """Yield causes to try if no other cause was shown."""
        first, program = self._outcome.first, self._program
        assert first is not None, "there is a difference"
        if first.phase not in _OPTIMIZERS and self._helps(program.but(by_rank=True)):
            yield Cause(
                name="code that asks for its rank",
                evidence="the unsharded model agrees if dist.get_rank() answers it with the rank "
                "whose batch it has: the model, or the loss, does something else on another rank",
            )
        elif (
            first.phase in _OPTIMIZERS
            and program.step is None
            and self._helps(program.but(optimizer=sgd))
        ):
            yield Cause(
                name="an optimizer that does not step alike",
                evidence="gradients agree, and with SGD in its place so do updates: it does "
                "something else with the sharded parameters than with the unsharded ones",
            )

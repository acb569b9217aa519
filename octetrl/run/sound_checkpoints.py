"""Which checkpoints of a run are sound, by the collapse gate; they outlive pruning, and whatever ends a run names them.

Of the checkpoints up to the last step that was sound, the last is exempt from pruning, and so is the last from before a
collapse. Where two or more are kept anyway, that keeps no further one in a sound run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from octetrl.config.schema import Recipe
from octetrl.run.resume import Checkpoints
from octetrl.telemetry.collapse import Collapse, CollapseError, CollapseGate

REMEDY = "start a new run from it with a lower trainer.optimizer.lr or trainer.optimizer.max_grad_norm"


class SoundCheckpoints:
    """`past`: the lines of metrics.jsonl that a resumed run has behind it."""

    def __init__(self, checkpoints: Checkpoints, recipe: Recipe, past: Iterable[Mapping[str, float | None]]) -> None:
        self._checkpoints, self._fails = checkpoints, recipe.collapse == "fail"
        self._gate = None if recipe.collapse == "off" else CollapseGate(recipe.rollout.group_size)
        self._saved_step = -1
        if self._gate is not None:
            self._gate.replay(past)

    def look(self, step: int, metrics: Mapping[str, float]) -> Collapse | None:
        return None if self._gate is None else self._gate.look(step, metrics)

    def saved(self, step: int) -> None:
        self._saved_step = step

    def prune(self, step: int) -> None:
        """After a step that saved, and after the next, which has shown what the saved weights are worth."""
        if step - self._saved_step not in (0, 1):
            return
        bounds = () if self._gate is None else (self._gate.sound_until, self._gate.sound_before_collapse)
        self._checkpoints.prune([bound for bound in bounds if bound is not None])

    def warning(self, collapse: Collapse | None) -> str | None:
        """What to say of it. Raises CollapseError instead with `collapse: fail`."""
        if collapse is None:
            return None
        text = f"{collapse}; {named(self._checkpoints.latest_until(collapse.sound_until))}"
        if self._fails:
            raise CollapseError(f"{text}; stopped, because of collapse: fail")
        return text

    def last_sound(self, failed_step: int) -> str:
        """Names the last checkpoint whose weights went through a whole step, for a run that failed in `failed_step`."""
        until = failed_step - 2 if self._gate is None else self._gate.sound_until
        return named(self._checkpoints.latest_until(until))


def named(path: Path | None) -> str:
    if path is None:
        return "no checkpoint is known to be sound; start again with a lower trainer.optimizer.lr"
    return f"the last checkpoint from before is {path}: {REMEDY}"

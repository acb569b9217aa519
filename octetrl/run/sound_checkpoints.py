"""Keeps the last sound checkpoint of a run, as judged by the collapse check, and names it when the run ends.

The last checkpoint up to the last sound step is exempt from pruning, and so is the last one from before a collapse. If
the recipe keeps two or more checkpoints, a sound run keeps no additional one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from octetrl.config.schema import Recipe
from octetrl.run.checkpoints import Checkpoints
from octetrl.telemetry.collapse import Collapse, CollapseError, CollapseGate

REMEDY = "start a new run from it with a lower trainer.optimizer.lr or trainer.optimizer.max_grad_norm"


class SoundCheckpoints:
    """`past`: the lines of metrics.jsonl that a resumed run has behind it."""

    def __init__(self, checkpoints: Checkpoints, recipe: Recipe, past: Iterable[Mapping[str, float | None]]) -> None:
        self._checkpoints, self._fails = checkpoints, recipe.collapse == "fail"
        self._gate = None if recipe.collapse == "off" else CollapseGate(recipe.rollout.group_size)
        self._num_pruned, self._once_more = 0, False
        if self._gate is not None:
            self._gate.replay(past)

    def look(self, step: int, metrics: Mapping[str, float]) -> Collapse | None:
        return None if self._gate is None else self._gate.look(step, metrics)

    def prune(self) -> None:
        """Prunes after a step in which a checkpoint became visible, and after the next step, which shows whether the
        saved weights are sound."""
        num_saved = self._checkpoints.num_saved
        is_new = num_saved != self._num_pruned
        if is_new or self._once_more:
            bounds = () if self._gate is None else (self._gate.sound_until, self._gate.sound_before_collapse)
            self._checkpoints.prune([bound for bound in bounds if bound is not None])
        self._num_pruned, self._once_more = num_saved, is_new

    def warning(self, collapse: Collapse | None) -> str | None:
        """The warning about a collapse. With `collapse: fail` raises CollapseError instead."""
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
        return (
            "no checkpoint is known to be sound; start again with a lower trainer.optimizer.lr, or with other weights"
            " if the first step failed"
        )
    return f"the last checkpoint from before is {path}: {REMEDY}"

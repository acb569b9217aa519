"""What the loop checks after each step: empty steps, slow rewards, sound checkpoints.

**Empty steps** have no trained token. Why did a step teach nothing, and when does that end the run?

    no rollout has a reward          at the first step the run ends: its prompts are too long, or its score fails
    rewards, but no trained token    a warning, because the next tasks may give a signal

After `failures.max_empty_steps` such steps in a row the run ends, whatever the reason. A step that has nothing to learn
because a model that was trained solves its tasks does not count.

**Slow rewards.** The time that a step waits for rewards, and a warning that names the slowest task.

**Sound checkpoints.** Keeps the last sound checkpoint of a run, as judged by the collapse check, and names it when the
run ends.

The last checkpoint up to the last sound step is exempt from pruning, and so is the last one from before a collapse. If
the recipe keeps two or more checkpoints, a sound run keeps no additional one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from octetrl.config.schema import Recipe
from octetrl.config.several_environments import section_name
from octetrl.environments.dialogue import Dialogues
from octetrl.environments.judge import Judge
from octetrl.environments.mixed import MixedScorer
from octetrl.environments.named_rewards import RewardsInRun
from octetrl.environments.scoring import BatchScorer, RewardTimes
from octetrl.run.checkpoints import Checkpoints
from octetrl.system.errors import RunFailed
from octetrl.telemetry.collapse import Collapse, CollapseError, CollapseGate


class EmptySteps:
    """Counts empty steps in a row. Call `warning` once a step, then `check`.

    past: the lines of metrics.jsonl that a resumed run has behind it. If these ended it, they count again from 0."""

    def __init__(self, recipe: Recipe, past: Iterable[Mapping[str, float | None]] = ()) -> None:
        self._recipe = recipe
        self._most = recipe.failures.max_empty_steps
        self._in_a_row = 0
        self._has_trained = False
        self._has_said_solved = False
        self._failing_so_far: set[str] = set()  # environments without a reward that a warning has named
        for row in past:
            metrics = {name: value for name, value in row.items() if value is not None}
            self._count(metrics)
            if "train/skipped" not in metrics:
                self._failing(0, metrics)
        if self._in_a_row >= self._most:
            self._in_a_row = 0

    def _count(self, metrics: Mapping[str, float]) -> None:
        if "train/skipped" not in metrics:
            self._in_a_row, self._has_trained = 0, True
        elif self._is_solved(metrics):
            self._has_said_solved = True
        else:
            self._in_a_row += 1

    def warning(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """A line that says why the step taught nothing, or which of several environments fails. None: neither."""
        was_said = self._has_said_solved
        self._count(metrics)
        if "train/skipped" not in metrics:
            return self._failing(step, metrics)
        if self._is_solved(metrics):
            return None if was_said else f"step {step}: no update, because {self._reason(metrics)} (said once)"
        where = f"; look at rollouts/step_{step:06d}.jsonl" if "rollout/count" in metrics else ""
        return f"step {step}: no update, because {self._reason(metrics)}{where}"

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises RunFailed if no further step is worth its time."""
        if not self._most or not self._in_a_row:
            return
        has_rewards = metrics.get("reward/count", 0.0) > 0
        if step == 1 and not has_rewards:
            raise RunFailed(f"step 1 has no trained token: {self._reason(metrics)}")
        if self._in_a_row >= self._most:
            raise RunFailed(
                f"{self._in_a_row} steps in a row have no trained token (failures.max_empty_steps); in the last one"
                f" {self._reason(metrics)}"
            )

    def _is_solved(self, metrics: Mapping[str, float]) -> bool:
        """Whether all answers are right after updates of this run."""
        return self._has_trained and self._is_right(metrics)

    def _is_right(self, metrics: Mapping[str, float]) -> bool:
        """Whether the rewards of every group are equal, and as high as of right answers."""
        equal = metrics.get("reward/zero_variance_fraction") == 1.0
        return equal and metrics.get("reward/mean", -math.inf) >= self._recipe.evaluation.right_from

    def _failing(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """A line, once for each, for environments whose rollouts all failed."""
        failing = [
            name
            for name in sorted(self._recipe.environments)
            if metrics.get(f"environments/{name}/failure_share") == 1.0 and name not in self._failing_so_far
        ]
        self._failing_so_far |= set(failing)
        if not failing:
            return None
        names, look = ", ".join(map(section_name, failing)), f"look at rollouts/step_{step:06d}.jsonl"
        return f"step {step}: every rollout of {names} failed, so nothing is learned there; {look}"

    def _reason(self, metrics: Mapping[str, float]) -> str:
        if "rollout/count" not in metrics:
            return "no example of the batch has a token to train on; look at data.too_long and the lengths of the data"
        count, rewards = metrics["rollout/count"], metrics["reward/count"]
        limit = self._recipe.rollout.max_prompt_tokens
        if metrics["rollout/prompt_too_long"] == count:
            return f"every prompt has more than {limit} tokens; raise rollout.max_prompt_tokens, or shorten the tasks"
        if not rewards:
            failed = [
                f"{metrics[f'rollout/{status}']:.0f} {status}"
                for status in _WITHOUT_REWARD
                if metrics.get(f"rollout/{status}")
            ]
            return f"none of {count:.0f} rollouts has a reward ({', '.join(failed)})"
        having = _scored(rewards, count)
        if self._is_solved(metrics):
            return f"all answers are right ({having}; mean reward {metrics['reward/mean']:.3g}); give harder tasks"
        if metrics.get("reward/zero_variance_fraction") == 1.0:
            return self._equal(metrics, having)
        if metrics.get("rollout/truncated_share") == 1.0:
            return f"every answer is truncated ({having}); raise rollout.max_new_tokens, or algorithm.overlong=keep"
        return f"no group had both different rewards and answers to train on ({having})"

    def _equal(self, metrics: Mapping[str, float], having: str) -> str:
        """Why a step teaches nothing whose rewards are equal within every group."""
        if metrics.get("rollout/mean_length", math.inf) <= _EMPTY:
            return (
                f"the rewards are equal within every group, and the answers are empty ({having}); see what the"
                " reward gives an empty answer, and whether algorithm.overlong_buffer takes reward from longer ones"
            )
        mean = metrics["reward/mean"]
        figures = f"{having}; mean reward {mean:.3g}"
        if self._is_right(metrics):
            return f"all answers are right ({figures}); give harder tasks"
        if mean <= 0 and metrics.get("reward/std") == 0:
            return f"no answer has a reward above 0 ({figures}); give easier tasks"
        return (
            f"the rewards are equal within every group ({figures}); give easier or harder tasks, or a larger"
            " rollout.group_size"
        )


def _scored(rewards: float, count: float) -> str:
    """How many of a step's answers have a reward."""
    if rewards < count:
        return f"{rewards:.0f} of {count:.0f} answers were scored"
    return f"all {count:.0f} answers were scored" if count > 1 else "the one answer was scored"


_EMPTY = 1.05  # tokens of an answer, on average: little more than its end
_WITHOUT_REWARD = (
    "prompt_too_long",
    "reward_error",
    "reward_timeout",
    "reward_crash",
    "reward_memory",
    "tool_error",
    "agent_error",
    "box_error",
    "environment_error",
    "environment_timeout",
)


SHARE, SECONDS = 0.5, 1.0  # of the step, and at least, that are worth a warning


class SlowRewards:
    """Warns once a run, if a step waits for rewards for more than half of its time."""

    def __init__(self, rewards: BatchScorer | Dialogues) -> None:
        self._scorer = rewards.scorer if isinstance(rewards, Dialogues) else rewards
        self._has_warned = False

    def warning(self, step: int, metrics: Mapping[str, float], times: RewardTimes | None) -> str | None:
        """metrics: of the step, with `time/reward`. times: None where they were not measured."""
        waited, whole = metrics.get("time/reward", 0.0), metrics.get("time/step", 0.0)
        waited = min(waited, metrics.get("time/wait_for_batch", waited))  # a batch ahead: the step learnt meanwhile
        if self._has_warned or waited < SECONDS or waited < SHARE * whole:
            return None
        self._has_warned = True
        said = f"step {step}: {waited:.1f} of {whole:.1f} s were spent waiting for rewards"
        times = times or RewardTimes()
        crashed, replaced = metrics.get("rollout/reward_crash", 0.0), metrics.get("rollout/reward_restarts", 0.0)
        if crashed and times.slowest < SHARE * waited:
            restarts = f", in which {replaced:.0f} reward processes were replaced" if replaced else ""
            return (
                f"{said}{restarts} ({crashed:.0f} reward_crash: the score ended its process);"
                f" rollouts/step_{step:06d}.jsonl says why"
            )
        if times.slowest_task:
            said += f" (the slowest call, {times.slowest:.1f} s, was task '{times.slowest_task}')"
        scorer, section = self._scorer, "environment"
        if isinstance(scorer, MixedScorer):
            name = times.slowest_task.partition("/")[0]
            scorer, section = scorer.of(name), section_name(name or "NAME")
        return f"{said}; make the score faster{_more_at_once(scorer, section)}"


def _more_at_once(scorer: BatchScorer | None, section: str) -> str:
    """What lets more rewards be computed at once."""
    if isinstance(scorer, RewardsInRun):
        return f", or raise max_concurrent or per_minute in {section}.reward" if scorer.limited else ""
    return f", or raise {section}.{'judge.concurrency' if isinstance(scorer, Judge) else 'reward_workers'}"


REMEDY = "start a new run from it with a lower trainer.optimizer.lr or trainer.optimizer.max_grad_norm"


class SoundCheckpoints:
    """`past`: the lines of metrics.jsonl that a resumed run has behind it."""

    def __init__(self, checkpoints: Checkpoints, recipe: Recipe, past: Iterable[Mapping[str, float | None]]) -> None:
        self._checkpoints, self._fails = checkpoints, recipe.collapse == "fail"
        self._gate = None if recipe.collapse == "off" else CollapseGate(max(recipe.group_sizes))
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

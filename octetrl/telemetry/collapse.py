"""Detect the collapse of a run: compare reward, entropy, gradient norm and loss with the run's earlier steps.

All four change during learning, and single steps are noisy. So each step is compared with the median of the last
WINDOW sound steps, *the past*. Thresholds are in units of the past's own noise. A step is *unsound* if one of these
holds, and PATIENCE unsound steps in a row are a collapse:

    reward fell     below the past by 3 standard errors of a step's mean and by half a standard deviation of rewards
    reward is dead  all rewards of the step are equal and below the past, and chance is an improbable cause
    entropy rose    by 8 spreads, to 3 times the past, and by 1 nat or more
    entropy fell    to a twentieth of the past, and the reward is below its past too
    grad norm rose  by 8 spreads of its logarithm and to 10 times the past
    loss rose       only conversations and preferences: by 8 spreads and to 1.5 times the past's highest loss

A spread is 1.4826 times the median distance from the median. For normally distributed noise it is the standard
deviation. The standard error has two estimates, and the larger one counts: the spread of the steps' means, and the
rewards' standard deviation divided by the root of the number of groups.

These are not a collapse: rewards that never differed, entropy that falls while the reward does not, a loss that falls.

Rollouts and gradient of step t come from the weights after step t - 1. A checkpoint is *sound* once a whole step has
been measured with its weights and that step was not unsound.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from octetrl.system.errors import RunFailed

WINDOW, PATIENCE = 50, 5  # steps
ENOUGH = 10  # smallest number of past steps for which spreads are computed
SPREADS = 8.0
REWARD_ERRORS, REWARD_DEVIATIONS = 3.0, 0.5
ENTROPY_TIMES, ENTROPY_NATS, ENTROPY_SHARE = 3.0, 1.0, 1 / 20
GRADIENT_TIMES, LOSS_TIMES = 10.0, 1.5
IMPROBABLE = 1e-6
REWARD, SPREAD_OF_REWARDS, ALL_EQUAL = "reward/mean", "reward/std", "reward/zero_variance_fraction"
KEPT = (REWARD, SPREAD_OF_REWARDS, ALL_EQUAL, "rollout/count", "entropy", "grad_norm", "loss")

What = Literal["reward fell", "reward is dead", "entropy rose", "entropy fell", "grad_norm rose", "loss rose"]


class CollapseError(RunFailed):
    """The run collapsed, and `collapse: fail` ends it."""


@dataclass(frozen=True, slots=True)
class Collapse:
    """A collapse found in step `step`, with its first unsound step `since`.

    `now` is the metric in this step, `past` the past's median, both in the metric's unit."""

    what: What
    since: int
    step: int
    now: float
    past: float
    sound_until: int
    """Last step whose checkpoint is from before the collapse."""

    def __str__(self) -> str:
        return (
            f"step {self.step}: the run has collapsed: {self.what}, now {self.now:.4g} against a median of"
            f" {self.past:.4g} before, in every step since {self.since}"
        )


class CollapseGate:
    """Detects a collapse from the metrics of each step, in ascending order of steps.

    group_size: number of a prompt's siblings. Their rewards are correlated, so groups are the independent samples.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._past: deque[dict[str, float]] = deque(maxlen=WINDOW)  # sound steps
        self._since: dict[What, int] = {}  # first step of the current series of unsound steps, by symptom
        self._dead_groups = 0.0  # number of groups since "reward is dead" began
        self._last_step = 0
        self._last_found: Collapse | None = None
        self._is_reported = False  # a collapse was returned, and no PATIENCE sound steps in a row have followed yet
        self._sound_in_a_row = 0

    @property
    def sound_until(self) -> int:
        """Last step whose checkpoint is sound."""
        first_unsound = min(self._since.values(), default=self._last_step + 1)
        return first_unsound - 2

    @property
    def sound_before_collapse(self) -> int | None:
        """Last step whose checkpoint was sound before the latest collapse. None: there was no collapse."""
        return None if self._last_found is None else self._last_found.sound_until

    def replay(self, steps: Iterable[Mapping[str, float | None]]) -> None:
        """Read the earlier steps of a resumed run, from its metrics.jsonl."""
        for line in steps:
            step = line["step"]
            assert step is not None, "a line of metrics.jsonl has its step"
            self.look(int(step), line)

    def look(self, step: int, metrics: Mapping[str, float | None]) -> Collapse | None:
        """Read a step's metrics, and return a collapse in the step that makes it certain.

        Each collapse is returned once. Another one is returned only after PATIENCE sound steps in a row."""
        now = {name: value for name in KEPT if (value := metrics.get(name)) is not None and math.isfinite(value)}
        self._last_step = step
        found = {what: numbers for what, *numbers in self._unsound(now)}
        self._forget({*self._judged(now)} - found.keys())
        for what in found:
            self._since.setdefault(what, step)
        if "reward is dead" in found:
            self._dead_groups += self._chances(now)
        self._sound_in_a_row = 0 if self._since else self._sound_in_a_row + 1
        self._is_reported = self._is_reported and self._sound_in_a_row < PATIENCE
        if not self._since and not self._is_reported:
            self._past.append(now)
        collapse = None if self._is_reported else self._certain(step, found)
        if collapse is not None:
            self._is_reported, self._last_found = True, collapse
        return collapse

    def _forget(self, sound: set[What]) -> None:
        for what in sound & self._since.keys():
            del self._since[what]
            if what == "reward is dead":
                self._dead_groups = 0.0

    def _certain(self, step: int, found: Mapping[What, list[float]]) -> Collapse | None:
        for what, (now, past) in found.items():
            if step - self._since[what] + 1 >= PATIENCE and (what != "reward is dead" or self._is_improbable()):
                return Collapse(what, self._since[what], step, now, past, self.sound_until)
        return None

    def _is_improbable(self) -> bool:
        """Whether chance is an improbable cause of so many groups with equal rewards in a row.

        The probability follows from the past's share of such groups. Where groups have one answer, a step's rewards
        count as one group."""
        groups = equal = 0.0
        for step in self._past:
            groups += self._chances(step)
            equal += step.get(ALL_EQUAL, step.get(SPREAD_OF_REWARDS) == 0) * self._chances(step)
        return self._dead_groups * math.log((equal + 1) / (groups + 2)) < math.log(IMPROBABLE)

    def _groups(self, step: Mapping[str, float]) -> float:
        return step.get("rollout/groups", step.get("rollout/count", 0.0) / self._group_size)

    def _chances(self, step: Mapping[str, float]) -> float:
        """Groups whose rewards could have differed. Groups of one answer could not; their step counts as one."""
        return self._groups(step) if self._group_size > 1 else 1.0

    def _judged(self, now: Mapping[str, float]) -> Iterator[What]:
        """Yield the symptoms that the step's metrics can confirm or exclude. Missing metrics do neither."""
        if REWARD in now:
            yield from ("reward fell", "reward is dead")
        if "entropy" in now:
            yield from ("entropy rose", "entropy fell")
        if "grad_norm" in now:
            yield "grad_norm rose"
        if "loss" in now:
            yield "loss rose"

    def _unsound(self, now: Mapping[str, float]) -> Iterator[tuple[What, float, float]]:
        """Yield each symptom found in this step, with the metric's value now and the past's median."""
        yield from self._reward(now)
        entropies = self._of("entropy")
        if "entropy" in now and len(entropies) >= ENOUGH:
            value, past = now["entropy"], statistics.median(entropies)
            if value > max(past + SPREADS * spread(entropies), ENTROPY_TIMES * past, past + ENTROPY_NATS):
                yield "entropy rose", value, past
            if value < ENTROPY_SHARE * past and self._reward_is_below(now, errors=1.0):
                yield "entropy fell", value, past
        norms = [value for value in self._of("grad_norm") if value > 0]
        if now.get("grad_norm", 0.0) > 0 and len(norms) >= ENOUGH:
            value, past = now["grad_norm"], statistics.median(norms)
            logarithms = [math.log(norm) for norm in norms]
            if math.log(value / past) > max(math.log(GRADIENT_TIMES), SPREADS * spread(logarithms)):
                yield "grad_norm rose", value, past
        losses = self._of("loss")
        if "loss" in now and REWARD not in now and len(losses) >= ENOUGH:
            value, past = now["loss"], statistics.median(losses)
            if value > max(past + SPREADS * spread(losses), max(losses) + (LOSS_TIMES - 1) * abs(max(losses))):
                yield "loss rose", value, past

    def _reward(self, now: Mapping[str, float]) -> Iterator[tuple[What, float, float]]:
        if REWARD not in now or not self._of(REWARD):
            return
        past = statistics.median(self._of(REWARD))
        if self._reward_is_below(now, errors=REWARD_ERRORS, deviations=REWARD_DEVIATIONS):
            yield "reward fell", now[REWARD], past
        if now.get(SPREAD_OF_REWARDS) == 0 and now[REWARD] < past:
            yield "reward is dead", now[REWARD], past

    def _reward_is_below(self, now: Mapping[str, float], errors: float, deviations: float = 0.0) -> bool:
        means = self._of(REWARD)
        if REWARD not in now or not means:
            return False
        deviation = max(statistics.median(self._of(SPREAD_OF_REWARDS) or [0.0]), now.get(SPREAD_OF_REWARDS, 0.0))
        groups = statistics.median(self._groups(step) for step in self._past if REWARD in step)
        error = max(deviation / math.sqrt(max(groups, 1.0)), spread(means))
        error *= math.sqrt(1 + 1 / len(means))  # includes the error of the past's own mean
        return error > 0 and now[REWARD] < statistics.median(means) - max(errors * error, deviations * deviation)

    def _of(self, name: str) -> list[float]:
        return [step[name] for step in self._past if name in step]


def spread(values: list[float]) -> float:
    """Compute a robust standard deviation: 1.4826 times the median distance from the median."""
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)

"""The line that a person reads after each step: few numbers, each with its meaning, as many as the width holds.

    step  3/20  reward 0.265  log-probs equal  entropy 5.923  length 16  truncated 97%  1.4 s  23 s left

What is 0 in a healthy run (failed, truncated, ...) is shown only if it is not. Where the width is small, the numbers
that matter most are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from octetrl.config.limits import MISMATCH_LIMIT
from octetrl.config.ranking import best_steps, lower_is_better
from octetrl.system.text import counted
from octetrl.telemetry.metrics import EQUAL_REWARDS_LIMIT, MISMATCH, TRUNCATED_LIMIT, UNFINISHED_LIMIT, stale_share

Tone = Literal["plain", "good", "warn", "bad"]

WIDTH = 120  # columns at most
SLOW_REWARDS = 0.1  # of the step's time: a step that waits longer for rewards says so


class LinePart(NamedTuple):
    """A piece of a line. `label` comes before the value; empty: the value explains itself."""

    label: str
    value: str
    tone: Tone = "plain"

    @property
    def text(self) -> str:
        return f"{self.label} {self.value}" if self.label else self.value


class Number(NamedTuple):
    """A metric in the line. `form`: format specification. `warn`: above it, a person should look."""

    metric: str
    label: str
    form: str
    only_above_0: bool = False
    warn: float | None = None
    tone: Tone = "warn"


NUMBERS = (  # in the order of the line
    Number("reward/mean", "reward", ".3f"),
    Number("preference/accuracy", "pairs right", ".1%"),
    Number("loss", "loss", ".4f"),
    Number(MISMATCH, "log-probs", ""),
    Number("entropy", "entropy", ".3f"),
    Number("kl", "kl", ".4f"),
    Number("grad_norm", "grad norm", ".3f"),
    Number("rollout/mean_length", "length", ",.0f"),
    Number("rollout/failure_share", "failed", ".0%", only_above_0=True, warn=0.0, tone="bad"),
    Number("rollout/too_long_share", "too long", ".0%", only_above_0=True, warn=0.0),
    Number("agent/discarded_tokens", "discarded tokens", ",.1f", only_above_0=True, warn=0.0),
    Number("agent/engine_share", "in engine", ".0%"),
    Number("reward/zero_variance_fraction", "equal rewards", ".0%", only_above_0=True, warn=EQUAL_REWARDS_LIMIT),
    Number("curriculum/resting_share", "resting", ".0%", only_above_0=True),
    Number("rollout/truncated_share", "truncated", ".0%", only_above_0=True, warn=TRUNCATED_LIMIT),
    Number("rollout/unfinished_share", "out of turns", ".0%", only_above_0=True, warn=UNFINISHED_LIMIT),
    Number("fp8/kv_saturation", "clamped KV", ".2%", only_above_0=True, warn=0.001),
    Number("correction/clip_fraction", "corrected", ".1%", only_above_0=True),
    Number("rollout/tokens_per_second", "rollout tok/s", ",.0f"),
    Number("train/tokens_per_second", "train tok/s", ",.0f"),
    Number("memory/peak_gb", "memory GB", ".1f"),
)
TIME, REWARDS = "time/step", "time/reward"
OTHERS = {"log-probs equal": MISMATCH, "log-probs apart": MISMATCH, "apart": MISMATCH} | {
    "stale": "rollout/on_policy_share",
    **{"held-out accuracy": "eval/accuracy", "held-out loss": "eval/loss"},
    "waiting for rewards": REWARDS,
}
PRIORITY = (  # which numbers are kept where not all fit
    *("reward/mean", MISMATCH, "preference/accuracy", "kl", "rollout/failure_share"),
    *("rollout/too_long_share", "agent/discarded_tokens", "reward/zero_variance_fraction"),
    *("rollout/truncated_share", TIME, REWARDS),
    *("rollout/unfinished_share", "curriculum/resting_share", "agent/engine_share", "loss", "rollout/mean_length"),
    *("entropy", "fp8/kv_saturation", "grad_norm"),
    "memory/peak_gb",
    *("rollout/tokens_per_second", "train/tokens_per_second", "correction/clip_fraction"),
)
FIRST = PRIORITY[:4]  # always shown; kl only with a reference
LEAST = {*PRIORITY[PRIORITY.index("rollout/unfinished_share") :]}
ALARMS: tuple[Tone, ...] = ("warn", "bad")


class StepLine:
    """Makes the lines of a run of `total` steps. Above `limit` the mismatch is coloured: its `mismatch.warn_above`.

    It keeps how wide each number has been, so that the lines stay columns, and shows on what was once above 0. Where
    not all numbers fit, those that were shown and those with a warning come first, and then the most important ones.
    The least important ones fill the room that is left."""

    def __init__(self, total: int, limit: float = MISMATCH_LIMIT) -> None:
        self._total, self._limit = total, limit
        self._widths: dict[str, int] = {}
        self._seen: set[str] = set()  # what was above 0
        self._shown: set[str] = set()  # what the lines keep

    def parts(self, step: int, metrics: Mapping[str, float], left: str = "", width: int = WIDTH) -> list[LinePart]:
        """The parts of a step's line, which is at most `width` columns wide. `left`: the time left, in words."""
        title = LinePart("step", f"{step:>{len(str(self._total))}}/{self._total}")
        end = [LinePart("", self._padded("left", f"{left} left"))] if left else []
        found = {name: part._replace(value=self._padded(name, part.value)) for name, part in self._measured(metrics)}
        room = width - len(title.text) - (self._widths["left"] + 2 if "left" in self._widths else 0)
        firm = {*FIRST, *self._shown, *(name for name, part in found.items() if part.tone in ALARMS)}
        kept: set[str] = set()
        for name in sorted(PRIORITY, key=lambda name: name not in firm):
            if name in found and len(found[name].text) + 2 <= room:
                kept.add(name)
                room -= len(found[name].text) + 2
        self._shown |= kept - LEAST
        order = [*(number.metric for number in NUMBERS), REWARDS, TIME]
        return [title, *(found[name] for name in order if name in kept), *end]

    def _padded(self, name: str, text: str) -> str:
        if name == MISMATCH:
            return text  # words
        self._widths[name] = max(self._widths.get(name, 0), len(text))
        return text.rjust(self._widths[name])

    def _measured(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, LinePart]]:
        for number in NUMBERS:
            value = metrics.get(number.metric)
            if value is None or (number.metric == "loss" and "reward/mean" in metrics):
                continue
            if number.only_above_0 and value == 0 and number.metric not in self._seen:
                continue
            self._seen.add(number.metric)
            if number.metric == MISMATCH:
                yield number.metric, _agreement(value, metrics, self._limit)
            else:
                tone: Tone = number.tone if number.warn is not None and value > number.warn else "plain"
                yield number.metric, LinePart(number.label, format(value, number.form), tone)
        seconds, waited = metrics.get(TIME), metrics.get(REWARDS, 0.0)
        waited = min(waited, metrics.get("time/wait_for_batch", waited))  # a batch ahead: the step learnt meanwhile
        if seconds:
            yield TIME, LinePart("", duration(seconds))
            if waited > SLOW_REWARDS * seconds:
                yield REWARDS, LinePart("waiting for rewards", f"{waited / seconds:.0%}", "warn")


def _agreement(error: float, metrics: Mapping[str, float], limit: float) -> LinePart:
    """Whether the log-probs of engine and trainer are equal. `error`: mean of exp(absolute difference). With stale
    tokens it contains the change of the policy, so it is not 0 in a sound run."""
    tone: Tone = "warn" if error > limit else "plain"
    if stale := stale_share(metrics):
        return LinePart("stale", f"{stale:.0%}, log-probs {error - 1:.1%} apart", tone)
    unequal = metrics.get("mismatch/unequal_tokens", 0.0 if error == 1 else None)
    if unequal is None:
        return LinePart("log-probs", f"{error - 1:.3%} apart", tone)
    if unequal:
        return LinePart("log-probs", f"differ in {counted(round(unequal), 'token')}", "bad")
    return LinePart("log-probs", "equal", "good")


def on_the_console(label: str) -> str | None:
    """The metric that the console shows under this label. None: it has no such label."""
    labels = {number.label.lower(): number.metric for number in NUMBERS} | OTHERS
    return labels.get(label.strip().lower())


def evaluated_metric(metrics: Mapping[str, Any]) -> str | None:
    """The metric of a step that its evaluation is judged by. None: it has no evaluation."""
    return next((name for name in ("eval/loss", "eval/accuracy") if metrics.get(name) is not None), None)


def evaluation_parts(
    step: int, total: int, metrics: Mapping[str, float], earlier: Mapping[int, float], width: int = WIDTH
) -> list[LinePart]:
    """The parts of an evaluation's line. `earlier`: that metric of the evaluations before, by step. What `width` does
    not hold is left out; the comparison is kept longest."""
    metric = evaluated_metric(metrics)
    assert metric is not None, "a step without an evaluation has no line of one"
    value, sign = metrics[metric], -1 if lower_is_better(metric) else 1
    label = "held-out loss" if sign < 0 else "held-out accuracy"
    title = [
        LinePart("eval", f"{step:>{len(str(total))}}/{total}"),
        LinePart(label, f"{value:.{4 if sign < 0 else 3}f}"),
    ]
    if sign < 0 and "eval/accuracy" in metrics:
        title.append(LinePart("pairs right", f"{metrics['eval/accuracy']:.1%}"))
    interval, best, seconds = None, None, metrics.get("time/evaluate")
    if "eval/accuracy_low" in metrics and "eval/accuracy_high" in metrics:
        low_to_high = f"{metrics['eval/accuracy_low']:.3f} to {metrics['eval/accuracy_high']:.3f}"
        interval = LinePart("95% interval", low_to_high)
    if earlier:
        at = best_steps(earlier.items(), metric)[0]
        if sign > 0 and value <= 0 and earlier[at] <= 0:
            best = LinePart("", "none above 0 so far")
        elif sign * value > sign * earlier[at]:
            best = LinePart("", f"the best so far, {value - earlier[at]:+.3f} against step {at}", "good")
        else:
            best = LinePart("best so far", f"{earlier[at]:.3f} at step {at}")
    took = LinePart("", duration(seconds)) if seconds else None
    room, kept = width - len(line(title)), []
    for part in filter(None, (best, interval, took)):  # what matters most comes first
        if len(part.text) + 2 <= room:
            kept.append(part)
            room -= len(part.text) + 2
    return [*title, *(part for part in (interval, best, took) if part in kept)]


def environment_parts(metrics: Mapping[str, float], label: str, form: str) -> list[LinePart]:
    """The parts of a line with a number of each environment, - if no rollout has a reward. Empty for a single one.

    form: the metric's name, such as `environments/{}/reward`."""
    begin, end = form.split("{}")
    found = {name.removeprefix(begin).removesuffix(end): value for name, value in metrics.items()
             if name.startswith(begin) and name.endswith(end) and name.count("/") == form.count("/")}  # fmt: skip
    shown = {name: LinePart(name, f"{value:.3f}") for name, value in found.items()}
    for metric in metrics:
        if metric.startswith(begin) and metric.endswith("/failure_share"):
            name = metric.removeprefix(begin).removesuffix("/failure_share")
            shown.setdefault(name, LinePart(name, "-", "bad"))
    return [LinePart("", label), *(shown[name] for name in sorted(shown))] if shown else []


def rows_of(parts: list[LinePart], width: int) -> Iterator[list[LinePart]]:
    """The parts in rows of at most `width` columns. A later row begins below the second part of the first."""
    row: list[LinePart] = []
    for part in parts:
        if len(row) > 1 and len(line([*row, part])) > width:
            yield row
            row = [LinePart("", " " * len(parts[0].text))]
        row.append(part)
    if row:
        yield row


def line(parts: list[LinePart]) -> str:
    return "  ".join(part.text for part in parts)


def duration(seconds: float) -> str:
    """A time: seconds below a minute, then minutes and seconds (1:57), or hours (2:03:10). Empty for none."""
    if seconds <= 0:
        return ""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"

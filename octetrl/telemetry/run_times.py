"""Where the time of a run went, in parts that add up.

A step that generates and then learns is the sum of its phases. With `cluster.max_staleness` above 0 other workers
generate the next batches while a step learns. The parts are then what the step did and what it waited for. The time of
generating is not one of them, because it overlaps with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from octetrl.telemetry.metrics import BETWEEN_STEPS
from octetrl.telemetry.step_line import duration

Rows = Sequence[Mapping[str, float | None]]

LEARNING = ("time/train", "time/calibrate", "time/publish", "time/send_weights")
PHASES = ("time/rollout", "time/reward", *LEARNING)
PHASES_AHEAD = ("time/wait_for_batch", *LEARNING)
OTHER = "other"
ROUNDING = 0.02  # of the steps' time
LEAST = 0.05  # seconds that are worth a word
_BESIDE = (
    ("time/rollout", "generating"),
    ("time/reward", "rewards"),
    ("time/wait_for_weights", "waiting for new weights"),
)
_WORDS = {
    "wait_for_batch": "waiting for the batch",
    "send_weights": "sending weights",
    "wait_to_evaluate": "waiting to evaluate",
}
_LABELS = {
    name: _WORDS.get(word := name.removeprefix("time/"), word) for name in (*PHASES, *PHASES_AHEAD, *BETWEEN_STEPS)
}


def is_ahead(rows: Rows) -> bool:
    """Whether batches were generated while steps learnt."""
    return any("time/wait_for_batch" in row for row in rows)


def seconds_by_part(rows: Rows, *, ahead: bool) -> dict[str, float]:
    """Seconds of each part by its label, over all rows. `other`: the rest of the steps."""
    phases = PHASES_AHEAD if ahead else PHASES
    found = {_LABELS[name]: _sum(rows, name) for name in (*phases, *BETWEEN_STEPS)}
    rest = _sum(rows, "time/step") - sum(found[_LABELS[name]] for name in phases)
    return {**found, OTHER: max(0.0, rest)}


def longest_first(rows: Rows) -> dict[str, float]:
    """The parts that took any time."""
    found = seconds_by_part(rows, ahead=is_ahead(rows))
    return {name: seconds for name, seconds in sorted(found.items(), key=lambda one: -one[1]) if seconds > 0}


def times_beside_steps(rows: Rows) -> Iterator[str]:
    """How long other workers generated beside the steps. Empty if each step generates and then learns."""
    if not is_ahead(rows):
        return
    for name, says in _BESIDE:
        if (seconds := _sum(rows, name)) >= LEAST:
            yield f"{says} {duration(seconds)}"


def overlap(rows: Rows) -> str:
    """Says that generating and training overlap, with the seconds of generating. Empty if they do not."""
    if times := ", ".join(times_beside_steps(rows)):
        return f"generating and training overlap; beside these steps: {times}"
    steps = _sum(rows, "time/step")
    if not is_ahead(rows) and sum(_sum(rows, name) for name in PHASES) > (1 + ROUNDING) * steps > 0:
        return "some phases overlap: together they took longer than the steps"
    return ""


def _sum(rows: Rows, name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)

"""Tables of a report: the difference of the log-probs by place in the sequence, and by age of the tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping

from octetrl.telemetry.report_data import RunRecord

_AGE = re.compile(r"mismatch/age_(\d{1,9})/tokens")


def mismatch_by_length(run: RunRecord) -> list[tuple[str, float, float]]:
    """(tenth of the sequence, mean of exp |engine − trainer|, mean gen_kl) over all steps; empty if not measured."""
    found = []
    for decile in range(10):
        errors = run.values(f"mismatch/decile_{decile}/token_mult_prob_error")
        kls = run.values(f"mismatch/decile_{decile}/gen_kl")
        if errors and kls:
            found.append((f"{decile * 10}–{decile * 10 + 10}%", sum(errors) / len(errors), sum(kls) / len(kls)))
    return found


def mismatch_by_age(run: RunRecord) -> list[tuple[int, int, float, float]]:
    """(age in policy versions, tokens, mean gen_kl of a token, largest difference) over all steps; empty if none of
    them was generated ahead."""
    by_age: dict[int, list[tuple[float, float, float]]] = {}
    for row in run.rows:
        for age, place in _places_by_age(row):
            tokens, kl, largest = (row.get(f"mismatch/{place}{what}") for what in ("tokens", "gen_kl", "max_abs_diff"))
            if tokens and tokens > 0 and kl is not None and largest is not None:
                by_age.setdefault(age, []).append((tokens, kl, largest))
    table = []
    for age, measured in sorted(by_age.items()):
        tokens = sum(count for count, _, _ in measured)
        kl = sum(count * value for count, value, _ in measured) / tokens
        table.append((age, int(tokens), kl, max(largest for *_, largest in measured)))
    return table


def _places_by_age(row: Mapping[str, float | None]) -> list[tuple[int, str]]:
    """The ages of a step's tokens, and where their metrics are. If one version sampled the batch, it is the whole."""
    ages = [int(found[1]) for name in row if (found := _AGE.fullmatch(name))]
    if ages:
        return [(age, f"age_{age}/") for age in ages]
    age = row.get("rollout/staleness")
    return [(int(age), "")] if age is not None and age >= 0 and float(age).is_integer() else []

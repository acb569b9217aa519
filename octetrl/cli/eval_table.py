"""The table of `octetrl eval`: a row for each number, a column for each model and for its difference to the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from octetrl.telemetry.intervals import LEVEL
from octetrl.telemetry.sample_estimates import Estimate

if TYPE_CHECKING:
    from octetrl.telemetry.eval_report import EvalReport

LABELS = {"accuracy": "accuracy", "reward_mean": "reward"}
LENGTHS = {
    "mean": "mean length",
    "p50": "median length",
    "p90": "90% of lengths",
    "p99": "99% of lengths",
    "max": "longest",
}

IN_ENVIRONMENT, MEAN = "accuracy in ", "mean of environments"

Compared = Mapping[str, Mapping[str, Estimate]]  # by target: its differences to the first


def report_table(reports: Mapping[str, EvalReport], compared: Compared) -> Table:
    """One column per target, in their order. Rows without a value are left out."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    columns: list[Mapping[str, str]] = []
    for target, report in reports.items():
        table.add_column(Text(_short(target, reports)), overflow="fold")
        columns.append(_cells(report))
        if target in compared:
            table.add_column("less the first")
            columns.append({_label(name): _difference(estimate) for name, estimate in compared[target].items()})
    for label in _labels(reports.values()):
        table.add_row(label, *(Text(column.get(label, "")) for column in columns))
    table.caption, table.caption_justify = Text(_caption(list(reports.values()), bool(compared))), "left"
    return table


def accuracy_of(environment: str) -> str:
    """The label of one of several environments."""
    return f"{IN_ENVIRONMENT}{environment}"


def _caption(reports: list[EvalReport], is_compared: bool) -> str:
    note = f"means of {reports[0].tasks:,} tasks and [their {LEVEL:.0%} intervals]"
    if reports[0].by_environment:
        note += f"; accuracy counts every task once, the {MEAN} every environment once"
    if is_compared:
        note += "; * marks a difference whose interval excludes 0"
    says_answers = any("maj_at" in name for report in reports for name in report.estimates)
    if any(k > 1 for k in reports[0].scoring.ks) and not says_answers:
        note += "; no maj@k: the scorer does not return the answer"
    return note


def _cells(report: EvalReport) -> dict[str, str]:
    cells = {"accuracy": "none: no completion could be scored"}
    cells |= {_label(name): _interval(estimate, report.tasks) for name, estimate in report.estimates.items()}
    counts = {str(status): f"{count:,}" for status, count in report.counts.items() if count}
    for name, of_name in report.by_environment.items():
        accuracy = of_name.estimates.get("accuracy")
        cells[accuracy_of(name)] = "none" if accuracy is None else _interval(accuracy, of_name.tasks)
    if report.mean_of_environments is not None:
        cells[MEAN] = f"{report.mean_of_environments:.4f}"
    if report.lengths:
        cells |= {label: f"{report.lengths[name]:,.0f}" for name, label in LENGTHS.items()}
        counts["truncated"] = f"{counts.get('truncated', '0')} ({report.lengths['truncated_share']:.1%})"
    return cells | counts | {"tokens/s": f"{report.tokens_per_second:,.0f}"}


def _labels(reports: Iterable[EvalReport]) -> list[str]:
    """All labels, in the order shown: estimates with k rising, lengths, statuses, speed."""
    labels = [label for report in reports for label in _cells(report)]
    ranks = ["accuracy", IN_ENVIRONMENT, MEAN, "reward", "pass", "maj", *LENGTHS.values(), "truncated"]

    def rank(label: str) -> tuple[int, int]:
        family, _, k = label.partition("@")
        family = IN_ENVIRONMENT if label.startswith(IN_ENVIRONMENT) else family
        return (ranks.index(family) if family in ranks else len(ranks) + (label == "tokens/s"), int(k or 0))

    return sorted(dict.fromkeys(labels), key=rank)


def _short(target: str, targets: Iterable[str]) -> str:
    """The last part of the target's path, if no other target has the same. A server is named whole."""
    if "://" in target:
        return target
    name = Path(target).name
    return target if [Path(other).name for other in targets].count(name) > 1 or not name else name


def _label(name: str) -> str:
    return LABELS.get(name, name.replace("_at_", "@"))


def _interval(estimate: Estimate, tasks: int) -> str:
    over = "" if estimate.tasks == tasks else f" over {estimate.tasks:,}"
    ends = "" if estimate.low == estimate.high else f" [{estimate.low:.3f}, {estimate.high:.3f}]"  # equal rewards
    return f"{estimate.mean:.4f}{ends}{over}"


def _difference(estimate: Estimate) -> str:
    mark = " *" if estimate.low > 0 or estimate.high < 0 else ""
    return f"{estimate.mean:+.4f} [{estimate.low:+.3f}, {estimate.high:+.3f}]{mark}"

"""The report of one or several runs: an HTML page that needs no network, and the same in short for a
terminal.

The page has the look of the rollouts' page (rollout_page.html), whose styles it takes. Texts of a model are escaped,
and a Content-Security-Policy forbids scripts and connections. Charts are SVG (charts.py).
"""

from __future__ import annotations

import hashlib
import random
import re
import shlex
import textwrap
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files

from octetrl.config.in_words import one_worker
from octetrl.records import RolloutStatus
from octetrl.system.errors import UserError
from octetrl.system.text import counted, printable
from octetrl.telemetry.charts import Line, escape, line_chart, shown_number, sparkline, stacked_chart
from octetrl.telemetry.ending import FAILED
from octetrl.telemetry.glossary import explained, own_metrics
from octetrl.telemetry.metrics import STALE_IN_IT
from octetrl.telemetry.report_data import (
    OF_PAIRS,
    OTHER,
    Row,
    RunRecord,
    differences,
    findings,
    interval_text,
    is_ahead,
    last_evaluation,
    longest_first,
    overlap,
    raised_warnings,
    results,
    seconds_by_part,
    uncompared,
)
from octetrl.telemetry.rollouts import MODEL, Filter, Interval, SampledGroup, SampledRow, Utterance, select
from octetrl.telemetry.step_line import duration

BARS = 60  # at most in the chart of phases
SHORT = 180  # seconds, or minutes, that an axis counts as such
CHARACTERS = 1500  # most of an answer that the page shows
SIBLINGS = 4  # most of a group that the page shows
CURVES: tuple[tuple[str, str], ...] = (
    ("reward", "reward/mean"), ("held-out accuracy", "eval/accuracy"), ("held-out reward", "eval/reward_mean"),
    ("held-out loss", "eval/loss"), ("held-out margin", "eval/margin"),
    ("loss", "loss"), ("answer length", "rollout/mean_length"), ("entropy", "entropy"),
    ("age of the tokens", "rollout/staleness"), ("tokens that are not stale", "rollout/on_policy_share"),
    ("KL from the reference", "kl"), ("gradient norm", "grad_norm"), ("learning rate", "lr"),
    ("log-probs equal", "mismatch/equal_fraction"), ("KL engine to trainer", "mismatch/gen_kl"),
    ("engine against trainer", "mismatch/token_mult_prob_error"),
    ("corrected tokens", "correction/clip_fraction"), ("clipped ratios", "ratio/clip_fraction"),
    ("K and V clamped", "fp8/kv_saturation"), ("groups without a signal", "reward/zero_variance_fraction"),
    ("tasks that rest", "curriculum/resting_share"), ("pass rate of the tasks", "curriculum/pass_rate"),
    ("truncated answers", "rollout/truncated_share"), ("rollouts without a reward", "rollout/failure_share"),
    ("samples of a rollout", "rollout/segments"), ("seconds of an agent", "time/agent"),
    ("agents' time in the engine", "agent/engine_share"), ("sampled tokens of an agent", "agent/sampled_tokens"),
    ("discarded tokens of an agent", "agent/discarded_tokens"),
    ("constrained tokens of an agent", "agent/constrained_tokens"), ("requests of ended agents", "agent/late_requests"),
    ("preference accuracy", "preference/accuracy"), ("preference margin", "preference/margin"),
    ("explained variance", "value/explained_variance"), ("rollout, tokens/s", "rollout/tokens_per_second"),
    ("training, tokens/s", "train/tokens_per_second"), ("GPU memory, GB", "memory/peak_gb"),
)  # fmt: skip
_ACCURACY, _REWARD = "eval/accuracy", "eval/reward_mean"
_OF_SET = re.compile(r"eval/(?!environments/)(?:([^/]+)/(accuracy|loss)|component/(.+))")
_NUMBER = re.compile(r"[-+−]?\d[\d.,]*(e[-+]?\d+)?%?")
_SECONDS = "Seconds of a step, and of the evaluation and the checkpoint after it."
_BANDS = {
    "reward/mean": " The band is one standard error of the mean on each side; prompts count as independent.",
    "eval/accuracy": " The band is the 95% interval.",
}
_SAME = " The mean held-out reward is the same number."
HEADLINES = (
    "reward/mean",
    "eval/accuracy",
    "eval/loss",
    "loss",
    "rollout/mean_length",
    "entropy",
    "grad_norm",
    "time/step",
)
_TONES = (("#2f5fb3", "#8db4f5"), ("#b26a00", "#f0b35c"), ("#2b7a4b", "#6fcf97"), ("#8a3fa0", "#d39be6"),
          ("#b3372f", "#f08a80"), ("#3b7f8c", "#7cc9d6"), ("#75746b", "#b9bcc4"),
          ("#a33b74", "#f09cc6"), ("#5f6b1d", "#c2cf6a"), ("#6b4a2b", "#cfa97c"))  # runs, parts of time  # fmt: skip


def report_page(runs: Sequence[RunRecord], script: str = "") -> str:
    """The page's HTML. script: of a page that is served (server/watch.py), which may ask its server alone."""
    title = " and ".join(run.name for run in runs) or "No run has a step yet"
    tones = "".join(
        f".run-{i}, .phase-{i} {{ --tone: light-dark({light}, {dark}); }}" for i, (light, dark) in enumerate(_TONES)
    )
    ran = "".join(_what_ran(runs))
    body = "".join([*_look_at(runs), *_differences(runs), *_curves(runs), *_time(runs),
                    *_mismatch(runs), *(part for run in runs for part in _rollouts(run, len(runs) > 1)),
                    *(part for run in runs for part in _held_out(run, len(runs) > 1))])  # fmt: skip
    body = f"{body}{ran}" if script else f"{ran}{body}"  # who watches runs knows what they are
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    policy += f"; script-src 'sha256-{digest}'; connect-src 'self'" if script else ""
    live = '<span class="live soft"></span>' if script else ""
    keys = "".join(f'<span class="key"><i class="run-{i % len(_TONES)}"></i>{escape(run.name)}</span>'
                   for i, run in enumerate(runs)) if len(runs) > 1 else ""  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)}</title><style>{_styles()}{tones}</style></head><body>"
        '<input class="toggle" type="radio" name="axis" id="steps" checked aria-label="over steps">'
        '<input class="toggle" type="radio" name="axis" id="hours" aria-label="over time">'
        f'<header><h1>{escape(title)}</h1><nav><label class="chip" for="steps">steps</label>'
        f'<label class="chip" for="hours">time</label></nav> <span class="keys">{keys}</span>{live}</header>'
        f"<main>{body}</main>{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def _styles() -> str:
    folder = files("octetrl.telemetry")
    template = folder.joinpath("rollout_page.html").read_text(encoding="utf-8")
    found = re.search(r"<style>(.*?)</style>", template, re.DOTALL)
    assert found, "rollout_page.html has no styles"
    return found[1] + folder.joinpath("report_page.css").read_text(encoding="utf-8")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], further: str = "") -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in header)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="card wide{further}"><table><tr>{head}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    """A cell of a table. One that is a number is never broken, however narrow the screen."""
    begin = '<td class="whole">' if _NUMBER.fullmatch(text) else "<td>"
    return f"{begin}{escape(text)}</td>"


def _what_ran(runs: Sequence[RunRecord]) -> Iterator[str]:
    if not runs:
        return
    settings: list[Mapping[str, str]] = [
        {"ended": _ended(run), **dict(results(run)), **dict(run.settings)} for run in runs
    ]
    labels = list(dict.fromkeys(label for shown in settings for label in shown))
    rows = [[label, *(shown.get(label, "–") for shown in settings)] for label in labels]
    rows.append(["folder", *(str(run.folder) for run in runs)])
    rows.append(["time of its steps", *(duration(run.hours[-1] * 3600) or "0 s" for run in runs)])
    yield "<h2>What ran</h2>" + _table(["", *(run.name for run in runs)], rows, " settings")


def _ended(run: RunRecord) -> str:
    """In few words: the reason of a failure is what to look at first."""
    if run.ending is None:
        return "not yet, or its process was killed"
    return run.ending.how if run.ending.how == FAILED else run.ending.text


def _look_at(runs: Sequence[RunRecord]) -> Iterator[str]:
    for title, lines_of in (("What to look at", findings), ("Warnings of the run", raised_warnings)):
        lines = "".join(
            f"<li>{escape(f'{run.name}: ' if len(runs) > 1 else '')}{escape(line)}</li>"
            for run in runs
            for line in lines_of(run)
        )
        if lines:
            yield f'<h2>{title}</h2><div class="card look"><ul>{lines}</ul></div>'


def _differences(runs: Sequence[RunRecord]) -> Iterator[str]:
    rows = [
        [what, f"{other.name} − {runs[0].name}", f"{found.mean:+.4g}", interval_text(found), str(found.tasks)]
        for what, other, found in differences(runs)
    ]
    lines = [f'<p class="soft">{escape(line)}</p>' for line in uncompared(runs)]
    if rows or lines:
        yield "<h2>Differences</h2>" + "".join(lines)
    if rows:
        header = ["", "", "mean", "95% interval", "pairs"]
        yield _table(header, rows, " differences")
        yield f'<p class="soft">{escape(OF_PAIRS)}</p>'


def _curves(runs: Sequence[RunRecord]) -> Iterator[str]:
    cards, constant = [], []
    unit, per_hour = _time_axis(max((run.hours[-1] for run in runs), default=0.0))
    rewards_are_accuracy = all(run.values(_REWARD) == run.values(_ACCURACY) for run in runs)
    own = own_metrics(dict.fromkeys(name for run in runs for row in run.rows for name in row))
    for title, name in (*CURVES, *((title, name) for name, title in own.items()), *_of_statuses_and_names(runs)):
        if name == _REWARD and rewards_are_accuracy:
            continue
        values = {value for run in runs for value in run.values(name)}  # a step without an update has no loss
        measured = [count for run in runs if (count := len(run.values(name)))]
        missing = _without_value(runs, name)
        if missing and not values:
            constant.append([title, f"no value{missing}", _meaning(name)])
            continue
        if len(values) == 1 and name not in HEADLINES and min(measured) > 1:
            constant += [[title, f"{shown_number(value)}{missing}", _meaning(name)] for value in values]
            continue
        charts = []
        for by, x_name, units in (("steps", "step", None), ("hours", unit, per_hour)):
            lines = [_line(run, number, name, units) for number, run in enumerate(runs)]
            if any(line.x for line in lines):
                charts.append(f'<div class="by-{by}">{line_chart(lines, x_name)}</div>')
        if charts:
            says = _meaning(name) + (_SAME if name == _ACCURACY and rewards_are_accuracy else "")
            says += _BANDS.get(name, "") if any(line.low for line in lines) else ""
            says += (
                f" {STALE_IN_IT}" if name.startswith("mismatch/") and any(run.has_stale_tokens for run in runs) else ""
            )
            cards.append(f'<div class="card"><h3>{escape(title)}</h3><p>{escape(says)}</p>{"".join(charts)}</div>')
    if cards:
        yield f'<h2>Curves</h2><div class="grid-cards">{"".join(cards)}</div>'
    if constant:
        yield "<h2>The same in every step that has it</h2>" + _table(["", "value", ""], constant, " settings")


def _without_value(runs: Sequence[RunRecord], name: str) -> str:
    """In how many steps the metric was not finite. Empty if in none."""
    steps = [row[name] for run in runs for row in run.rows if name in row]
    lost = steps.count(None)
    return f"; not finite in {lost} of {len(steps)} steps" if lost else ""


def _meaning(name: str) -> str:
    entry = explained(name)
    return f"{entry.meaning} {entry.look}".strip() if entry else ""


def _of_statuses_and_names(runs: Sequence[RunRecord]) -> Iterator[tuple[str, str]]:
    """Further curves: of statuses, and of several environments, evaluation sets or rewards."""
    measured = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    for status in RolloutStatus:
        if any(sum(run.values(f"rollout/{status.value}")) for run in runs):
            yield f"rollouts: {status.value}", f"rollout/{status.value}"
    for name in measured:
        if found := _OF_SET.fullmatch(name):
            yield f"{found[1] or 'held-out'}: {found[2] or found[3]}", name
    for name in dict.fromkeys(name for run in runs for name in run.environments):
        yield f"{name}: reward", f"environments/{name}/reward"
        yield f"{name}: held-out accuracy", f"eval/environments/{name}/accuracy"
        yield f"{name}: tasks that rest", f"environments/{name}/curriculum/resting_share"
        yield f"{name}: groups without a signal", f"environments/{name}/zero_variance_fraction"


def _time_axis(hours: float) -> tuple[str, float]:
    """The unit in which the axis counts, and how many of it are an hour."""
    if hours < SHORT / 3600:
        return "second", 3600.0
    return ("minute", 60.0) if hours < SHORT / 60 else ("hour", 1.0)


def _line(run: RunRecord, number: int, name: str, units: float | None) -> Line:
    """units: of the time axis in an hour; None: the axis has steps."""
    series = run.series(name)
    x: list[float] = [step if units is None else hours * units for step, hours, _ in series]
    y = [value for *_, value in series]
    low: list[float] = []
    high: list[float] = []
    if name == "reward/mean":
        errors = run.values("reward/mean_error")
        low, high = ([v + sign * e for v, e in zip(y, errors, strict=False)] for sign in (-1, 1))
    elif name == _ACCURACY:
        low, high = run.values("eval/accuracy_low"), run.values("eval/accuracy_high")
    has_band = len(low) == len(high) == len(y)
    return Line(run.name, number % len(_TONES), x, y, *((low, high) if has_band else ()))


def _time(runs: Sequence[RunRecord]) -> Iterator[str]:
    cards = []
    colours: dict[str, int] = {}  # the same in all runs
    for run in runs:
        ahead, longest = is_ahead(run.rows), longest_first(run.rows)
        whole = sum(longest.values())
        if not whole:
            continue
        named = [name for name in seconds_by_part(run.rows, ahead=ahead) if name in longest or name == OTHER]
        shown = {name: colours.setdefault(name, len(colours) % len(_TONES)) for name in named}
        width = -(-len(run.rows) // BARS)
        columns, steps = [], []
        for begin in range(0, len(run.rows), width):
            rows = run.rows[begin : begin + width]
            parts = seconds_by_part(rows, ahead=ahead)
            columns.append([parts[name] / len(rows) for name in shown])
            steps.append(float(rows[0]["step"]))
        keys = "".join(
            f'<span class="key"><i class="phase-{colour}"></i>{name} {longest.get(name, 0.0) / whole:.0%}</span>'
            for name, colour in shown.items()
        )
        title = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        says = _SECONDS + (f" {said[0].upper()}{said[1:]}." if (said := overlap(run.rows)) else "")
        cards.append(f'<div class="card">{title}<p>{says} {keys}</p>'
                     f"{stacked_chart(shown, columns, steps, 'step')}</div>")  # fmt: skip
    if cards:
        yield f'<h2>Where the time went</h2><div class="grid-cards">{"".join(cards)}</div>'


def _mismatch(runs: Sequence[RunRecord]) -> Iterator[str]:
    for run in runs:
        tokens, equal = run.values("mismatch/tokens"), run.values("mismatch/equal_fraction")
        if not tokens:
            continue
        name = f"{run.name}: " if len(runs) > 1 else ""
        title = f"<h2>{escape(name)}Engine against trainer</h2>"
        if all(share == 1 for share in equal):
            says = f"The log-probs of all {sum(tokens):,.0f} trained tokens are equal, bit for bit."
            yield f'{title}<div class="card">{says}</div>'
            continue
        rows = [[part, f"{error:.6f}", f"{kl:.2e}"] for part, error, kl in mismatch_by_length(run)]
        yield title + _table(["part of the sequence", "mean exp |engine − trainer|", "gen_kl"], rows)
        ages = mismatch_by_age(run)
        of_own_weights = any(age == 0 for age, *_ in ages)
        yield f'<p class="soft">{escape(_cause(run, of_own_weights=of_own_weights))}</p>'
        if ages:
            header = ["policy versions since it was sampled", "tokens", "gen_kl", "largest difference"]
            yield _table(header, [[str(age), f"{n:,}", f"{kl:.2e}", f"{most:.2e}"] for age, n, kl, most in ages])


def _cause(run: RunRecord, *, of_own_weights: bool) -> str:
    """What to do about log-probs that differ. Stale tokens are a cause of their own, which the doctor can't see.

    of_own_weights: the table by age has tokens of age 0."""
    if run.has_stale_tokens:
        own = " The tokens of age 0 below are those of the trainer's own weights."
        return STALE_IN_IT + (own if of_own_weights else "")
    command = ["octetrl", "doctor", str(run.folder / "config.yaml"), "--attribute", *one_worker(run.cluster)]
    return f"{shlex.join(command)} names the tensors that cause it."


def _rollouts(run: RunRecord, says_name: bool) -> Iterator[str]:
    last = run.rows[-1]["step"]
    try:
        newest = select(run.folder, Filter(steps=Interval(last, last)), None).groups
        failed = select(run.folder, Filter(statuses=frozenset(s for s in RolloutStatus if not s.has_reward)), 3)
    except UserError:
        return  # a run without rollouts
    chosen = [*_examples(newest), *(("failed", group) for group in failed.groups)]
    name = f"{run.name}: r" if says_name else "R"
    if chosen:
        yield f"<h2>{escape(name)}ollouts</h2>"
    yield from (_group(word, group) for word, group in chosen)


def _held_out(run: RunRecord, says_name: bool) -> Iterator[str]:
    """Examples of the run's last evaluation."""
    last, groups = last_evaluation(run)
    if chosen := _examples(groups):
        name = f"{run.name}: h" if says_name else "H"
        yield f"<h2>{escape(name)}eld-out tasks, evaluated after step {last}</h2>"
        yield from (_group(word, group) for word, group in chosen)


def _examples(groups: Sequence[SampledGroup]) -> list[tuple[str, SampledGroup]]:
    """The groups with the best and the worst mean reward, and two others."""
    scored = sorted((group for group in groups if group.rewards), key=lambda one: sum(one.rewards) / len(one.rewards))
    if not scored:
        return []
    rest = scored[1:-1]
    ends = [("best", scored[-1]), ("worst", scored[0])]
    return [*ends, *(("random", group) for group in random.Random(0).sample(rest, min(2, len(rest))))]


def _group(word: str, group: SampledGroup) -> str:
    first = group.rows[0]
    answer = first.line.get("answer")
    reference = (
        f'<div class="reference soft">reference: {escape(_cut(str(answer)))}</div>' if answer is not None else ""
    )
    rows = sorted(group.rows, key=lambda row: (row.reward is not None, -(row.reward or 0.0)))
    kept = rows[: SIBLINGS // 2] + rows[-(SIBLINGS // 2) :] if len(rows) > SIBLINGS else rows
    return (
        f'<article><div class="head"><span class="step">{word}</span><span class="step">step {group.step}</span>'
        f'<span class="task">{escape(first.task_id)}</span></div><div class="prompt"><pre>'
        f"{escape(_cut(str(first.line['prompt'])))}</pre>{reference}</div>"
        f'<div class="siblings">{"".join(map(_sibling, kept))}</div></article>'
    )


def _sibling(row: SampledRow) -> str:
    tone = "bad" if row.reward is None else "good" if row.reward > 0 else "soft"
    reward = "–" if row.reward is None else f"{row.reward:.3g}"
    failed = "" if row.reward is not None else " failed"
    versions = f", {row.versions_text}" if row.versions_text else ""
    detail = f'<div class="detail">{escape(_cut(str(row.line["detail"])))}</div>' if row.line.get("detail") else ""
    said = "".join(map(_said, row.said))
    return (
        f'<section style="--tone: var(--{tone})"><div class="facts"><span class="reward">{reward}</span>'
        f'<span class="status{failed}">{escape(row.status)}</span><span class="number soft">'
        f"{counted(len(row.token_ids), 'token')}{versions}</span></div>"
        f'{detail}<div class="said">{said}</div></section>'
    )


def _said(part: Utterance) -> str:
    by, text = escape(part.by), escape(_cut(part.text))
    if part.is_call:
        shown = f'<div class="call"><b>{by}</b><span class="soft">{text}</span></div>'
    elif part.by == MODEL:
        shown = f"<pre>{text}</pre>"
    else:
        shown = f'<div class="environment"><div class="soft">{by}</div><pre>{text}</pre></div>'
    return f'<div class="fork" style="--depth: {part.depth - 1}">{shown}</div>' if part.depth else shown


def _cut(text: str) -> str:
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]} … {len(text) - CHARACTERS:,} characters … {text[-half:]}"


def mismatch_by_length(run: RunRecord) -> list[tuple[str, float, float]]:
    """(tenth of the sequence, mean of exp |engine − trainer|, mean gen_kl) over all steps; empty if not measured."""
    table = []
    for decile in range(10):
        errors = run.values(f"mismatch/decile_{decile}/token_mult_prob_error")
        kls = run.values(f"mismatch/decile_{decile}/gen_kl")
        if errors and kls:
            table.append((f"{decile * 10}–{decile * 10 + 10}%", sum(errors) / len(errors), sum(kls) / len(kls)))
    return table


def mismatch_by_age(run: RunRecord) -> list[tuple[int, int, float, float]]:
    """(age in policy versions, tokens, mean gen_kl of a token, largest difference) over all steps; empty if none of
    them was generated ahead."""
    by_age: dict[int, list[tuple[float, float, float]]] = {}
    for row in run.rows:
        for age, place in _places_by_age(row):
            tokens, kl, largest = (row.get(f"mismatch/{place}{what}") for what in ("tokens", "gen_kl", "max_abs_diff"))
            if tokens and kl is not None and largest is not None:
                by_age.setdefault(age, []).append((tokens, kl, largest))
    table = []
    for age, measured in sorted(by_age.items()):
        tokens = sum(count for count, _, _ in measured)
        kl = sum(count * value for count, value, _ in measured) / tokens
        table.append((age, int(tokens), kl, max(largest for *_, largest in measured)))
    return table


def _places_by_age(row: Row) -> list[tuple[int, str]]:
    """The ages of a step's tokens, and where their metrics are. If one version sampled the batch, it is the whole."""
    ages = [int(match[1]) for name in row if (match := re.fullmatch(r"mismatch/age_(\d+)/tokens", name))]
    age = row.get("rollout/staleness")
    if ages or age is None or not float(age).is_integer():
        return [(age, f"age_{age}/") for age in ages]
    return [(int(age), "")]


# ---------------------------------------------------------------- in a terminal

WIDTH = 98  # columns at most
LABEL = 20  # columns of what begins a line
VALUES = 23  # columns of the first and the last value of a curve
LEAST_CURVE = 8
_FURTHER = ("kl", "rollout/segments", "agent/engine_share")
_FACTS = ("model", "algorithm", "precision", "linears by layer")


def terminal_report(runs: Sequence[RunRecord], width: int = WIDTH) -> Iterator[str]:
    """Lines of the report, no wider than `width` columns. What a run wrote cannot control the terminal."""
    for run in runs:
        ended = f", {run.ending.how}" if run.ending is not None else ""
        head = f"{run.name}: {counted(run.num_steps, 'step')} in {duration(run.hours[-1] * 3600) or '0 s'}{ended}"
        yield from _wrapped(head, width, "  ")
        facts = {**dict(results(run)), **{label: text for label, text in run.settings if label in _FACTS}}
        for label, text in facts.items():
            yield from _fact(label, text, width)
        own = own_metrics(dict.fromkeys(name for row in run.rows for name in row))
        for name, title in {**{name: name for name in (*HEADLINES, *_FURTHER)}, **own}.items():
            label = printable(title)[:LABEL]
            if values := run.values(name):
                curve = sparkline(values, min(32, max(LEAST_CURVE, width - LABEL - 5 - VALUES)))
                ends = f"{shown_number(values[0])} → {shown_number(values[-1])}"
                yield f"  {label:<{LABEL}} {curve:<{32 if width >= WIDTH else 0}}  {ends}"
        if parts := longest_first(run.rows):
            whole = sum(parts.values())
            shares = [f"{name} {spent / whole:.0%}" for name, spent in parts.items() if spent >= 0.01 * whole]
            yield from _fact("time", ", ".join(shares), width)
        if says := overlap(run.rows):
            yield from _fact("", says, width)
        for line in (
            *(f"look: {text}" for text in findings(run)),
            *(f"warned: {text}" for text in raised_warnings(run)),
        ):
            yield from _wrapped(f"  {line}", width, " " * 8)
    for line in uncompared(runs):
        yield from _wrapped(line, width, "  ")
    compared = list(differences(runs))
    for what, other, difference in compared:
        interval = interval_text(difference, "95% interval ")
        line = f"{what}, {other.name} − {runs[0].name}: {difference.mean:+.4g}, {interval}"
        yield from _wrapped(line, width, "  ")
    if compared:
        yield from _wrapped(OF_PAIRS, width, "  ")


def _fact(label: str, text: str, width: int) -> Iterator[str]:
    return _wrapped(f"  {label:<{LABEL}} {text}", width, " " * (LABEL + 3))


def _wrapped(line: str, width: int, indent: str) -> Iterator[str]:
    """The line with escapes for control characters, in rows of `width` columns. Its own columns stay."""
    begin = line[: len(line) - len(line.lstrip())]
    return iter(textwrap.wrap(printable(" ".join(line.splitlines())), width, subsequent_indent=indent) or [begin])

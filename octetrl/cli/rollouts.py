"""`octetrl rollouts`: shows what a run sampled, in the terminal, as an HTML page or as JSON lines.

In the terminal a group is the prompt, then its siblings in as many columns as fit. Model output is untrusted text:
control characters are shown as their pictures, so that no escape sequence reaches the terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from octetrl.cli.output import clean, print_spans, refuse_file, whole_file
from octetrl.config.load import load_recipe
from octetrl.data.tokenizer import VOCABULARIES, load_tokenizer
from octetrl.records import RolloutStatus
from octetrl.system.errors import UserError, nearest, refuse_empty
from octetrl.system.text import counted
from octetrl.telemetry.rollout_page import DISAGREEMENT, UNLIKELY, VERY_UNLIKELY, Pieces, token_pieces, write_page
from octetrl.telemetry.rollouts import (
    EVALUATIONS,
    MODEL,
    Filter,
    Interval,
    SampledGroup,
    SampledRow,
    Selection,
    Span,
    Utterance,
    matching_rows,
    select,
)

IN_TERMINAL, ON_PAGE = 4, 100  # groups
LETTERS = 1_200
COLUMN = 38  # letters, the least that is readable
PROMPT_LETTERS = 800

Sequences = Annotated[
    bool,
    typer.Option(
        "--sequence",
        help="Print rollouts as the model reads them: the prompt with system message and tools, what was sampled and"
        " trained on, replies, the advantage. --limit counts groups; default: 1.",
    ),
]


def rollouts(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or a file step_NNNNNN.jsonl of one.")],
    step: Annotated[
        str | None, typer.Option(metavar="N|N:M", help="Steps N:M, both ends included; also N, N: or :M.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="X|X:Y", help="Rewards X:Y, both ends included; also X, X: or :Y.")
    ] = None,
    status: Annotated[
        list[str] | None, typer.Option(help="Only this status, such as reward_error; may be given several times.")
    ] = None,
    task: Annotated[str, typer.Option(help="Only tasks whose id contains this.")] = "",
    text: Annotated[str, typer.Option(help="Only rollouts whose text contains this, in upper or lower case.")] = "",
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Largest number of groups shown. Default: {IN_TERMINAL}; {ON_PAGE} with --html.",
            show_default=False,
        ),
    ] = None,
    letters: Annotated[
        int, typer.Option(min=0, help="Largest number of characters of a completion in the terminal; 0: all.")
    ] = LETTERS,
    tokens: Annotated[
        bool | None,
        typer.Option(
            "--tokens/--no-tokens", help="Mark unlikely tokens. Default: with --html, if there is a tokenizer."
        ),
    ] = None,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write a page for a browser.")] = None,
    sequence: Sequences = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all selected rollouts, one JSON line each.")] = False,
    evaluations: Annotated[
        bool,
        typer.Option("--evaluations", help="Show the rollouts on held-out tasks, from evaluations during the run."),
    ] = False,
) -> None:
    """Show the rollouts of a run."""
    refuse_empty(run, "run", "a run folder, or a file step_NNNNNN.jsonl of one")
    wanted = Filter(
        steps=_span("--step", step, whole=True) or Interval(),
        rewards=_span("--reward", reward, whole=False),
        statuses=_statuses(status or []),
        task=task,
        text=text,
    )
    if sum((as_json, html is not None, sequence)) > 1:
        raise UserError("--json, --html and --sequence exclude each other; give one of them")
    source = _evaluations_of(run) if evaluations else run
    if as_json:
        for of_step, place, row in matching_rows(source, wanted):
            typer.echo(json.dumps({"step": of_step, "group": place, **row.line}))
    elif sequence:
        _print_sequences(select(source, wanted, limit or 1), wanted, _pieces(run))
    elif html is not None:
        _write_page(run, source, wanted, limit or ON_PAGE, Path(html), tokens)
    else:
        view = RolloutsView(Console(highlight=False), wanted, letters=letters, pieces=_pieces(run) if tokens else None)
        view.show(select(source, wanted, limit or IN_TERMINAL))


def _print_sequences(selection: Selection, wanted: Filter, pieces: Pieces) -> None:
    for group in selection.groups:
        for row in filter(wanted.takes, group.rows):
            reward = "no reward" if row.reward is None else f"reward {row.reward:g}"
            title = f"step {group.step}, {clean(row.task_id)} #{row.line['sibling']}: {reward}"
            for number, sequence in enumerate(row.sequences):
                part = f", sequence {number + 1} of {len(row.sequences)}" if len(row.sequences) > 1 else ""
                whole = counted(sum(len(ids) for _, ids in sequence), "token")
                typer.echo(", ".join(filter(None, (title, row.trained_text, whole))) + part)
                spans = [Span(trained, "".join(pieces(ids)), len(ids)) for trained, ids in sequence if ids]
                print_spans(spans, "sampled" if row.line.get("advantage") is None else "trained")


def _evaluations_of(run: str) -> str:
    """The folder of the run's evaluations. Raises UserError if it has none."""
    folder = Path(run) / EVALUATIONS
    if not folder.is_dir():
        raise UserError(
            f"--evaluations: '{run}' has no {EVALUATIONS}/; give a run with evaluation.every above 0, or"
            " `octetrl eval RUN --out FOLDER`, then `octetrl rollouts FOLDER`"
        )
    return str(folder)


def _write_page(run: str, source: str, wanted: Filter, limit: int, path: Path, tokens: bool | None) -> None:
    refuse_file("--html", path, "rollouts.html")
    selection = select(source, wanted, limit)
    pieces, without = None, ""
    if tokens is not False:
        try:
            pieces = _pieces(run)
        except UserError as error:
            if tokens:
                raise
            without = f", tokens unmarked ({error})"
    with whole_file("--html", path) as file:
        write_page(file, Path(run).resolve().name, selection, wanted, pieces)
    typer.echo(f"wrote {path}: {len(selection.groups):,} of {selection.found:,} groups{without}")


def _pieces(run: str) -> Pieces:
    """Token pieces by the tokenizer of the run's last checkpoint or recipe. Raises UserError if there is none."""
    folder = Path(run)
    candidates = sorted((folder / "checkpoints").glob("step_*"), reverse=True)
    if (folder / "config.yaml").is_file():
        model = load_recipe(folder / "config.yaml").model
        candidates += [Path(named) for named in (model.tokenizer, model.path) if named is not None]
    for candidate in candidates:
        if any((candidate / name).is_file() for name in VOCABULARIES):
            tokenizer = load_tokenizer(candidate)
            return lambda token_ids: token_pieces(tokenizer, token_ids)
    raise UserError(f"--tokens: '{run}' has no checkpoint with a tokenizer, and its recipe names none that is here")


def _statuses(words: Sequence[str]) -> frozenset[RolloutStatus]:
    allowed = [status.value for status in RolloutStatus]
    for word in words:
        if word not in allowed:
            raise UserError(f"--status: '{word}' is none of {', '.join(allowed)}{nearest(word, allowed)}")
    return frozenset(RolloutStatus(word) for word in words)


def _span(option: str, text: str | None, *, whole: bool) -> Interval | None:
    """`3` is from 3 to 3, `3:` and `:3` are open."""
    if text is None:
        return None
    low, colon, high = text.partition(":")
    try:
        ends = [float(end) for end in (low, high) if end.strip()]
    except ValueError:
        ends = []
    if not ends or not all(math.isfinite(end) and (not whole or end.is_integer()) for end in ends):
        kind = "whole numbers" if whole else "numbers"
        raise UserError(f"{option}: '{text}' is no range of {kind}; write 3, 3:10, 3: or :10")
    span = Interval(ends[0] if low.strip() else -math.inf, ends[-1] if high.strip() or not colon else math.inf)
    if span.low > span.high:
        raise UserError(f"{option}: '{text}' ends before it begins; write the smaller number first")
    return span


class RolloutsView:
    """Shows selections on `console`. `letters`: most of one completion, 0 for all; `pieces` None: tokens unmarked."""

    def __init__(self, console: Console, wanted: Filter, *, letters: int, pieces: Pieces | None = None) -> None:
        self._console, self._wanted, self._letters, self._pieces = console, wanted, letters, pieces

    def show(self, selection: Selection) -> None:
        for group in selection.groups:
            self._console.print(self._group(group))
        shown = f"{len(selection.groups):,} of {selection.found:,} groups"
        more = ", evenly spread; --limit shows more" if selection.found > len(selection.groups) else ""
        self._console.print(Text(f"{shown} from {counted(selection.steps, 'step')}{more}", style="dim"))
        if self._pieces is not None:
            self._console.print(_legend())

    def _group(self, group: SampledGroup) -> RenderableType:
        first = group.rows[0]
        title = Text.assemble((f"step {group.step}", "bold"), "  ", clean(first.task_id))
        if group.rewards:
            mean = math.fsum(group.rewards) / len(group.rewards)
            title.append(f"  mean reward {mean:.3f} of {len(group.rewards)}", style="dim")
        prompt = clipped(Text(clean(str(first.line["prompt"]).strip()), style="italic"), PROMPT_LETTERS)
        parts: list[RenderableType] = [Rule(title, align="left"), prompt]
        if first.line.get("answer") is not None:
            parts.append(Text.assemble(("reference ", "dim"), clean(str(first.line["answer"]))))
        across = max(1, min(len(group.rows), self._console.width // COLUMN))
        for begin in range(0, len(group.rows), across):
            parts.append(self._siblings(group.rows[begin : begin + across], across))
        return Group(*parts, Text(""))

    def _siblings(self, rows: Sequence[SampledRow], across: int) -> Table:
        table = Table(box=box.ROUNDED, expand=True, border_style="dim", header_style="")
        for place in range(across):
            head = self._head(rows[place]) if place < len(rows) else Text("")
            table.add_column(head, ratio=1, overflow="fold", vertical="top")
        table.add_row(*(self._body(row) for row in rows))
        return table

    def _head(self, row: SampledRow) -> Text:
        reward = "no reward" if row.reward is None else f"{row.reward:.3f}"
        colour = "red" if row.reward is None else "green" if row.reward > 0 else "default"
        head = Text.assemble(
            (f"#{row.line['sibling']} ", "dim"),
            (reward, f"bold {colour}"),
            f"  {clean(row.status)}",
            (f"  {counted(len(row.token_ids), 'token')}", "dim"),
        )
        if not self._wanted.takes(row):
            head.stylize("dim")
        for name, value in row.components.items():
            head.append(f"\n{clean(str(name))} {value:.3f}" if isinstance(value, int | float) else f"\n{clean(name)} -")
        measured = [f"{name} {value:.3g}" for name, value in row.metrics.items() if isinstance(value, int | float)]
        if measured:
            head.append("\n" + clean("  ".join(measured)), style="dim")
        for text in filter(None, (row.trained_text, row.versions_text)):
            head.append("\n" + text, style="dim")
        if row.line.get("answered") is not None:
            head.append("\nanswered ", style="dim").append(_one_line(str(row.line["answered"])))
        if row.line.get("detail"):
            head.append("\n" + clean(str(row.line["detail"])), style="red")
        return head

    def _body(self, row: SampledRow) -> Text:
        lines = [Text("│ " * part.depth) + line for part in row.said for line in self._said(row, part).split("\n")]
        return clipped(Text("\n").join(lines), self._letters)

    def _said(self, row: SampledRow, part: Utterance) -> Text:
        if part.is_call:
            return Text.assemble((part.by, "bold"), (f": {part.text}", "dim"))
        if part.by != MODEL:
            return Text.assemble((f"{clean(part.by)}: ", "dim"), (clean(part.text), "cyan"))
        if self._pieces is None or not row.logprobs:
            return Text(clean(part.text))
        text = Text()
        pieces, logprobs = self._pieces(row.token_ids[part.tokens]), row.logprobs[part.tokens]
        trainer = row.trainer_logprobs[part.tokens] or logprobs  # where not known, nothing differs
        for piece, logprob, other in zip(pieces, logprobs, trainer, strict=True):
            text.append(clean(piece), style=_style(logprob, other))
        return text


def clipped(text: Text, letters: int) -> Text:
    """The text, or its start and end if it is longer than `letters` (0: never cut)."""
    if not letters or len(text) <= letters:
        return text
    half = letters // 2
    gap = Text(f" … {len(text) - 2 * half:,} letters … ", style="dim")
    return Text.assemble(text[:half], gap, text[len(text) - half :])


def _one_line(text: str, letters: int = 60) -> str:
    line = " ".join(clean(text).split())
    return line if len(line) <= letters else line[: letters - 1] + "…"


def _style(logprob: float, trainer_logprob: float) -> str:
    styles = []
    if logprob < math.log(VERY_UNLIKELY):
        styles.append("bold red")
    elif logprob < math.log(UNLIKELY):
        styles.append("yellow")
    if abs(trainer_logprob - logprob) > DISAGREEMENT:
        styles.append("underline reverse")
    return " ".join(styles)


def _legend() -> Text:
    return Text.assemble(
        ("tokens: ", "dim"),
        (f"below {UNLIKELY:.0%}", "yellow"),
        "  ",
        (f"below {VERY_UNLIKELY:.0%}", "bold red"),
        "  ",
        (f"trainer and engine differ by more than {DISAGREEMENT:g}", "underline reverse"),
    )

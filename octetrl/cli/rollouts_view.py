"""Prints groups of rollouts in a terminal: the prompt, then its siblings in as many columns as fit.

Model output is untrusted text: control characters are shown as their pictures, so that no escape sequence reaches the
terminal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from octetrl.system.text import counted, escaped
from octetrl.telemetry.rollout_page import Pieces
from octetrl.telemetry.rollout_reader import MODEL, Filter, SampledGroup, SampledRow, Selection, Utterance
from octetrl.telemetry.token_pieces import DISAGREEMENT, UNLIKELY, VERY_UNLIKELY

COLUMN = 38  # letters, the least that is readable
PROMPT_LETTERS = 800
PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "\u2421"}
PICTURES |= {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
PICTURES |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}  # turn text around


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
        measured = [f"{name} {value:g}" for name, value in row.metrics.items() if isinstance(value, int | float)]
        if measured:
            head.append("\n" + clean("  ".join(measured)), style="dim")
        if row.versions_text:
            head.append("\n" + row.versions_text, style="dim")
        if row.line.get("answered") is not None:
            head.append("\nanswered ", style="dim").append(_one_line(str(row.line["answered"])))
        if row.line.get("detail"):
            head.append("\n" + clean(str(row.line["detail"])), style="red")
        return head

    def _body(self, row: SampledRow) -> Text:
        parts = [self._said(row, part) for part in row.said]
        return clipped(Text("\n").join(parts), self._letters)

    def _said(self, row: SampledRow, part: Utterance) -> Text:
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


def clean(text: str) -> str:
    """The text without control characters."""
    return escaped(text).translate(PICTURES)


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

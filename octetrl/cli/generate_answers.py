"""How `octetrl generate` prints what it got: plain text, JSON lines as they come, or conversations for SFT."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import typer

from octetrl.cli.generate_rows import Row, conversation_lines, is_empty, result_lines
from octetrl.records import Completion, FinishReason
from octetrl.system.errors import UserError
from octetrl.system.text import counted


def show_answers(
    rows: Sequence[Row], answers: Iterable[Sequence[Completion]], *, as_rows: bool, for_sft: bool = False
) -> None:
    """Print the answers to each row, in order. JSON lines are printed as soon as they are there.

    Ends with exit code 1 if the server did not answer some of them, after all others are printed, and if for_sft leaves
    no line."""
    if not as_rows:
        every = list(answers)
        for completion in (one for siblings in every for one in siblings):
            if completion.finish_reason is FinishReason.FAILED:
                raise UserError(f"generate: the server did not answer: {completion.detail}")
        typer.echo(completions_text(every))
        return
    drawn: list[FinishReason] = []
    empty = 0
    last_failure: str | None = None
    for row, siblings in zip(rows, answers, strict=True):
        for line in (conversation_lines if for_sft else result_lines)([row], [siblings]):
            typer.echo(line)
        drawn += [one.finish_reason for one in siblings]
        empty += sum(map(is_empty, siblings))
        last_failure = next((one.detail for one in siblings[::-1] if one.detail is not None), last_failure)
    failed, cut = drawn.count(FinishReason.FAILED), drawn.count(FinishReason.LENGTH)
    if for_sft and cut:
        typer.echo(f"{cut} of {len(drawn)} answers were truncated and are left out; raise --max-new-tokens", err=True)
    if for_sft and empty:
        typer.echo(f"{empty} of {len(drawn)} answers were empty and are left out", err=True)
    if failed:
        where = "are left out" if for_sft else 'have finish_reason "failed" and the reason as error'
        lost = f"{failed} of {len(drawn)} requests failed; they {where}; the last: {last_failure}"
        typer.echo(f"octetrl: {UserError(lost)}", err=True)
    if failed or (for_sft and cut + empty == len(drawn)):
        raise typer.Exit(1)


def completions_text(completions: Sequence[Sequence[Completion]]) -> str:
    """A single completion without a heading, for pipes. Several completions each have a line with prompt and number."""
    if len(completions) == 1 and len(completions[0]) == 1:
        return completions[0][0].text
    blocks = [
        f"--- prompt {which + 1}, completion {sibling + 1}: {counted(len(completion.token_ids), 'token')},"
        f" {completion.finish_reason}\n{completion.text}"
        for which, siblings in enumerate(completions)
        for sibling, completion in enumerate(siblings)
    ]
    return "\n".join(blocks)

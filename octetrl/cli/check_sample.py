"""The part of `octetrl check --sample N` that draws N answers and shows them with their rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from octetrl.system.errors import UserError
from octetrl.system.text import counted, escaped
from octetrl.telemetry.sample_texts import said_in

if TYPE_CHECKING:
    from octetrl.config.schema import Recipe
    from octetrl.records import Rollout

MOST_CHARACTERS = 600  # of a prompt or an answer: its end is left out


def refuse_sample(recipe: Recipe, elsewhere: bool) -> None:
    """Raise UserError if no answers can be drawn here."""
    if elsewhere:
        raise UserError("--sample: it draws answers on this machine; leave --memory-gib out")
    if recipe.algorithm.learns_from != "rollouts":
        raise UserError(f"--sample: {recipe.algorithm.name} draws no answers; leave it out")


def show_sample(recipe: Recipe, number: int) -> list[str]:
    """Draw `number` answers and print each with its prompt and reward. Returns what is wrong: none has a reward."""
    from octetrl.run.sample import sample_answers

    typer.echo(f"sample of {number}")
    drawn = [group.rollouts[0] for group in sample_answers(recipe, number)]
    for place, rollout in enumerate(drawn, start=1):
        for line in _lines(place, rollout):
            typer.echo(line)
    if any(rollout.reward is not None for rollout in drawn):
        return []
    statuses = Counter(rollout.status.value for rollout in drawn)
    why = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    return [f"none of {counted(len(drawn), 'sampled answer')} has a reward ({why}); a run would end at its first step"]


def _lines(place: int, rollout: Rollout) -> Iterator[str]:
    tokens = sum(len(turn.completion.token_ids) for turn in rollout.turns)
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    yield f"  {place}. task {rollout.task.id}: {reward}, {rollout.status}, {counted(tokens, 'token')}"
    if rollout.task.answer is not None:
        yield f"     reference  {_shortened(rollout.task.answer)}"
    yield f"     prompt     {_shortened(rollout.task.prompt)}"
    for by, text in said_in(rollout):
        yield f"     {by:<11}{_shortened(text)}"
    if rollout.detail is not None:
        yield f"     detail     {_shortened(rollout.detail)}"


def _shortened(text: str) -> str:
    """On one line, without control characters."""
    line = escaped(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ...")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)

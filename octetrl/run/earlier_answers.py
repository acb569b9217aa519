"""Gives the answers of a resumed run's earlier steps to its workers, for their drafts (`engine.speculation`).

They are read from the run's `rollouts/` and `evaluations/`, the newest files first, until `memory_tokens` are found.
Batches of the checkpoint that were generated ahead (`checkpoint.batches_ahead: saved`) are newer than all files.
What cannot be read, or has a token that the model does not know, is named and left out: without drafts a rollout takes
longer, and its tokens are the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

from octetrl.records import EarlierAnswer
from octetrl.run.state import Run
from octetrl.system.errors import UserError
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS, Filter, matching_rows
from octetrl.workers.model_shape import model_spec

SHOWN_STEPS = 3  # in the line about missing files


def remember_answers(run: Run, folder: Path, step: int) -> None:
    """Gives the workers the answers up to `step` of the run in `folder`. A run without drafts reads nothing."""
    speculation = run.config.engine.speculation
    if speculation.name == "none" or run.conversations is not None or not speculation.memory_tokens:
        return
    room, missing = speculation.memory_tokens, list[int]()
    newest: list[list[EarlierAnswer]] = []
    prompts = set[tuple[int, ...]]()  # the memory holds each once
    for answers in _newest_first(run, folder, step, missing):
        newest.append(answers)
        for one in answers:
            room -= len(one.token_ids) + (0 if one.prompt_token_ids in prompts else len(one.prompt_token_ids))
            prompts.add(one.prompt_token_ids)
        if room <= 0:
            break
    if missing:
        shown = ", ".join(map(str, missing[:SHOWN_STEPS])) + (" and others" if len(missing) > SHOWN_STEPS else "")
        run.console.warn(f"{folder / ROLLOUTS} has no rollouts of step {shown}: no drafts are made from their answers")
    run.workers.remember([answer for answers in reversed(newest) for answer in answers])


def _newest_first(run: Run, folder: Path, step: int, missing: list[int]) -> Iterator[list[EarlierAnswer]]:
    """Of each batch of the checkpoint, then of each file. `missing`: gets the steps without rollouts."""
    for batch in reversed(run.method.batches_after(step, waits=False)):
        turns = (turn for group in batch.groups for rollout in group.rollouts for turn in rollout.turns)
        yield [EarlierAnswer(turn.prompt_token_ids, array("i", turn.completion.token_ids)) for turn in turns]
    vocab_size = model_spec(run.config).vocab_size
    for number in range(step, 0, -1):
        paths = [folder / of / f"step_{number:06d}.jsonl" for of in (EVALUATIONS, ROLLOUTS)]  # the evaluation is newer
        if not paths[1].is_file():
            missing.append(number)
        for path in filter(Path.is_file, paths):
            yield _answers(run, path, vocab_size)


def _answers(run: Run, path: Path, vocab_size: int) -> list[EarlierAnswer]:
    try:
        answers = [answer for *_, row in matching_rows(path, Filter()) for answer in row.answers]
    except UserError as error:
        run.console.warn(f"{error}; no drafts are made from its answers")
        return []
    tokens = {token for one in answers for token in (*one.prompt_token_ids, *one.token_ids)}
    unknown = [token for token in tokens if not 0 <= token < vocab_size]
    if not unknown:
        return answers
    known = f"the model's tokens are 0 to {vocab_size - 1}"
    run.console.warn(f"{path} has the token {max(unknown)}, and {known}; no drafts are made from its answers")
    return []

"""What a bench generates and learns from: random prompts, and answers whose lengths are given.

    512x512+2048-4096        512 answers to prompts of 512 tokens, lengths drawn uniformly, both ends included
    128x512+4096             every answer has 4,096 tokens
    ... with a sigma         log-normal lengths with this mean, sigma of the logarithm, cut at the model's positions
    a file                   the lengths of a run's rollouts/step_NNNNNN.jsonl, in its order

Answers end only at their length. The siblings of a group share a prompt, which is prefilled once, as in a run.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean

from octetrl.config.schema import Recipe
from octetrl.system.errors import UserError

Group = tuple[int, tuple[int, ...]]  # tokens of the prompt, and of each sibling's answer
STAIRS = 256  # sizes of a batch that a warm-up visits
SHORT = 16  # tokens of the shortest answers of a warm-up
MOST_ANSWERS, MOST_TOKENS = 1_000_000, 1 << 26  # of a bench, in all prompts
_NUMBER = "([0-9]{1,7})"
_SHAPE = re.compile(rf"{_NUMBER}x{_NUMBER}\+{_NUMBER}(?:-{_NUMBER})?")


@dataclass(frozen=True, slots=True)
class Workload:
    """The groups of a step, and their name in the results."""

    name: str
    groups: tuple[Group, ...]

    @property
    def siblings(self) -> list[tuple[int, int]]:
        """(tokens of the prompt, tokens of the answer) of every completion."""
        return [(prompt, answer) for prompt, answers in self.groups for answer in answers]

    @property
    def tokens(self) -> int:
        """Number of tokens in prompts and answers; a prompt counts for each of its siblings, as in training."""
        return sum(map(sum, self.siblings))

    @property
    def generated_tokens(self) -> int:
        return sum(answer for _, answer in self.siblings)

    @property
    def live_token_steps(self) -> int:
        """Keys that all decode steps read. Token t of the answer to P tokens reads P + t - 1 keys, its own included."""
        return sum(answer * prompt + answer * (answer - 1) // 2 for prompt, answer in self.siblings)

    def short(self, number: int) -> tuple[tuple[int, ...], ...]:
        """Tokens of the answers of an untimed step. In the first one they end one after another, so that every size of
        batch occurs. In the others they end together, at a multiple of 16 tokens: a kernel compiles once for those and
        once for other numbers."""
        found, place = [], 0
        for _, answers in self.groups:
            steps = [SHORT + (0 if number else (place + sibling) % STAIRS) for sibling in range(len(answers))]
            found.append(tuple(map(min, steps, answers)))
            place += len(answers)
        return tuple(found)


def workload_of(recipe: Recipe, text: str | None, sigma: float | None, positions: int) -> Workload:
    """The workload of `REQUESTSxPROMPT+ANSWER`, or of the recipe's sizes. positions: of the model. Raises UserError."""
    rollout = recipe.rollout
    if text is None:
        requests = rollout.prompts_per_step * rollout.group_size
        text = f"{requests}x{rollout.max_prompt_tokens}+{rollout.max_new_tokens}"
    match = _SHAPE.fullmatch(text)
    numbers = [] if match is None else [int(number) for number in match.groups() if number is not None]
    if not numbers or 0 in numbers or numbers[2] > numbers[-1]:
        raise UserError(
            f"--workload: {text[:60]!r} is not REQUESTSxPROMPT+ANSWER, each from 1 and of at most 7 digits; write for"
            " example 128x512+4096, or 512x512+2048-4096 for lengths in a span"
        )
    requests, prompt, shortest, longest = *numbers[:3], numbers[-1]
    if sigma is not None and shortest != longest:
        raise UserError(f"--workload: '{text}' has a span of lengths; log-normal lengths have one mean, such as 2048")
    if requests % rollout.group_size:
        nearest = -(-requests // rollout.group_size) * rollout.group_size
        raise UserError(
            f"--workload: {requests} requests are no whole groups of {rollout.group_size}; give {nearest}, or change"
            " rollout.group_size"
        )
    if prompt + longest > positions:
        raise UserError(f"--workload: {prompt} + {longest} tokens, but the model has {positions} positions; shorten it")
    if requests > MOST_ANSWERS or requests // rollout.group_size * prompt > MOST_TOKENS:
        raise UserError(f"--workload: '{text}' would fill the memory of the host; give fewer requests or tokens")
    rng = random.Random(recipe.seed)
    groups = []
    for _ in range(requests // rollout.group_size):
        rng.choices((0, 1), k=prompt)  # lengths are those of earlier results, which drew the prompt's tokens here
        groups.append((prompt, tuple(_length(rng, shortest, longest, sigma, positions - prompt) for _ in range(rollout.group_size))))  # fmt: skip  # noqa: E501
    return Workload(text if sigma is None else f"{text} lognormal {sigma:g} grouped", tuple(groups))


def _length(rng: random.Random, shortest: int, longest: int, sigma: float | None, room: int) -> int:
    if sigma is not None:
        return min(max(1, round(rng.lognormvariate(math.log(longest) - sigma**2 / 2, sigma))), room)
    return rng.randint(shortest, longest) if shortest < longest else longest


def recorded_workload(path: Path) -> Workload:
    """The lengths of a run's rollouts. Neighbours with one task are siblings. Raises UserError."""
    groups: list[Group] = []
    for (_, prompt), siblings in groupby(_read_lengths(path), key=lambda one: one[:2]):
        groups.append((prompt, tuple(answer for *_, answer in siblings)))
    size = len(groups[0][1])
    if any(len(answers) != size for _, answers in groups):
        raise UserError(f"--lengths: the groups of '{path}' have different sizes; give a step's file with whole groups")
    every = [(prompt, answer) for prompt, answers in groups for answer in answers]
    means = (round(fmean(prompt for prompt, _ in every)), round(fmean(answer for _, answer in every)))
    return Workload(f"{len(every)}x{means[0]}+{means[1]} {path.stem} grouped", tuple(groups))


def _read_lengths(path: Path) -> Sequence[tuple[str, int, int]]:
    """(task, tokens of the prompt, tokens of the answer) of each rollout that has both."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # a text may hold other separators
        for line in lines:
            record = json.loads(line)
            task, prompt, answer = record["task_id"], len(record["prompt_token_ids"]), len(record["token_ids"])
            found += [(str(task), prompt, answer)] if prompt and answer else []
    except OSError as error:
        raise UserError(f"--lengths: cannot read '{path}' ({error.strerror}); give a run's rollouts file") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"--lengths: '{path}' holds a line that is no rollout; give a rollouts/step_NNNNNN.jsonl of a run"
        ) from None
    if not found:
        raise UserError(f"--lengths: '{path}' holds no rollout with an answer; give another step's file")
    return found

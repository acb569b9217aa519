"""The requests of `octetrl bench rollout`: random prompts, siblings, and answers of a given length.

    fixed        every answer has the same length
    lognormal    lengths drawn with the given mean and sigma (of the logarithm), cut at the model's positions
    a file       prompt and answer lengths of a run's rollouts/step_NNNNNN.jsonl, in its order

Answers end only at their length (`ignore_eos`). The siblings of a group are one request, as in a run: their prompt is
prefilled once. If their lengths differ, each has a limit of its own (`answer_limits`), and the workload's name ends
with "grouped". `separate` makes a request of each sibling instead, as these benchmarks did before, without that word.

The memory-bandwidth model needs the tokens that are live in each decode step, a shared prompt counted per sibling.
Token t of the answer to a prompt of P tokens reads P + t - 1 keys, its own included. A tokens therefore read
A * P + A * (A - 1) / 2 in all.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean

from octetrl.records import GenerationRequest, SamplingParams
from octetrl.system.errors import UserError

CALIBRATION_TOKENS = 4096
LONGEST_SHOWN = 60  # characters of what was given, in an error
STAIRS = 256  # sizes of a batch that a warm-up visits
GROUPED = " grouped"  # at the end of a workload's name
DIGITS = 7  # of a number on the command line, at most
MOST_ANSWERS, MOST_PROMPT_TOKENS = 1_000_000, 1 << 26  # of a bench; their requests then take at most about 3 GB
_NUMBER = f"([0-9]{{1,{DIGITS}}})"
_SHAPE = re.compile(rf"{_NUMBER}x{_NUMBER}\+{_NUMBER}")
_SPAN = re.compile(f"{_NUMBER}(?:-{_NUMBER})?")


@dataclass(frozen=True, slots=True)
class Shape:
    """`128x512+4096`: requests (counted per sibling), tokens of a prompt, tokens of an answer."""

    requests: int
    prompt: int
    answer: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.prompt}+{self.answer}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        match = _SHAPE.fullmatch(text)
        if match is None or not all(int(number) for number in match.groups()):
            raise UserError(
                f"--workload: '{_shown(text)}' is not REQUESTSxPROMPT+ANSWER, each from 1 and of at most {DIGITS}"
                " digits; write for example 128x512+4096"
            )
        return cls(*(int(number) for number in match.groups()))


@dataclass(frozen=True, slots=True)
class LengthRange:
    """`4096`, or `2048-4096`: lengths drawn uniformly, both ends included."""

    shortest: int
    longest: int

    def __str__(self) -> str:
        return str(self.shortest) if self.shortest == self.longest else f"{self.shortest}-{self.longest}"

    @classmethod
    def parse(cls, text: str, option: str) -> LengthRange:
        match = _SPAN.fullmatch(text)
        if match is not None:
            shortest, longest = int(match[1]), int(match[2] or match[1])
            if 0 < shortest <= longest:
                return cls(shortest, longest)
        raise UserError(
            f"{option}: '{_shown(text)}' is no length and no span of lengths, of at most {DIGITS} digits;"
            " write for example 4096 or 2048-4096"
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests for the engine, and their name in the results."""

    name: str
    requests: tuple[GenerationRequest, ...]

    @property
    def siblings(self) -> list[tuple[int, int]]:
        """(tokens of the prompt, tokens of the answer) of every completion."""
        return [(len(request.prompt_token_ids), answer) for request in self.requests for answer in _lengths_of(request)]

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Token ids of each prompt once."""
        return list(dict.fromkeys(tuple(request.prompt_token_ids) for request in self.requests))

    @property
    def longest(self) -> Shape:
        """The shape of the completion with the most tokens."""
        return Shape(1, *max(self.siblings, key=sum))

    @property
    def generated_tokens(self) -> int:
        return sum(answer for _, answer in self.siblings)

    @property
    def live_token_steps(self) -> int:
        """Keys read, summed over all decode steps and sequences."""
        return sum(answer * prompt + answer * (answer - 1) // 2 for prompt, answer in self.siblings)

    def short(self, tokens: int) -> tuple[GenerationRequest, ...]:
        """The same requests for a warm-up. Equal answers end together, as in the timed rollout; others in `stairs`."""
        ragged = len({answer for _, answer in self.siblings}) > 1
        return self.stairs(tokens) if ragged else self.cut(tokens)

    def cut(self, tokens: int) -> tuple[GenerationRequest, ...]:
        """The same requests with answers of at most `tokens` tokens, for a warm-up."""
        return tuple(
            replace(
                request,
                sampling=_answers(min(tokens, request.sampling.max_new_tokens)),
                answer_limits=tuple(min(tokens, limit) for limit in request.answer_limits),
            )
            for request in self.requests
        )

    def stairs(self, tokens: int) -> tuple[GenerationRequest, ...]:
        """The same requests with short answers that end one after another, for a warm-up: the i-th has at most `tokens`
        + i tokens, and every `STAIRS` answers i begins again. So the batch takes every size on its way to the end, and
        what a size compiles and tunes is not timed."""
        requests, first = [], 0
        for request in self.requests:
            most = [tokens + (first + place) % STAIRS for place in range(request.num_siblings)]
            first += request.num_siblings
            limits = [min(step, length) for step, length in zip(most, _lengths_of(request), strict=True)]
            requests.append(replace(request, sampling=_answers(max(limits)), answer_limits=tuple(limits)))
        return tuple(requests)

    def hinted(self) -> Workload:
        """Each request with the mean length of the answers to its prompt, as a run knows it from the task's last
        rollout."""
        lengths: dict[tuple[int, ...], list[int]] = {}
        for request in self.requests:
            lengths.setdefault(request.prompt_token_ids, []).extend(_lengths_of(request))
        means = {prompt: round(sum(answers) / len(answers)) for prompt, answers in lengths.items()}
        requests = (replace(request, expected_tokens=means[request.prompt_token_ids]) for request in self.requests)
        return Workload(f"{self.name} hinted", tuple(requests))

    def separate(self) -> Workload:
        """Each sibling as a request of its own with its group's prompt."""
        requests: list[GenerationRequest] = []
        first = self.requests[0].seed
        for request in self.requests:
            for answer in _lengths_of(request):
                requests.append(_request(len(requests), request.prompt_token_ids, (answer,), seed=first))
        return Workload(self.name.removesuffix(GROUPED), tuple(requests))


def _lengths_of(request: GenerationRequest) -> tuple[int, ...]:
    """Of the answers of all siblings."""
    return request.answer_limits or (request.sampling.max_new_tokens,) * request.num_siblings


def calibration_prompts(workload: Workload) -> list[Sequence[int]]:
    """The first prompts, `CALIBRATION_TOKENS` tokens of them."""
    prompts: list[Sequence[int]] = []
    room = CALIBRATION_TOKENS
    for request in workload.requests:
        prompts.append(request.prompt_token_ids[:room])
        room -= len(prompts[-1])
        if room <= 0:
            break
    return prompts


def fixed_lengths(shape: Shape, group_size: int, vocab_size: int, seed: int) -> Workload:
    _check_groups(shape, group_size)
    rng = random.Random(seed)
    prompts = [_random_tokens(rng, vocab_size, shape.prompt) for _ in range(shape.requests // group_size)]
    lengths = (shape.answer,) * group_size
    requests = (_request(index, prompt, lengths, seed=seed) for index, prompt in enumerate(prompts))
    return Workload(str(shape), tuple(requests))


def lognormal_lengths(
    shape: Shape, group_size: int, vocab_size: int, seed: int, *, sigma: float, max_positions: int
) -> Workload:
    """`shape.answer` is the mean of the distribution, before lengths are cut at the model's positions."""
    _check_groups(shape, group_size)
    rng = random.Random(seed)
    mu = math.log(shape.answer) - sigma**2 / 2
    room = max_positions - shape.prompt
    requests: list[GenerationRequest] = []
    for index in range(shape.requests // group_size):
        prompt = _random_tokens(rng, vocab_size, shape.prompt)
        answers = [min(max(1, round(rng.lognormvariate(mu, sigma))), room) for _ in range(group_size)]
        requests.append(_request(index, prompt, answers, seed=seed))
    return Workload(f"{shape} lognormal {sigma:g}{GROUPED}", tuple(requests))


def uniform_lengths(
    num_groups: int, group_size: int, prompt: int, answers: LengthRange, vocab_size: int, seed: int
) -> Workload:
    """Groups of siblings with answer lengths drawn from the span. If all lengths are equal, a group is one request."""
    shape = Shape(num_groups * group_size, prompt, answers.longest)
    if answers.shortest == answers.longest:
        return fixed_lengths(shape, group_size, vocab_size, seed)
    rng = random.Random(seed)
    requests: list[GenerationRequest] = []
    for _ in range(num_groups):
        tokens = _random_tokens(rng, vocab_size, prompt)
        for _ in range(group_size):
            answer = rng.randint(answers.shortest, answers.longest)
            requests.append(_request(len(requests), tokens, (answer,), seed=seed))
    return Workload(f"{shape.requests}x{prompt}+{answers}", tuple(requests))


def recorded_lengths(path: Path, most: int | None, vocab_size: int, seed: int) -> Workload:
    """The lengths of the first `most` rollouts of the file (None: all). Prompts are random tokens, one per task, and
    neighbours with one prompt are siblings."""
    lengths = _read_lengths(path)
    if most is not None and most > len(lengths):
        raise UserError(f"--requests: {most} were requested, but '{path}' holds {len(lengths)} rollouts; ask for fewer")
    rng = random.Random(seed)
    prompts: dict[tuple[str, int], tuple[int, ...]] = {}
    requests: list[GenerationRequest] = []
    for (task, prompt), siblings in groupby(lengths[:most], key=lambda one: one[:2]):
        if (task, prompt) not in prompts:
            prompts[task, prompt] = _random_tokens(rng, vocab_size, prompt)
        answers = [answer for *_, answer in siblings]
        requests.append(_request(len(requests), prompts[task, prompt], answers, seed=seed))
    _, prompt_lengths, answer_lengths = zip(*lengths[:most], strict=True)
    shape = Shape(len(answer_lengths), round(fmean(prompt_lengths)), round(fmean(answer_lengths)))
    return Workload(f"{shape} {path.stem}{GROUPED}", tuple(requests))


def _read_lengths(path: Path) -> list[tuple[str, int, int]]:
    """(task, tokens of the prompt, tokens of the answer) of each rollout that has both."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is no text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise UserError(f"--lengths: cannot read '{path}' ({why}); give fixed, lognormal or a rollouts file") from error
    lines = text.split("\n")  # the writer leaves U+2028 and the like as they are, and they end no line of the file
    if not lines[-1]:
        lines.pop()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            task, prompt, answer = record["task_id"], len(record["prompt_token_ids"]), len(record["token_ids"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # ValueError: also a number of 5,000 digits
            raise UserError(
                f"--lengths: line {number} of '{path}' is no rollout; give a rollouts/step_NNNNNN.jsonl of a run"
            ) from error
        if prompt and answer:
            found.append((str(task), prompt, answer))
    if not found:
        raise UserError(f"--lengths: '{path}' holds no rollout with an answer; give another step's file")
    return found


def _check_groups(shape: Shape, group_size: int) -> None:
    if shape.requests % group_size:
        raise UserError(
            f"workload {shape}: {shape.requests} requests are no whole groups of {group_size};"
            f" give a multiple of --group-size, such as {-(-shape.requests // group_size) * group_size}"
        )


def check_positions(shape: Shape, max_positions: int, model: str, remedy: str = "shorten --prompt or --answer") -> None:
    """Raises UserError when a prompt and its answer are longer than the model. `remedy`: what to do about it."""
    if shape.prompt + shape.answer > max_positions:
        raise UserError(
            f"workload {shape}: prompt and answer take {shape.prompt} + {shape.answer} tokens and {model} has"
            f" {max_positions} positions; {remedy}"
        )


def check_size(answers: int, prompt_tokens: int, remedy: str) -> None:
    """Raises UserError if requests would fill the host's memory, before they are made."""
    for count, most, what in ((answers, MOST_ANSWERS, "answers"), (prompt_tokens, MOST_PROMPT_TOKENS, "prompt tokens")):
        if count > most:
            raise UserError(f"workload: {count:,} {what} were requested, and a bench has at most {most:,}; {remedy}")


def _shown(text: str) -> str:
    """The user's input, shortened to one line."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _random_tokens(rng: random.Random, vocab_size: int, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(vocab_size), k=length))


def _request(index: int, prompt: Sequence[int], answers: Sequence[int], *, seed: int) -> GenerationRequest:
    """`answers`: the length of each sibling's."""
    limits = () if len(set(answers)) == 1 else tuple(answers)
    name, sampling = f"bench {index}", _answers(max(answers))
    return GenerationRequest(name, tuple(prompt), sampling, len(answers), seed=seed + index, answer_limits=limits)


def _answers(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True)

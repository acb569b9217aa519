"""Drafts from n-grams: what followed the last tokens when they occurred before.

A prompt's texts are the prompt, its kept answers of earlier calls, and the answers that run now, each beside its
siblings. For each length n of the recipe a table maps the hash of n tokens to the latest place behind them. A lookup
tries the longest n first and returns the text from that place on. New tokens enter the tables while the device works,
one forward late. A hash that collides gives a wrong draft, and a wrong
draft changes no token (speculation.py).

Ended answers are kept by prompt, as bytes; this costs nothing while a batch is large. A prompt's tables are built when
its first running answer asks for a draft, and dropped when its last one ends. A new session sorts the answers of the
last one by request and sibling. A resumed run gives them back in that order (`remember`). It reads them from the run's
files, so cancelled answers, which are in no file, are not kept. With one
worker in the run's process, and room for all answers, a resumed run makes the drafts of a run that was never stopped.
Workers of a resumed run know the answers of all workers, and not just their own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from octetrl.config.schema import SpeculationConfig
from octetrl.engine.draft_budget import DraftLosses
from octetrl.engine.request import RunningSequence
from octetrl.engine.speculation import DraftSource
from octetrl.records import EarlierAnswer

INDEXED_TOKENS = 1 << 15  # of a prompt's kept answers, the latest first
TEXT = 1 << 32
BULK = 64  # tokens from which arrays are faster
MULTIPLIER = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
Prompt = tuple[int, ...]
Place = tuple[int, int, int]  # number of the session, of the request in it, of the sibling


@dataclass(frozen=True, slots=True)
class _Kept:
    """An ended answer."""

    place: Place
    request_id: str
    token_ids: bytes  # int32

    @property
    def num_tokens(self) -> int:
        return _num_packed(self.token_ids)

    def tokens(self) -> list[int]:
        tokens: list[int] = np.frombuffer(self.token_ids, dtype=np.int32).tolist()
        return tokens


@dataclass(slots=True)
class _Texts:
    """The indexed texts of one prompt."""

    texts: list[list[int]] = field(default_factory=list)
    places: list[dict[int, int]] = field(default_factory=list)  # for each n: hash -> text * TEXT + place behind it
    growing: dict[int, int] = field(default_factory=dict)  # the text of each running sibling


class NGramDrafts:
    """Looks up the last `config.ngrams` tokens, and keeps `config.memory_tokens` tokens of answers and prompts."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._lengths = tuple(sorted(set(config.ngrams), reverse=True))
        self._memory = config.memory_tokens
        self.losses = DraftLosses()
        self._answers: OrderedDict[bytes, list[_Kept]] = OrderedDict()  # by int32 prompt; the one answered last is last
        self._is_sorted = True  # false: a prompt's place is that of an answer that was forgotten
        self._kept = 0  # tokens of all answers and of their prompts
        self._session = 0  # its number
        self._texts: dict[Prompt, _Texts] = {}
        self._unindexed: list[tuple[_Texts, int, int]] = []  # texts, number of one, where it was extended

    def reset(self) -> None:
        """Drops the tables. Ended answers stay, in an order that does not depend on when they ended."""
        self._texts.clear()
        self._unindexed.clear()
        is_new = takewhile(lambda one: self._answers[one][-1].place[0] == self._session, reversed(self._answers))
        prompts = is_new if self._is_sorted else self._answers
        for prompt in sorted(prompts, key=lambda one: max(kept.place for kept in self._answers[one])):
            self._answers[prompt].sort(key=lambda kept: kept.place)
            self._answers.move_to_end(prompt)
        self._is_sorted = True
        self._session += 1

    def remember(self, answers: Iterable[EarlierAnswer]) -> None:
        """Keeps answers of earlier sessions, oldest first."""
        for number, answer in enumerate(answers):
            self._keep(answer.prompt_token_ids, answer.token_ids, (number, 0), "")
        self._session += 1

    def extend(self, sequence: RunningSequence, token_ids: Sequence[int]) -> None:
        """Adds the next tokens of a running answer."""
        prompt = sequence.group.request.prompt_token_ids
        texts = self._texts.get(prompt)
        if texts is None:
            texts = self._texts[prompt] = self._opened(prompt)
        if sequence.sibling not in texts.growing:
            texts.growing[sequence.sibling] = len(texts.texts)
            texts.texts.append(list(prompt[-self._lengths[0] :]))
        number = texts.growing[sequence.sibling]
        text = texts.texts[number]
        if token_ids:
            self._unindexed.append((texts, number, len(text)))
            text += token_ids

    def index(self) -> None:
        """Enters what was added since the last call into the tables, in the order in which it was added."""
        for texts, number, begin in self._unindexed:
            text = texts.texts[number]
            if len(text) - begin > BULK:
                self._index(texts, number, begin)
                continue
            for place in range(begin, len(text)):
                for n, places in zip(self._lengths, texts.places, strict=True):
                    if place >= n:
                        places[_hash(text[place - n : place])] = number * TEXT + place
        self._unindexed.clear()

    def propose(self, sequence: RunningSequence, most: int) -> Sequence[int]:
        """At most `most` tokens that followed the last ones when they occurred last."""
        texts = self._texts[sequence.group.request.prompt_token_ids]
        text = texts.texts[texts.growing[sequence.sibling]]
        for n, places in zip(self._lengths, texts.places, strict=True):
            found = places.get(_hash(text[-n:])) if len(text) >= n else None
            if found is not None:
                number, place = divmod(found, TEXT)
                return texts.texts[number][place : place + most]
        return ()

    def end(self, sequence: RunningSequence, *, keeps: bool = True) -> None:
        """The answer stays a text of its siblings. `keeps`: also of later answers to the prompt."""
        request = sequence.group.request
        prompt = request.prompt_token_ids
        texts = self._texts.get(prompt)
        if texts is not None:
            known = len(texts.texts[texts.growing[sequence.sibling]]) if sequence.sibling in texts.growing else 0
            answer = sequence.token_ids[sequence.prompt_length :]
            missing = len(answer) + min(len(prompt), self._lengths[0]) - known
            self.extend(sequence, answer[len(answer) - missing :] if missing > 0 else ())
            del texts.growing[sequence.sibling]
            if not texts.growing:
                del self._texts[prompt]
        if keeps:
            place = sequence.group.index, sequence.sibling
            self._keep(prompt, sequence.token_ids[sequence.prompt_length :], place, request.id)

    def _keep(self, prompt_ids: Prompt, answer: Sequence[int], place: tuple[int, int], request_id: str) -> None:
        prompt = _packed(prompt_ids)
        if prompt in self._answers:
            self._answers.move_to_end(prompt)
        else:
            self._answers[prompt] = []
            self._kept += len(prompt_ids)
        self._answers[prompt].append(_Kept((self._session, *place), request_id, _packed(answer)))
        self._kept += len(answer)
        while self._kept > self._memory and self._answers:
            oldest, answers = next(iter(self._answers.items()))
            self._kept -= answers.pop(0).num_tokens
            if not answers:
                self._drop(oldest)

    def _drop(self, prompt: bytes) -> None:
        """Drops a prompt without answers."""
        del self._answers[prompt]
        self._kept -= _num_packed(prompt)

    def _opened(self, prompt: Prompt) -> _Texts:
        texts = _Texts(places=[{} for _ in self._lengths])
        room = INDEXED_TOKENS
        answers: list[list[int]] = []
        for kept in reversed(self._answers.get(_packed(prompt), [])):
            room -= kept.num_tokens
            if room < 0:
                break
            answers.append(kept.tokens())
        tail = list(prompt[-self._lengths[0] :])
        for text in (list(prompt), *(tail + answer for answer in reversed(answers))):
            texts.texts.append(text)
            self._index(texts, len(texts.texts) - 1, 0)
        return texts

    def _index(self, texts: _Texts, number: int, begin: int) -> None:
        """Enters the places of a text from `begin` on. A place has a token behind its n tokens."""
        token_N = np.array(texts.texts[number], dtype=np.uint64)
        for n, places in zip(self._lengths, texts.places, strict=True):
            first = max(n, begin)
            if first < len(token_N):
                hash_N = np.zeros(len(token_N) - first, dtype=np.uint64)
                for back in range(n, 0, -1):
                    hash_N = hash_N * np.uint64(MULTIPLIER) + token_N[first - back : len(token_N) - back] + np.uint64(1)
                start = number * TEXT
                places.update(zip(hash_N.tolist(), range(start + first, start + len(token_N)), strict=True))


def draft_source_of(config: SpeculationConfig) -> DraftSource | None:
    """The source that a recipe asks for; None without speculation."""
    return NGramDrafts(config) if config.name == "ngram" else None


def _packed(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, dtype=np.int32).tobytes()


def _num_packed(packed: bytes) -> int:
    return len(packed) // np.dtype(np.int32).itemsize


def _hash(token_ids: Iterable[int]) -> int:
    """The hash that `_index` computes."""
    value = 0
    for token in token_ids:
        value = value * MULTIPLIER + token + 1 & _MASK64
    return value

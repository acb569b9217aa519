"""Drafts are what followed the same tokens before, in an order that does not depend on the clock."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from octetrl.config.schema import SpeculationConfig
from octetrl.engine import ngram_drafts
from octetrl.engine.ngram_drafts import NGramDrafts
from octetrl.records import EarlierAnswer


class Said(SimpleNamespace):
    """A sequence, as far as drafts look at it."""

    def __init__(self, prompt: Sequence[int], sibling: int = 0, name: str = "") -> None:
        asked = SimpleNamespace(prompt_token_ids=tuple(prompt), id=name)
        super().__init__(group=SimpleNamespace(request=asked, index=0), sibling=sibling, token_ids=list(prompt))

    __hash__ = object.__hash__

    @property
    def prompt_length(self) -> int:
        return len(self.group.request.prompt_token_ids)

    def say(self, source: NGramDrafts, *token_ids: int) -> None:
        self.token_ids += token_ids
        source.extend(self, token_ids)  # type: ignore[arg-type]
        source.index()


def ngrams(**config: Any) -> Any:
    return NGramDrafts(SpeculationConfig(name="ngram", **{"ngrams": (4, 2), **config}))


def test_drafts_are_what_followed_the_longest_match() -> None:
    source, prompt = ngrams(), [1, 2, 3, 4, 5, 6, 2, 3, 9, 9]
    first = Said(prompt)
    first.say(source, 2, 3)
    assert source.propose(first, 3) == [9, 9], "the latest of two places"
    first.say(source, 4)
    assert source.propose(first, 3) == [5, 6, 2]
    first.say(source, 8)
    assert list(source.propose(first, 3)) == []
    sibling = Said(prompt, 1)
    sibling.say(source, 7, 3, 4)
    assert source.propose(sibling, 4) == [8], "what its sibling said after the same two tokens"
    sibling.say(source, 8, 30, 31, 32, 33)
    sibling.say(source, 3, 4)
    assert source.propose(sibling, 2) == [8, 30]


def test_answers_are_kept_for_the_same_prompt_up_to_a_bound() -> None:
    source = ngrams(memory_tokens=39)
    prompts = [[n, 1, 2, 3] for n in range(20, 24)]
    for prompt in prompts:
        answer = Said(prompt)
        answer.token_ids += [10, 11, 12, 13, prompt[0], 15]
        source.end(answer)
    for prompt in prompts:
        again = Said(prompt)
        again.say(source, 11, 12)
        kept = [13, prompt[0], 15] if prompt is not prompts[0] else []
        assert list(source.propose(again, 5)) == kept, "the prompt that was answered first is dropped"


def kept_by(source: NGramDrafts) -> list[tuple[bytes, list[list[int]]]]:
    """Of each prompt, in the order in which they are dropped."""
    return [(prompt, [one.tokens() for one in answers]) for prompt, answers in source._answers.items()]


def test_dropped_prompts_make_room_for_answers() -> None:
    source = ngrams(memory_tokens=39)
    for number in range(20, 60):
        answer = Said([number, 1, 2, 3])
        answer.token_ids += [10, 11, 12, 13, 14, 15]
        source.end(answer)
    assert [answers for _, answers in kept_by(source)] == [[[10, 11, 12, 13, 14, 15]]] * 3, "of 10 tokens each"


def test_prompts_and_answers_are_kept_in_four_bytes_a_token() -> None:
    """A prompt as a tuple would take 36 bytes a token."""
    source = ngrams()
    tracemalloc.start()
    for number in range(50):
        source.remember([EarlierAnswer(tuple(range(number + 1000, number + 2000)), tuple(range(1000, 1020)))])
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 50 * (4 * 1020 + 2 * 300)


def test_the_oldest_answers_are_not_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_drafts, "INDEXED_TOKENS", 8)
    source = ngrams()
    source.remember([EarlierAnswer((1, 2), (first, 8, 9, first + 1)) for first in (20, 30, 40)])
    again = Said([1, 2])
    for first, follows in ((20, []), (30, [9, 31]), (40, [9, 41])):
        again.say(source, first, 8)
        assert list(source.propose(again, 4)) == follows


def test_cancelled_answers_are_not_kept() -> None:
    """A resumed run, which reads the others from its files, keeps the same in the same order."""
    source, resumed = ngrams(), ngrams()
    first = [EarlierAnswer((n, 1), (7, 8, n)) for n in (1, 2, 3)]
    for one in (source, resumed):
        one.remember(first)
    answer = Said([2, 1])
    answer.token_ids += [7, 9, 4]
    source.end(answer)
    cancelled = Said([3, 1])
    cancelled.say(source, 7, 9, 30)
    source.end(cancelled, keeps=False)
    resumed.remember([EarlierAnswer((2, 1), (7, 9, 4))])
    for one in (source, resumed):
        one.reset()
    assert kept_by(source) == kept_by(resumed) and source._kept == resumed._kept == 4 * 3 + 3 * 2


def test_the_order_of_kept_answers_does_not_depend_on_when_they_ended() -> None:
    ended, resumed, said = ngrams(), ngrams(), [(7, 8, n) for n in (20, 21, 22)]
    for sibling in (2, 0, 1):
        answer = Said([1, 2], sibling)
        answer.token_ids += said[sibling]
        ended.end(answer)
    ended.reset()
    resumed.remember([EarlierAnswer((1, 2), one) for one in said])
    for source in (ended, resumed):
        again = Said([1, 2])
        again.say(source, 7, 8)
        assert source.propose(again, 1) == [22]


def test_bulk_and_single_tokens_have_one_index() -> None:
    draw = random.Random(0)
    said = [draw.randrange(6) for _ in range(400)]
    at_once, one_by_one = Said([1, 2]), Said([1, 2])
    sources = ngrams(ngrams=(7, 3)), ngrams(ngrams=(7, 3))
    at_once.say(sources[0], *said)
    for token in said:
        one_by_one.say(sources[1], token)
    assert sources[0]._texts[(1, 2)].places == sources[1]._texts[(1, 2)].places
    assert len(sources[0].propose(at_once, 4)) == 4

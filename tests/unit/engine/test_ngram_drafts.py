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


def kept_by(source: NGramDrafts) -> list[tuple[bytes, list[list[int]]]]:
    """Of each prompt, in the order in which they are dropped."""
    return [(prompt, [one.tokens() for one in answers]) for prompt, answers in source._answers.items()]


def test_answers_are_kept_for_the_same_prompt_up_to_a_bound() -> None:
    source = ngrams(memory_tokens=39)
    for first in range(20, 64):  # of 10 tokens each; dropped prompts make room
        answer = Said([first, 1, 2, 3])
        answer.token_ids += [10, 11, 12, 13, first, 15]
        source.end(answer)
    assert [answers for _, answers in kept_by(source)] == [[[10, 11, 12, 13, n, 15]] for n in (61, 62, 63)]
    for first in (60, 61, 62, 63):
        again = Said([first, 1, 2, 3])
        again.say(source, 11, 12)
        assert list(source.propose(again, 5)) == ([13, first, 15] if first > 60 else [])


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


def test_a_resumed_run_keeps_the_same_in_the_same_order() -> None:
    """It reads from its files what ended, by sibling. Cancelled answers are not kept."""
    source, resumed = ngrams(), ngrams()
    first = [EarlierAnswer((n, 1), (7, 8, n)) for n in (1, 2, 3)]
    for one in (source, resumed):
        one.remember(first)
    said = [(7, 9, n) for n in (20, 21, 22)]
    for sibling in (2, 0, 1):
        answer = Said([2, 1], sibling)
        answer.token_ids += said[sibling]
        source.end(answer)
    cancelled = Said([3, 1])
    cancelled.say(source, 7, 9, 30)
    source.end(cancelled, keeps=False)
    resumed.remember([EarlierAnswer((2, 1), one) for one in said])
    for one in (source, resumed):
        one.reset()
        again = Said([2, 1])
        again.say(one, 7, 9)
        assert one.propose(again, 1) == [22]
    assert kept_by(source) == kept_by(resumed) and source._kept == resumed._kept == 4 * 3 + 3 * 2 + 3 * 2


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

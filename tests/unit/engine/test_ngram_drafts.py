"""Drafts are what followed the same tokens before, in an order that does not depend on the clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from octetrl.config.speculation import SpeculationConfig
from octetrl.engine.ngram_drafts import NGramDrafts
from octetrl.records import EarlierAnswer


class Said(SimpleNamespace):
    """A sequence, as far as drafts look at it."""

    def __init__(self, prompt: Sequence[int], sibling: int = 0) -> None:
        asked = SimpleNamespace(prompt_token_ids=tuple(prompt))
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

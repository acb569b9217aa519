"""Speculation over mixtures of experts, latent attention and windows: the same answers, and the trainer's log-probs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from octetrl.config.schema import SpeculationConfig
from octetrl.engine.ngram_drafts import NGramDrafts
from octetrl.engine.request import RunningSequence
from tests.parity.drafted import assert_drafts_change_nothing
from tests.parity.shapes import MODELS, TINY
from tests.parity.short_run import assert_same, short_run
from tests.parity.sides import Sides, random_requests


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("softmax", "fp8_full"),
        ("sigmoid", "bf16"),
        ("sigmoid", "fp8_full"),
        ("direct", "bf16"),
        ("direct", "fp8_full"),
        ("qwen2.5", "fp8_full"),
        ("delta", "fp8_full"),
        ("grouped delta", "bf16"),
        ("heads of 96, a window", "fp8_full"),
    ],
)
def test_answers_and_log_probs_keep_their_bits(model: str, precision: str) -> None:
    draw = random.Random(f"{model} {precision}")
    sides = Sides(MODELS[model], precision)
    asked = random_requests(draw, sides.spec, 2, prompts=(1, 30), answers=(14, 18), siblings=(2, 2), temperature=0.9)
    answers, drafts = assert_drafts_change_nothing(sides, asked, page_size=16, max_batch=20)
    assert 15 < drafts.accepted < drafts.drafted
    theirs, ours = sides.logprobs(asked, answers)
    assert theirs.equal(ours)


def test_a_run_with_speculation_is_the_run_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, log-probs, metrics and weights of two steps, whose drafts come from n-grams of one and two tokens."""
    proposed: list[int] = []
    propose = NGramDrafts.propose

    def counted(self: NGramDrafts, sequence: RunningSequence, most: int) -> Sequence[int]:
        drafts = propose(self, sequence, most)
        proposed.append(len(drafts))
        return drafts

    monkeypatch.setattr(NGramDrafts, "propose", counted)
    with_drafts = SpeculationConfig(name="ngram", ngrams=(2, 1), min_gain=0.0)
    plain, speculative = (
        short_run(TINY["qwen3"], "fp8_full", "cpu", 2, answers=10, speculation=speculation)
        for speculation in (None, with_drafts)
    )
    assert_same(plain, speculative)
    assert sum(proposed) > 20

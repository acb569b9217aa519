"""Speculation over mixtures of experts, latent attention and windows: the same answers, and the trainer's log-probs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from octetrl.config.blocks import LayerBlocks
from octetrl.config.speculation import SpeculationConfig
from octetrl.engine.ngram_drafts import NGramDrafts
from octetrl.engine.request import RunningSequence
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import MixtureLayout, Routing
from octetrl.models.families import DENSE
from tests.parity.shapes import TINY
from tests.parity.short_run import assert_same, short_run
from tests.parity.sides import Sides, random_requests

MIXTURE = MixtureLayout(Routing(6, 2, "softmax", True), 48)
LATENT = LatentAttentionLayout(32, 0, 24, 8, 16)
WIDE = replace(TINY["qwen3"], qk_norm=False, num_kv_heads=4, head_size=32)
MODELS = {
    "mixture": replace(TINY["qwen3"], blocks=(*DENSE, LayerBlocks(DENSE[0].attention, MIXTURE))),
    "latent": replace(WIDE, blocks=(LayerBlocks(LATENT, MLPLayout()), LayerBlocks(LATENT, MIXTURE))),
    "bias": TINY["qwen2.5"],
}


class Mixed:
    """Each draft is the right token with probability 0.7, else a random one."""

    def __init__(self, answers: dict[tuple[str, int], tuple[int, ...]], vocab_size: int) -> None:
        self._answers, self._vocab_size, self._draw = answers, vocab_size, random.Random(0)
        self._known: dict[tuple[str, int], int] = {}

    def extend(self, sequence: RunningSequence, token_ids: Sequence[int]) -> None:
        name = (sequence.group.request.id, sequence.sibling)
        self._known[name] = self._known.get(name, 0) + len(token_ids)

    def propose(self, sequence: RunningSequence, most: int) -> Sequence[int]:
        name = (sequence.group.request.id, sequence.sibling)
        right = self._answers[name][self._known[name] :][:most]
        return [token if self._draw.random() < 0.7 else self._draw.randrange(self._vocab_size) for token in right]

    def end(self, sequence: RunningSequence) -> None: ...

    def reset(self) -> None:
        self._known.clear()


CASES = [("mixture", "bf16"), ("mixture", "fp8_full"), ("latent", "bf16"), ("latent", "fp8_full"), ("bias", "fp8_full")]


@pytest.mark.parametrize(("model", "precision"), CASES)
def test_answers_and_log_probs_keep_their_bits(model: str, precision: str) -> None:
    draw = random.Random(f"{model} {precision}")
    sides = Sides(MODELS[model], precision)
    asked = random_requests(draw, sides.spec, 2, prompts=(1, 30), answers=(14, 18), siblings=(2, 2), temperature=0.9)
    plain = sides.engine(page_size=16)
    expected = plain.generate(asked)
    answers = {
        (one.id, sibling): answer.token_ids
        for one, siblings in zip(asked, expected, strict=True)
        for sibling, answer in enumerate(siblings)
    }
    settings = SpeculationConfig(name="ngram", min_gain=0.0)
    engine = sides.engine(page_size=16, max_batch=20, speculation=settings)
    engine.draft_source = Mixed(answers, sides.spec.vocab_size)
    drawn = engine.generate(asked)
    assert drawn == expected
    assert plain.metrics is not None and engine.metrics is not None and engine.metrics.drafts is not None
    assert engine.metrics.drafts.accepted > 15 and engine.metrics.drafts.accepted < engine.metrics.drafts.drafted
    assert engine.metrics.kv_saturation == plain.metrics.kv_saturation
    theirs, ours = sides.logprobs(asked, drawn)
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

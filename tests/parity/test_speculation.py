"""Speculation over mixtures of experts, latent attention and windows: the same answers, and the trainer's log-probs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from octetrl.config.schema import SpeculationConfig
from octetrl.engine.ngram_drafts import NGramDrafts
from octetrl.engine.request import RunningSequence
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import MixtureLayout, Routing
from octetrl.models.families import DENSE
from octetrl.shapes.blocks import LayerBlocks
from tests.parity.drafted import assert_drafts_change_nothing
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


CASES = [("mixture", "bf16"), ("mixture", "fp8_full"), ("latent", "bf16"), ("latent", "fp8_full"), ("bias", "fp8_full")]


@pytest.mark.parametrize(("model", "precision"), CASES)
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

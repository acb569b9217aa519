"""Speculation on a Hopper GPU: captured graphs, fused kernels and the decode kernel keep every bit of an answer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from octetrl.engine import speculation
from tests.parity.drafted import assert_drafts_change_nothing
from tests.parity.shapes import FULL
from tests.parity.sides import PRECISIONS, Sides, random_requests

pytestmark = pytest.mark.gpu
ENGINE = {"kv_cache_tokens": 1 << 15, "max_batch": 128}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_answers_and_log_probs_keep_their_bits(family: str, precision: str) -> None:
    draw = random.Random(f"{family} {precision}")
    sides = Sides(FULL[family], precision, "cuda")
    asked = random_requests(draw, sides.spec, 4, prompts=(1, 1500), answers=(60, 120), siblings=(2, 2), temperature=0.9)
    answers, drafts = assert_drafts_change_nothing(sides, asked, **ENGINE)
    assert 100 < drafts.accepted < drafts.drafted
    theirs, ours = sides.logprobs(asked, answers)
    assert theirs.equal(ours)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_draft_that_is_not_finite_spoils_nothing(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its V lies in the same tile of keys as that of the rows before it, whose probabilities for it are 0."""
    monkeypatch.setattr(speculation, "PAUSE", 2)
    draw = random.Random(precision)
    sides = Sides(replace(FULL["qwen3"], tied_embeddings=False), precision, "cuda")
    poison = sides.spec.vocab_size - 1
    with torch.no_grad():
        sides.engine_model.embedding.weight[poison] = float("nan")
    asked = [
        replace(one, sampling=replace(one.sampling, stop_token_ids=(poison,)))
        for one in random_requests(draw, sides.spec, 4, prompts=(1, 300), answers=(60, 90), temperature=0.9)
        if poison not in one.prompt_token_ids
    ]
    _, drafts = assert_drafts_change_nothing(sides, asked, poison=poison, **ENGINE)
    assert drafts.accepted > 0

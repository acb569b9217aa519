"""Families that transformers' modules compute, on a GPU: equal bits of the packed forward, prefill and decode, at a
width where torch's own norms depend on the number of rows, and equal log-probs of the engine and the trainer."""

from __future__ import annotations

import random

import pytest
import torch

from octetrl.fp8.parity import PROVEN
from octetrl.models.families import spec_from_config
from tests.parity.sides import Sides, random_requests
from tests.parity.test_transformers import check_forwards
from tests.transformers_families import config_of

pytestmark = pytest.mark.gpu
SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 1152,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "sliding_window": 128,
}


@pytest.mark.parametrize("precision", ["bf16", "fp8_full", "fp8_dynamic"])
@pytest.mark.parametrize("family", PROVEN)
def test_both_sides_have_equal_bits(family: str, precision: str) -> None:
    own = {"num_attention_heads": 9, "num_key_value_heads": 3} if family == "cohere" else {}  # it divides by them
    spec = spec_from_config(config_of(family, **SHAPE | own), implementation="transformers")
    sides, draw = Sides(spec, precision, "cuda"), random.Random(family)
    check_forwards(sides, [draw.randint(2, 30), draw.randint(900, 1000), 1, 300], (1, 7, 64, 256), 64)
    asked = random_requests(draw, spec, 3, prompts=(10, 300), answers=(14, 60), siblings=(1, 4), temperature=0.9)
    of_engine, of_trainer = sides.logprobs(asked, sides.engine(kv_cache_tokens=1 << 14).generate(asked))
    assert len(of_engine) > 40 and torch.equal(of_engine, of_trainer)

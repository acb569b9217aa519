"""Unusual shapes: trainer, prefill and decode agree to the bit, and so do the log-probs of engine and trainer.

Chunks of keys have one tile here, so that windows leave whole chunks out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from octetrl.kernels.attention import attention_reference
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.rope import LinearScaling, YarnScaling
from octetrl.shapes.spec import ModelSpec
from tests.parity.shapes import TINY
from tests.parity.sides import Pages, Sides, random_chunks, random_requests, random_sequences
from tests.parity.situations import IN_THE_ENGINE, check_trainer, in_the_trainer


def layer(window: int | None) -> LayerBlocks:
    return LayerBlocks(AttentionLayout(window), MLPLayout())


LLAMA = replace(TINY["llama"], hidden_size=144, intermediate_size=176, num_kv_heads=2)
SHAPES: dict[str, ModelSpec] = {
    "heads of 80, YaRN, biases": replace(
        LLAMA, head_size=80, rope_scaling=YarnScaling(4.0, 80, mscale=1.0), qkv_bias=True, o_bias=True
    ),
    "heads of 96, a window": replace(LLAMA, head_size=96, blocks=(layer(40),), rope_scaling=LinearScaling(2.0)),
    "heads of 192, windows by layer": replace(TINY["qwen3"], head_size=192, blocks=(layer(130), layer(None))),
}
MODELS = pytest.mark.parametrize(
    ("shape", "precision"),
    [
        ("heads of 80, YaRN, biases", "bf16"),
        ("heads of 80, YaRN, biases", "fp8"),
        ("heads of 96, a window", "bf16"),
        ("heads of 96, a window", "fp8_full"),
        ("heads of 192, windows by layer", "fp8_full"),
    ],
)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention_reference, "KV_CHUNK", 128)
    yield


@lru_cache
def sides_of(shape: str, precision: str) -> Sides:
    return Sides(SHAPES[shape], precision)


@MODELS
def test_packed_prefill_and_decode_have_equal_bits(shape: str, precision: str) -> None:
    sides, draw = sides_of(shape, precision), random.Random(1)
    lengths = [280, 1, 129, 40]
    sequences = random_sequences(draw, sides.spec, lengths)
    expected = sides.packed(sequences)
    whole = [[(index, 0, length) for index, length in enumerate(lengths)]]
    chunks = list(random_chunks(draw, lengths, (1, 16, 64, 130)))
    for page_size, plan in ((128, whole), (16, chunks)):
        for ours, theirs in zip(Pages(sides, sequences, page_size).filled(plan), expected, strict=True):
            assert torch.equal(ours, theirs)
    prompts = [max(0, length - 3) for length in lengths]
    plan = [[(index, 0, prompt) for index, prompt in enumerate(prompts) if prompt]]
    for step in range(3):
        at = [prompt + step for prompt in prompts]
        plan.append([(index, at[index], at[index] + 1) for index, length in enumerate(lengths) if at[index] < length])
    for ours, theirs in zip(Pages(sides, sequences, 32).filled(plan), expected, strict=True):
        assert torch.equal(ours, theirs)


@MODELS
def test_log_probs_of_engine_and_trainer_are_equal(shape: str, precision: str) -> None:
    sides, draw = sides_of(shape, precision), random.Random(2)
    asked = random_requests(draw, sides.spec, 1, prompts=(30, 40), answers=(16, 20), siblings=(2, 2))
    asked += random_requests(draw, sides.spec, 1, prompts=(140, 150), answers=(6, 8))
    answers = sides.engine().generate(asked)
    for name in ("small_chunks", "prefix_hit"):
        assert IN_THE_ENGINE[name](sides.engine, asked) == answers, name
    check_trainer(sides, asked, answers, **in_the_trainer(160)["one sequence a micro-batch"])

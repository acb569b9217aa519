"""Families that transformers' modules compute: the packed forward, prefill and decode have equal bits in any company,
and the engine's log-probs are the trainer's. docs/models.md promises it for these families. The same is asked of a GPU
in tests/gpu/test_transformers.py."""

from __future__ import annotations

import random

import pytest
import torch

from octetrl.config.schema import LoraConfig
from octetrl.fp8.parity import PROVEN
from octetrl.models.families import spec_from_config
from tests.parity.sides import Pages, Sides, random_chunks, random_requests, random_sequences
from tests.parity.situations import IN_THE_ENGINE, check_trainer, in_the_trainer
from tests.transformers_families import config_of


def sides_of(family: str, precision: str, lora: LoraConfig | None = None) -> Sides:
    return Sides(spec_from_config(config_of(family), implementation="transformers"), precision, lora=lora)


def check_forwards(sides: Sides, lengths: list[int], chunks: tuple[int, ...], page_size: int) -> None:
    """Equal bits of packed forward, prefill and decode; the second sequence is the longest."""
    draw = random.Random(1)
    sequences = random_sequences(draw, sides.spec, lengths)
    together = sides.packed(sequences)
    for index in (1, 2):
        assert torch.equal(sides.packed([sequences[index]], "none")[0], together[index]), "alone, nothing run again"
    pages = Pages(sides, sequences, page_size)
    for ours, theirs in zip(pages.filled(list(random_chunks(draw, lengths, chunks))), together, strict=True):
        assert torch.equal(ours, theirs), "the packed forward is prefill"
    for index, at in ((1, lengths[1] - 1), (0, 1)):
        alone = pages.forward([(index, at, at + 1)])[0]
        in_company = pages.forward([(2, 0, 1), (index, at, at + 1)], idle=30)[1]
        assert torch.equal(alone[0], together[index][at]) and torch.equal(in_company, alone), "decode"


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
@pytest.mark.parametrize("family", PROVEN)
def test_packed_prefill_and_decode_have_equal_bits(family: str, precision: str) -> None:
    draw = random.Random(family)
    lengths = [draw.randint(2, 30), draw.randint(120, 140), 1]
    check_forwards(sides_of(family, precision), lengths, (1, 7, 64), 16)


@pytest.mark.parametrize(
    ("family", "precision", "lora"),
    [
        ("exaone4", "fp8_dynamic", None),
        ("olmo3", "fp8_full", LoraConfig(rank=4, alpha=9.0, targets=("q_proj", "down_proj"))),
    ],
)
def test_what_happens_to_either_side_changes_nothing(family: str, precision: str, lora: LoraConfig | None) -> None:
    sides, draw = sides_of(family, precision, lora), random.Random(1)
    asked = random_requests(draw, sides.spec, 1, prompts=(10, 12), answers=(14, 14), siblings=(3, 3), temperature=0.9)
    asked += random_requests(draw, sides.spec, 1, prompts=(60, 100), answers=(6, 8), temperature=0.9)
    answers = sides.engine().generate(asked)
    for name in ("one_by_one", "next_turn"):
        assert IN_THE_ENGINE[name](sides.engine, asked) == answers, name
    for name in ("layers run again",):
        check_trainer(sides, asked, answers, **in_the_trainer(150)[name])

"""Parity by transitivity, layer by layer of the proof: the trainer's packed forward has the hidden states of prefill,
prefill has those of decode, and decode has its own in any company. Lengths, cuts and batches are drawn at random.

Here on a CPU, whose references keep the kernels' order of rounding; tests/gpu/test_parity.py asks it of the kernels.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity.shapes import TINY
from tests.parity.sides import PRECISIONS, Pages, Sides, random_chunks, random_sequences

MODELS = pytest.mark.parametrize(
    ("family", "precision"), [(family, precision) for family in TINY for precision in PRECISIONS]
)
_MADE: dict[tuple[str, str], Sides] = {}


def sides_of(family: str, precision: str) -> Sides:
    if (family, precision) not in _MADE:
        _MADE[family, precision] = Sides(TINY[family], precision)
    return _MADE[family, precision]


def some_lengths(draw: random.Random) -> list[int]:
    """Short ones, and one at each border of attention's tile of 128 keys."""
    return [draw.randint(2, 60), draw.choice([127, 128, 129]), draw.randint(130, 300), 1, draw.randint(2, 20)]


@MODELS
def test_the_packed_forward_is_the_same_in_any_packing(family: str, precision: str) -> None:
    sides, draw = sides_of(family, precision), random.Random(1)
    sequences = random_sequences(draw, sides.spec, some_lengths(draw))
    together = sides.packed(sequences)
    for checkpointing in ("none", "attention"):
        for ours, other in zip(sides.packed(sequences, checkpointing), together, strict=True):
            assert torch.equal(ours, other)
    order = draw.sample(range(len(sequences)), len(sequences))
    for index, ours in zip(order, sides.packed([sequences[index] for index in order]), strict=True):
        assert torch.equal(ours, together[index])
    for index in (0, 3):
        assert torch.equal(sides.packed([sequences[index]])[0], together[index])


@MODELS
def test_the_packed_forward_is_prefill(family: str, precision: str) -> None:
    sides, draw = sides_of(family, precision), random.Random(2)
    sequences = random_sequences(draw, sides.spec, some_lengths(draw))
    lengths = [len(sequence) for sequence in sequences]
    expected = sides.packed(sequences)
    whole = [[(index, 0, length) for index, length in enumerate(lengths)]]
    for page_size, plan in ((128, whole), (16, list(random_chunks(draw, lengths, (1, 7, 16, 64, 130))))):
        for ours, theirs in zip(Pages(sides, sequences, page_size).filled(plan), expected, strict=True):
            assert torch.equal(ours, theirs)


@MODELS
def test_prefill_is_decode(family: str, precision: str) -> None:
    sides, draw = sides_of(family, precision), random.Random(3)
    sequences = random_sequences(draw, sides.spec, some_lengths(draw))
    lengths = [len(sequence) for sequence in sequences]
    prefilled = Pages(sides, sequences, 128).filled([[(index, 0, length) for index, length in enumerate(lengths)]])
    prompts = [max(0, length - 6) for length in lengths]
    plan = [[(index, 0, prompt) for index, prompt in enumerate(prompts) if prompt]]
    for step in range(6):
        at = [prompt + step for prompt in prompts]
        plan.append([(index, at[index], at[index] + 1) for index, length in enumerate(lengths) if at[index] < length])
    for ours, theirs in zip(Pages(sides, sequences, 32).filled(plan), prefilled, strict=True):
        assert torch.equal(ours, theirs)


@MODELS
def test_decode_is_decode_in_other_company(family: str, precision: str) -> None:
    sides, draw = sides_of(family, precision), random.Random(4)
    sequences = random_sequences(draw, sides.spec, some_lengths(draw))
    pages = Pages(sides, sequences, 128, seed=1)
    whole = [[(index, 0, len(sequence)) for index, sequence in enumerate(sequences)]]
    prefilled = pages.filled(whole)
    pieces = [(index, at, at + 1) for index, s in enumerate(sequences) for at in draw.sample(range(len(s)), 1)]
    together = pages.forward(pieces)
    for (index, at, _), ours in zip(pieces, together, strict=True):
        assert torch.equal(ours[0], prefilled[index][at])
    other = Pages(sides, sequences, 16, seed=2)
    other.filled(whole)
    for piece, ours in zip(pieces, together, strict=True):
        assert torch.equal(pages.forward([piece])[0], ours)
        assert torch.equal(other.forward([piece, pieces[0]], idle=3)[0], ours)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 30),
    page_size=st.sampled_from([16, 32, 64, 128]),
    largest=st.integers(1, 140),
    model=st.sampled_from(
        [("llama", "fp8_full"), ("qwen2.5", "fp8_full"), ("qwen3", "fp8_dynamic"), ("qwen3", "bf16")]
    ),
)
def test_any_plan_of_pieces_has_the_packed_forwards_bits(
    lengths: list[int], seed: int, page_size: int, largest: int, model: tuple[str, str]
) -> None:
    sides, draw = sides_of(*model), random.Random(seed)
    sequences = random_sequences(draw, sides.spec, lengths)
    ours = Pages(sides, sequences, page_size, seed).filled(
        list(random_chunks(draw, lengths, (largest, 1 + largest // 3)))
    )
    for mine, theirs in zip(ours, sides.packed(sequences), strict=True):
        assert torch.equal(mine, theirs)

"""Parity by transitivity, layer by layer of the proof: the trainer's packed forward has the hidden states of prefill,
prefill has those of decode, and decode has its own in any company. Lengths, cuts and batches are drawn at random.

Here on a CPU, whose references keep the kernels' order of rounding; tests/gpu/test_parity.py asks it of the kernels.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.kernels.attention import attention_reference
from tests.parity.shapes import DELTA, LATENT, MODELS, TINY, UNUSUAL
from tests.parity.sides import PRECISIONS, Pages, Sides, random_chunks, random_sequences

CASES = [
    *(("qwen3", precision) for precision in PRECISIONS),
    *((family, precision) for family in ("llama", "qwen2.5") for precision in ("bf16", "fp8_full", "fp8_int8")),
    ("llama", "fp8"),
    ("qwen2.5", "fp8_dynamic"),
    *(("delta", precision) for precision in ("bf16", "fp8", "fp8_full")),
    ("grouped delta", "fp8_full"),
    *((shape, "fp8_full") for shape in UNUSUAL),
    ("heads of 80, YaRN, biases", "fp8"),
    ("heads of 96, a window", "bf16"),
]


@pytest.mark.parametrize(("model", "precision"), CASES)
def test_packed_prefill_and_decode_have_equal_bits(model: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences, and one at each border of attention's tile of 128 keys. Unusual shapes: chunks of keys have one
    tile, so that windows leave whole chunks out."""
    if model in UNUSUAL:
        monkeypatch.setattr(attention_reference, "KV_CHUNK", 128)
    sides, draw = Sides(MODELS[model], precision), random.Random(1)
    lengths = [draw.randint(2, 60), draw.choice([127, 128, 129]), draw.randint(130, 300), 1, draw.randint(2, 20)]
    sequences = random_sequences(draw, sides.spec, lengths)
    together = sides.packed(sequences)

    for checkpointing in ("none", "attention"):
        for ours, other in zip(sides.packed(sequences, checkpointing), together, strict=True):
            assert torch.equal(ours, other), checkpointing
    order = draw.sample(range(len(sequences)), len(sequences))
    for index, ours in zip(order, sides.packed([sequences[index] for index in order]), strict=True):
        assert torch.equal(ours, together[index]), "in any packing"
    for index in (0, 3):
        assert torch.equal(sides.packed([sequences[index]])[0], together[index])

    whole = [[(index, 0, length) for index, length in enumerate(lengths)]]
    chunks = list(random_chunks(draw, lengths, (1, 7, 16, 64, 130)))
    prompts = [max(0, length - 6) for length in lengths]
    decoded = [[(index, 0, prompt) for index, prompt in enumerate(prompts) if prompt]]
    for step in range(6):
        at = [prompt + step for prompt in prompts]
        decoded.append([(index, at[index], at[index] + 1) for index, size in enumerate(lengths) if at[index] < size])
    pages, other = Pages(sides, sequences, 128, seed=1), Pages(sides, sequences, 16, seed=2)
    for held, plan in ((pages, whole), (other, chunks), (Pages(sides, sequences, 32), decoded)):
        for ours, theirs in zip(held.filled(plan), together, strict=True):
            assert torch.equal(ours, theirs), "the packed forward is prefill is decode"

    if model in DELTA:
        return  # a state is that of the last token, so no earlier one is computed again
    pieces = [(index, at, at + 1) for index, s in enumerate(sequences) for at in draw.sample(range(len(s)), 1)]
    for (index, at, end), ours in zip(pieces, pages.forward(pieces), strict=True):
        assert torch.equal(ours[0], together[index][at])
        assert torch.equal(pages.forward([(index, at, end)])[0], ours), "decode is decode in other company"
        assert torch.equal(other.forward([(index, at, end), pieces[0]], idle=3)[0], ours)


@pytest.mark.parametrize("precision", ["fp8", "fp8_full"])
def test_latents_over_more_than_a_chunk_of_keys(precision: str) -> None:
    """Of 1,024, which training, prefill and decode merge in the same order."""
    spec = replace(LATENT["low_rank"], max_positions=1_200, num_layers=1)
    sides = Sides(spec, precision)
    sequences = random_sequences(random.Random(1), spec, [1_060, 65])
    pieces = [[(0, 0, 700), (1, 0, 63)], [(0, 700, 1_050), (1, 63, 64)], [(1, 64, 65)]]
    pieces += [[(0, at, at + 1)] for at in range(1_050, 1_060)]
    for paged, packed in zip(Pages(sides, sequences, 32).filled(pieces), sides.packed(sequences), strict=True):
        assert torch.equal(paged, packed)


@cache
def sides_of(family: str, precision: str) -> Sides:
    return Sides(TINY[family], precision)


@settings(max_examples=10)
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

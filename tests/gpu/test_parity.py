"""Parity on a Hopper GPU, asked of the product's kernels at the published widths and 8,192 tokens: the trainer's packed
forward is prefill, prefill is decode, decode is decode in another batch; the trainer's log-probs are the engine's
whatever happens to either; and a run repeats its bits. The same is asked of the references in tests/parity.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from octetrl.shapes.spec import ModelSpec
from tests.parity.shapes import CONTEXT, FULL, TINY
from tests.parity.short_run import assert_equal_in_every_step, assert_learned, assert_same, short_run
from tests.parity.sides import (
    ONE_TENSOR,
    PRECISIONS,
    Pages,
    Sides,
    random_chunks,
    random_requests,
    random_sequences,
    random_tokens,
)
from tests.parity.situations import check_situations, check_trainer

pytestmark = pytest.mark.gpu

ALL = [(family, precision) for family in FULL for precision in PRECISIONS]
ALL += [("qwen3", precision) for precision in ONE_TENSOR]
SMALL = {  # wide enough for FP8's blocks to differ, small enough for many steps
    family: replace(
        spec, hidden_size=512, intermediate_size=1152, num_heads=8, num_kv_heads=2, head_size=64, vocab_size=4096
    )
    for family, spec in TINY.items()
}


@pytest.fixture(scope="module", params=ALL, ids="-".join)
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    """Two layers of a family's published width, calibrated on a long prompt."""
    family, precision = request.param
    made = _sides(FULL[family], precision)
    yield made
    del made
    torch.cuda.empty_cache()


def _sides(spec: ModelSpec, precision: str) -> Sides:
    prompts = [random_tokens(random.Random(0), spec, 1000)]
    return Sides(spec, precision, "cuda", calibrate_on=prompts)


def _some_lengths(draw: random.Random) -> list[int]:
    """The longest, the shortest, the borders of a tile of keys, and one anywhere."""
    return [CONTEXT, 1, 127, draw.choice([128, 129, 256, 257]), draw.randint(2, 4000)]


def test_the_packed_forward_is_prefill(sides: Sides) -> None:
    draw = random.Random(1)
    sequences = random_sequences(draw, sides.spec, _some_lengths(draw))
    lengths = [len(sequence) for sequence in sequences]
    expected = sides.packed(sequences)
    for index in (2, 4):
        assert torch.equal(sides.packed([sequences[index]], "none")[0], expected[index])
    plans = {
        128: [[(index, 0, length) for index, length in enumerate(lengths)]],
        64: list(random_chunks(draw, lengths, (1, 16, 100, 777, 2048))),
    }
    for page_size, plan in plans.items():
        for ours, theirs in zip(Pages(sides, sequences, page_size).filled(plan), expected, strict=True):
            assert torch.equal(ours, theirs), f"pages of {page_size}, {len(theirs)} tokens"


def test_prefill_is_decode_and_decode_is_decode_in_any_company(sides: Sides) -> None:
    """Tokens anywhere in the sequences, each written and read again as a decode forward does."""
    draw = random.Random(2)
    sequences = random_sequences(draw, sides.spec, _some_lengths(draw))
    pages = Pages(sides, sequences, 128)
    prefilled = pages.filled([[(index, 0, len(sequence)) for index, sequence in enumerate(sequences)]])
    places = [(index, at) for index, s in enumerate(sequences) for at in draw.sample(range(len(s)), min(len(s), 40))]
    places = [(0, CONTEXT - 1), *draw.sample(places, len(places))]
    sizes = (1, 33) if sides.policy.mx else (1, 2, 7, 16, 33, 100, len(places))  # MXFP8 is emulated, by minutes
    for size in sizes:
        pieces = [(index, at, at + 1) for index, at in places[:size]]
        for (index, at, _), ours in zip(pieces, pages.forward(pieces, idle=size % 3), strict=True):
            assert torch.equal(ours[0], prefilled[index][at]), f"one of {size}: sequence {index}, token {at}"


def test_log_probs_are_the_trainers_up_to_8k_tokens(sides: Sides) -> None:
    """Prompts and answers to the end of the context, in batches that shrink through the graphs' sizes."""
    draw = random.Random(3)
    asked = [
        *random_requests(draw, sides.spec, 1, prompts=(7900, 7900), answers=(CONTEXT - 7900, CONTEXT - 7900)),
        *random_requests(draw, sides.spec, 3, prompts=(1, 700), answers=(200, 400), siblings=(1, 6)),
    ]
    answers = sides.engine(kv_cache_tokens=1 << 17).generate(asked)
    for tokens in (CONTEXT, 4 * CONTEXT):
        check_trainer(sides, asked, answers, tokens_per_micro_batch=tokens)


@pytest.mark.parametrize(
    ("family", "precision"), [("qwen3", "bf16"), ("qwen3", "fp8_full"), ("qwen2.5", "fp8_full"), ("llama", "fp8_full")]
)
def test_what_happens_in_engine_and_trainer_changes_nothing(family: str, precision: str) -> None:
    sides, draw = _sides(FULL[family], precision), random.Random(4)
    sampling = {"temperature": 0.9}
    asked = random_requests(draw, sides.spec, 1, prompts=(1, 10), answers=(120, 130), siblings=(8, 8), **sampling)
    asked += random_requests(draw, sides.spec, 3, prompts=(1, 250), answers=(20, 60), **sampling)
    asked += random_requests(draw, sides.spec, 1, prompts=(120, 126), answers=(18, 20), **sampling)
    check_situations(sides, asked, context_length=512)


def test_a_whole_context_decoded_token_by_token() -> None:
    sides = _sides(FULL["qwen3"], "fp8_full")
    asked = random_requests(random.Random(5), sides.spec, 1, prompts=(2, 2), answers=(CONTEXT - 2, CONTEXT - 2))
    answers = sides.engine(kv_cache_tokens=1 << 16).generate(asked)
    check_trainer(sides, asked, answers)


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        *(("qwen3", precision) for precision in ("bf16", "fp8_full", "fp8_full_k", "fp8_full_v", "fp8_int8_k")),
        ("qwen2.5", "fp8_full"),
    ],
)
def test_twenty_steps_repeat_their_bits_and_no_step_has_a_mismatch(family: str, precision: str) -> None:
    config = {"activation_checkpointing": "layer", "tokens_per_micro_batch": 1024}
    runs = [short_run(SMALL[family], precision, "cuda", 20, **config) for _ in range(2)]
    assert_equal_in_every_step(runs[0])
    assert_same(*runs)
    assert_learned(runs[0])


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
@pytest.mark.parametrize(
    "widths",
    [{"intermediate_size": 4000}, {"hidden_size": 576, "num_heads": 9, "num_kv_heads": 3, "intermediate_size": 1536}],
    ids=["intermediate 4000", "hidden 576"],
)
@pytest.mark.parametrize("checkpointing", ["none", "layer"])
def test_widths_that_are_no_multiple_of_128(widths: dict[str, int], precision: str, checkpointing: str) -> None:
    spec = replace(SMALL["qwen3"], **widths)
    config = {"activation_checkpointing": checkpointing, "tokens_per_micro_batch": 1024}
    assert_equal_in_every_step(short_run(spec, precision, "cuda", 3, **config))


def test_codes_made_anew_in_training_are_the_engines() -> None:
    config = {"activation_checkpointing": "layer", "tokens_per_micro_batch": 1024, "minibatches": 2, "releases": True}
    kept, remade = (
        short_run(SMALL["qwen3"], "fp8_full", "cuda", 5, weight_codes=weight_codes, **config)
        for weight_codes in ("kept", "remade")
    )
    assert_equal_in_every_step(remade)
    assert_same(kept, remade)

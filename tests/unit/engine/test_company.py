"""A request gets the same tokens and log-probs, bit for bit, in any batch; and they are the trainer's."""

from __future__ import annotations

import pytest
import torch

from octetrl.layers.context import PackedContext
from octetrl.records import Completion, GenerationRequest
from tests.unit.engine.tiny_engine import PRECISIONS, SCALES, policy_of, request, tiny_engine, tiny_model

ASKED = [
    request("drawn", prompt_length=21, num_siblings=2, seed=1, max_new_tokens=8),
    request("short", prompt_length=1, num_siblings=2, seed=2, max_new_tokens=6, top_k=20, top_p=0.9),
    request("greedy", prompt_length=33, seed=3, max_new_tokens=4, temperature=0.0),
    request("cool", prompt_length=16, num_siblings=3, seed=4, max_new_tokens=8, temperature=0.7, min_p=0.02),
]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_company_changes_nothing(precision: str) -> None:
    expected = tiny_engine(precision).generate(ASKED)
    crowded = tiny_engine(precision, page_size=16, prefill_chunk=16, max_batch=3)
    order = [2, 0, 3, 1]
    assert crowded.generate([ASKED[n] for n in order]) == [expected[n] for n in order]
    assert tiny_engine(precision, page_size=32).generate(ASKED[:1]) == expected[:1]


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_preemption_changes_nothing(precision: str) -> None:
    asked = [request(str(seed), num_siblings=1, seed=seed, max_new_tokens=26, ignore_eos=True) for seed in range(2)]
    roomy, tight = (tiny_engine(precision, page_size=16, kv_cache_tokens=tokens) for tokens in (160, 80))
    expected = roomy.generate(asked)
    assert tight.generate(asked) == expected
    assert roomy.metrics is not None and roomy.metrics.preemptions == 0
    assert tight.metrics is not None and tight.metrics.preemptions == 1
    assert tight.metrics.prefilled_tokens > roomy.metrics.prefilled_tokens


def trainer_logprobs(precision: str, asked: GenerationRequest, answers: list[Completion]) -> list[torch.Tensor]:
    """All siblings in one packed training forward, with the rollout's cache replayed."""
    sequences = [asked.prompt_token_ids + answer.token_ids for answer in answers]
    lengths = [len(sequence) for sequence in sequences]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    kv_mode = policy_of(precision).kv_mode
    calibrated = kv_mode == "calibrated"
    context = PackedContext(
        cu_seqlens_B1=starts.int(),
        max_seqlen=max(lengths),
        kv_mode=kv_mode,
        kv_scale_LS=SCALES.scale_LS if calibrated else None,
    )
    tokens_T = torch.tensor([token for sequence in sequences for token in sequence])
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    model = tiny_model(precision, "train")
    hidden_TE = model(tokens_T, positions_T, context)
    temperature = asked.sampling.temperature or 1.0
    logprobs_T, _ = model.logprobs(hidden_TE[:-1], tokens_T[1:], temperature)
    first = len(asked.prompt_token_ids) - 1
    return [
        logprobs_T[start + first : start + length - 1] for start, length in zip(starts.tolist(), lengths, strict=False)
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_log_probs_are_the_trainers_bit_for_bit(precision: str) -> None:
    answers = tiny_engine(precision, page_size=16).generate(ASKED)
    for asked, siblings in zip(ASKED, answers, strict=True):
        for answer, theirs in zip(siblings, trainer_logprobs(precision, asked, siblings), strict=True):
            assert torch.equal(torch.tensor(answer.logprobs), theirs.detach())

"""Masks, penalties and biases on the GPU: they hold, log-probs are the trainer's, and other answers keep their bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octetrl.engine.grammars import Grammars
from octetrl.records import GenerationRequest, LogitOptions, SamplingParams
from tests.gpu.test_engine import ASKED, FP8, SPEC, Bench

pytestmark = pytest.mark.gpu
STRIDE = 3


class EveryThird:
    """A guide that llguidance is not needed for: token ids divisible by STRIDE may follow."""

    failure: str | None = None

    def see(self, token: int) -> None:
        if token % STRIDE:
            self.failure = f"token {token}"

    def mask(self) -> np.ndarray:
        allowed_V = np.arange(-(-SPEC.vocab_size // 32) * 32) % STRIDE == 0
        return np.packbits(allowed_V, bitorder="little").view(np.int32)


@pytest.mark.parametrize("precision", FP8)
def test_options_hold_and_other_answers_keep_their_bits(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grammars, "guide", lambda self, grammar: EveryThird())
    masked = LogitOptions(grammar="every third", frequency_penalty=1.0, logit_bias=((7, 100.0),), num_top=2)
    biased = LogitOptions(logit_bias=((7, 100.0),))
    asked = [
        GenerationRequest(
            str(options),
            tuple(range(7, 207)),
            SamplingParams(24, temperature=0.9, logits=options),
            num_siblings=4,
            seed=5,
        )
        for options in (masked, biased)
    ]
    bench = Bench(precision)
    alone = bench.engine().generate(ASKED)
    found = bench.engine().generate([*asked, *ASKED])
    with_options, others = found[:2], found[2:]
    assert others == alone
    for request, answers in zip(asked, with_options, strict=True):
        for answer, theirs in zip(answers, bench.trainer_logprobs(request, answers), strict=True):
            assert len(answer.token_ids) == 24
            assert torch.equal(torch.tensor(answer.logprobs), theirs), "log-probs are taken before anything is changed"
    for answer in with_options[0]:
        assert not any(token % STRIDE for token in answer.token_ids) and len(set(answer.token_ids)) > 5
    assert {token for answer in with_options[1] for token in answer.token_ids} == {7}

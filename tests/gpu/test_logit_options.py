"""Masks, penalties and biases on the GPU: they hold, log-probs stay the trainer's, and other answers keep their bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octetrl.engine.grammars import Grammars
from octetrl.engine.logit_options import LogitOptions
from octetrl.records import GenerationRequest, SamplingParams
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
    options = LogitOptions(grammar="every third", frequency_penalty=1.0, logit_bias=((6, 100.0),), num_top=2)
    guided = GenerationRequest(
        "guided", tuple(range(7, 207)), SamplingParams(24, temperature=0.9, logits=options), num_siblings=4, seed=5
    )
    bench = Bench(precision)
    alone = bench.engine().generate(ASKED)
    guided_answers, *others = bench.engine().generate([guided, *ASKED])
    assert others == alone
    for answer, theirs in zip(guided_answers, bench.trainer_logprobs(guided, guided_answers), strict=True):
        assert len(answer.token_ids) == 24 and not any(token % STRIDE for token in answer.token_ids)
        assert answer.token_ids[0] == 6, "its bias outweighs all logits of random weights"
        assert torch.equal(torch.tensor(answer.logprobs), theirs), "log-probs are taken before anything is changed"

"""An engine whose drafts are partly right, beside one without drafts, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octetrl.bench.speculation import Answers as TokensByAnswer
from octetrl.bench.speculation import ForcedDrafts
from octetrl.config.speculation import SpeculationConfig
from octetrl.engine.metrics import DraftTally
from octetrl.engine.request import RunningSequence
from octetrl.records import GenerationRequest
from tests.parity.sides import Answers, Sides


class Mixed(ForcedDrafts):
    """Each draft is the right token with probability 0.7, and the last one sometimes `poison`."""

    def __init__(self, answers: TokensByAnswer, vocab_size: int, poison: int | None = None) -> None:
        super().__init__(answers, 0.7, vocab_size)
        self._poison = poison

    def propose(self, sequence: RunningSequence, most: int) -> Sequence[int]:
        drafts = list(super().propose(sequence, most))
        if self._poison is not None and drafts and self._draw.random() < 0.1:
            drafts[-1] = self._poison
        return drafts


def assert_drafts_change_nothing(
    sides: Sides, asked: Sequence[GenerationRequest], *, poison: int | None = None, **config: Any
) -> tuple[Answers, DraftTally]:
    """The answers, and what was drafted for them. `config`: the engine's. `poison`: a token that some drafts are."""
    plain = sides.engine(**config)
    expected = plain.generate(asked)
    answers = {
        (one.id, sibling): answer.token_ids
        for one, siblings in zip(asked, expected, strict=True)
        for sibling, answer in enumerate(siblings)
    }
    settings = SpeculationConfig(name="ngram", max_sequences=64, min_gain=0.0)
    engine = sides.engine(**config, speculation=settings)
    engine.draft_source = Mixed(answers, sides.spec.vocab_size, poison)
    assert engine.generate(asked) == expected
    assert plain.metrics is not None and engine.metrics is not None and engine.metrics.drafts is not None
    assert engine.metrics.non_finite_tokens == 0
    if sides.device.type == "cpu":  # a GPU decodes some tokens past a stop, and counts them
        assert engine.metrics.kv_saturation == plain.metrics.kv_saturation
    return expected, engine.metrics.drafts

"""An engine whose drafts are partly right, beside one without drafts, on any device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from octetrl.config.schema import SpeculationConfig
from octetrl.engine.draft_budget import DraftLosses
from octetrl.engine.metrics import DraftTally
from octetrl.engine.request import RunningSequence
from octetrl.records import GenerationRequest
from tests.parity.sides import Answers, Sides

RATE = 0.7  # at which a draft is right, given that those before it are
TokensByAnswer = dict[tuple[str, int], Sequence[int]]


class Mixed:
    """Each draft is the right token with probability `RATE`, and the last one sometimes `poison`."""

    def __init__(self, answers: TokensByAnswer, vocab_size: int, poison: int | None = None) -> None:
        self._answers, self._vocab_size, self._poison = answers, vocab_size, poison
        self._draw = random.Random(0)
        self._known: dict[tuple[str, int], int] = {}
        self.losses = DraftLosses()

    def extend(self, sequence: RunningSequence, token_ids: Sequence[int]) -> None:
        name = (sequence.group.request.id, sequence.sibling)
        self._known[name] = self._known.get(name, 0) + len(token_ids)

    def propose(self, sequence: RunningSequence, most: int) -> Sequence[int]:
        name = (sequence.group.request.id, sequence.sibling)
        right = self._answers[name][self._known[name] :][:most]
        drafts = [token if self._draw.random() < RATE else (token + 1) % self._vocab_size for token in right]
        if self._poison is not None and drafts and self._draw.random() < 0.1:
            drafts[-1] = self._poison
        return drafts

    def index(self) -> None:
        """Nothing to do: the answers are known."""

    def end(self, sequence: RunningSequence, *, keeps: bool = True) -> None:
        """Nothing to do: the answers are known."""

    def forget(self, request: GenerationRequest) -> None:
        """Nothing to do: the answers are known."""

    def reset(self) -> None:
        self._known.clear()


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

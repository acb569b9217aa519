"""What a served request asks of its logits, besides temperature, top-k, top-p and min-p, and what it gets to know.

    logits -> log-probs (of the sampled tokens, of the likeliest tokens)
    logits -> penalties, biases and masks (row_edits.py) -> sampler

Log-probs are taken before anything is changed, so those of a sampled token are the trainer's, bit for bit, whatever
chose the token. Penalties and masks need the tokens that a sequence has, so the session reads each forward's results
before it launches the next one while such a sequence runs. Other sequences keep their bits. Training has none of this.

Penalties, with `count` occurrences among the sampled tokens (OpenAI's formula; repetition: Keskar et al. 2019,
arXiv:1909.05858, section 4.1, also for tokens of the prompt):

    z = z + bias,   z = z / repetition if z > 0 else z * repetition,   z -= frequency * count + presence * (count > 0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from octetrl.records import LogitOptions, Top


class Guide(Protocol):
    """Follows a grammar through one answer."""

    failure: str | None

    def see(self, token: int) -> None:
        """Takes the next token of the answer."""

    def mask(self) -> np.ndarray:
        """int32 [ceil(V / 32)]: bit v % 32 of entry v // 32 says whether token v may follow."""


@dataclass(slots=True, eq=False)
class SequenceLogits:
    """The options of one sibling, and what they need to know of its tokens."""

    options: LogitOptions
    stop_token_ids: frozenset[int]
    prompt_token_ids: frozenset[int]  # only for a repetition penalty
    guide: Guide | None = None
    counts: Counter[int] = field(default_factory=Counter)  # of its sampled tokens
    num_seen: int = 0
    tops: list[Top] = field(default_factory=list)  # of its sampled tokens

    def see(self, token_ids: Sequence[int]) -> None:
        """Takes its next tokens."""
        self.num_seen += len(token_ids)
        if self.options.presence_penalty or self.options.frequency_penalty or self.options.repetition_penalty != 1.0:
            self.counts.update(token_ids)
        if self.guide is not None:
            for token in token_ids:
                self.guide.see(token)

    @property
    def penalised(self) -> frozenset[int] | set[int]:
        """Ids of the tokens whose logits its penalties change."""
        if self.options.repetition_penalty != 1.0:
            return self.prompt_token_ids | self.counts.keys()
        return set(self.counts)

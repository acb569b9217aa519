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

Top = tuple[tuple[int, float], ...]  # token id and log-prob of the likeliest tokens, likeliest first


@dataclass(frozen=True, slots=True)
class LogitOptions:
    """Options of one request; the defaults change and report nothing.

    Example: LogitOptions(frequency_penalty=0.5, num_top=5)
    """

    min_new_tokens: int = 0  # no stop token is sampled before
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, added to its logit
    grammar: str | None = None  # that the answer must match (grammars.py)
    num_top: int = 0  # number of likeliest tokens reported with each token
    prompt_logprobs: bool = False  # log-probs of the prompt's tokens; the prompt is prefilled even if pages have it

    @property
    def edits(self) -> bool:
        """Whether it changes what is sampled."""
        return bool(
            self.min_new_tokens > 0
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.grammar is not None
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probs of a prompt's tokens without the first, which has none."""

    logprobs: tuple[float, ...]
    tops: tuple[Top, ...]  # empty if not asked for


@dataclass(frozen=True, slots=True)
class EventDetails:
    """What an event has beside its tokens, for a request with options.

    Example: EventDetails(tops=(((31, -0.2), (7, -1.9)),))
    """

    tops: tuple[Top, ...] = ()  # of each of the event's tokens
    prompt: PromptLogprobs | None = None  # with the first event
    failure: str | None = None  # why the grammar could no longer be followed


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

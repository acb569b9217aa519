"""Changes the logits of the rows whose requests ask for it, before sampling, and reports the likeliest tokens.

Rows without such a request keep their bits: the changed rows are copied out, changed and put back into a copy. A
masked entry becomes `MASKED`, not -inf, because the sampler takes a row that is not finite for a broken forward. A row
that was not finite before stays as it was.

B rows of a forward, n changed rows, V vocabulary, K likeliest tokens, E changed entries, W words of a bit mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from octetrl.engine.logit_options import SequenceLogits
from octetrl.engine.pinned import to_device
from octetrl.engine.prompt_scores import likeliest, tops_of
from octetrl.records import Completion, EventDetails, SessionEvent

if TYPE_CHECKING:
    from octetrl.engine.request import RunningSequence
    from octetrl.engine.transcript import Batch, Transcript

MASKED = -1e30  # its exponential is 0 at any temperature


def catch_up(batch: Batch, transcript: Transcript, clock: int) -> None:
    """Gives the batch's sequences with options the tokens that they have. All of them are known."""
    for place, logits in batch.edited:
        sequence = batch.sequences[place]
        token_ids, _ = transcript.since(sequence, logits.num_seen)
        logits.see(token_ids)
        assert sequence.prompt_length + logits.num_seen == sequence.length(clock), "a token is not known yet"


class RowEdits:
    """The changes of one decode forward. `edited`: place in the batch and options of its sequences that have any."""

    def __init__(self, edited: Iterable[tuple[int, SequenceLogits]], device: torch.device) -> None:
        self._device = device
        self._reporting = [(place, one) for place, one in edited if one.options.num_top]
        self._changing = [(place, one) for place, one in edited if one.options.edits]
        self._tops: tuple[Tensor, Tensor] | None = None

    def edited(self, logits_BV: Tensor) -> Tensor:
        """The logits to sample from. Returns `logits_BV` itself if no row changes."""
        if not self._changing:
            return logits_BV
        row_n = self._to_device([place for place, _ in self._changing])
        before_nV = logits_BV[row_n]
        after_nV = before_nV.clone()
        self._penalise(after_nV)
        self._mask(after_nV)
        finite_n1 = before_nV.isfinite().all(dim=1, keepdim=True)
        return logits_BV.index_copy(0, row_n, torch.where(finite_n1, after_nV, before_nV))

    def note_tops(self, logits_BV: Tensor, divisor_B: Tensor) -> None:
        """Computes the likeliest tokens of the rows that report them. `logits_BV`: before any change."""
        if self._reporting:
            row_n = self._to_device([place for place, _ in self._reporting])
            most = max(one.options.num_top for _, one in self._reporting)
            self._tops = likeliest(logits_BV[row_n], divisor_B[row_n], most)

    def deliver(self) -> None:
        """Adds the likeliest tokens to their sequences. Waits for the device."""
        if self._tops is not None:
            tops = tops_of(*self._tops)
            for (_, one), top in zip(self._reporting, tops, strict=True):
                one.tops.append(top[: one.options.num_top])

    def _penalise(self, logits_nV: Tensor) -> None:
        entries: list[tuple[int, int]] = []
        factors: list[tuple[float, float, float]] = []  # bias, repetition penalty, what is subtracted
        for n, (_, one) in enumerate(self._changing):
            options, bias = one.options, dict(one.options.logit_bias)
            penalised = one.penalised
            for token in sorted(penalised | bias.keys()):
                count = one.counts[token]
                less = options.frequency_penalty * count + options.presence_penalty * (count > 0)
                repetition = options.repetition_penalty if token in penalised else 1.0
                entries.append((n, token))
                factors.append((bias.get(token, 0.0), repetition, less))
        if entries:
            row_E, token_E = to_device(np.array(entries, dtype=np.int64).T, self._device).unbind()
            bias_E, repetition_E, less_E = to_device(np.array(factors, dtype=np.float32).T, self._device).unbind()
            z_E = logits_nV[row_E, token_E] + bias_E
            z_E = torch.where(z_E > 0, z_E / repetition_E, z_E * repetition_E) - less_E
            logits_nV[row_E, token_E] = z_E

    def _mask(self, logits_nV: Tensor) -> None:
        banned = [
            (n, token)
            for n, (_, one) in enumerate(self._changing)
            if one.num_seen < one.options.min_new_tokens
            for token in sorted(one.stop_token_ids)
        ]
        if banned:
            row_E, token_E = to_device(np.array(banned, dtype=np.int64).T, self._device).unbind()
            logits_nV[row_E, token_E] = MASKED
        guided = [(n, one.guide) for n, (_, one) in enumerate(self._changing) if one.guide is not None]
        if guided:
            words_gW = to_device(np.stack([guide.mask() for _, guide in guided]), self._device)
            bit_32 = torch.arange(32, dtype=torch.int32, device=self._device)
            allowed_gV = ((words_gW[:, :, None] >> bit_32) & 1).flatten(1)[:, : logits_nV.shape[1]].bool()
            row_g = self._to_device([n for n, _ in guided])
            logits_nV[row_g] = logits_nV[row_g].masked_fill_(~allowed_gV, MASKED)

    def _to_device(self, rows: list[int]) -> Tensor:
        return to_device(np.array(rows, dtype=np.int64), self._device)


def event_of(
    sequence: RunningSequence,
    begin: int,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    completion: Completion | None,
) -> SessionEvent:
    """The event of these tokens of its completion, from number `begin` on, with what its options ask for."""
    details = _details_of(sequence, begin, len(token_ids))
    request_id = sequence.group.request.id
    return SessionEvent(request_id, sequence.sibling, tuple(token_ids), tuple(logprobs), completion, details)


def _details_of(sequence: RunningSequence, begin: int, count: int) -> EventDetails | None:
    logits, scores = sequence.logits, sequence.group.prompt_scores
    if logits is None and scores is None:
        return None
    return EventDetails(
        tops=() if logits is None else tuple(logits.tops[begin : begin + count]),
        prompt=None if scores is None or begin > 0 else scores.read(),
        failure=None if logits is None or logits.guide is None else logits.guide.failure,
    )

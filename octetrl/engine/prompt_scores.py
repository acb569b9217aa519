"""Log-probs of a prompt's tokens, from the prefill that computes its K and V anyway.

A chunk's hidden states predict the tokens that follow. Their logits are computed `ROWS` at a time. lm_head's products
do not depend on the number of rows, and prefill equals decode, so a prompt's token has the log-prob that it would have
if it were sampled. Cached pages are not reused for such a prompt, because they have no hidden states.

T tokens of a forward's chunks, E hidden size, N positions, K likeliest tokens.

**Likeliest.** The likeliest tokens of rows of logits, with their log-probs. n rows, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octetrl.kernels.gemm.linear_logprobs import logprobs_alone
from octetrl.models.decoder import Decoder
from octetrl.records import PromptLogprobs, Top

ROWS = 64  # of logits at a time: 39 MB at a vocabulary of 152,000


class PromptScores:
    """Collects the log-probs of one prompt. `temperature`: the request's; 0 counts as 1, as in sampling."""

    def __init__(self, prompt_token_ids: Sequence[int], *, temperature: float, num_top: int) -> None:
        self._token_ids = tuple(prompt_token_ids)
        self._divisor = temperature or 1.0
        self._num_top = num_top
        self._logprobs: dict[int, Tensor] = {}  # by first position
        self._tops: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, model: Decoder, hidden_NE: Tensor, start: int) -> None:
        """Takes the hidden states of positions `start` on. Those after the prompt are ignored."""
        stop = min(start + hidden_NE.shape[0], len(self._token_ids) - 1)
        for begin in range(start, stop, ROWS):
            end = min(begin + ROWS, stop)
            logits_NV = model.logits(hidden_NE[begin - start : end - start])
            target_N = torch.tensor(self._token_ids[begin + 1 : end + 1], device=logits_NV.device)
            divisor_N = torch.full((end - begin,), self._divisor, dtype=torch.float32, device=logits_NV.device)
            self._logprobs[begin] = logprobs_alone(logits_NV, target_N, divisor_N)
            if self._num_top:
                self._tops[begin] = likeliest(logits_NV, divisor_N, self._num_top)

    def read(self) -> PromptLogprobs:
        """All log-probs. Waits for the device. The prompt has been prefilled."""
        logprobs: list[float] = [0.0] * (len(self._token_ids) - 1)
        tops: list[Top] = [()] * (len(self._token_ids) - 1 if self._num_top else 0)
        for begin, logprobs_N in self._logprobs.items():  # a prompt that was prefilled twice has the same bits twice
            logprobs[begin : begin + len(logprobs_N)] = logprobs_N.tolist()
        for begin, (ids_NK, logprobs_NK) in self._tops.items():
            tops[begin : begin + len(ids_NK)] = tops_of(ids_NK, logprobs_NK)
        return PromptLogprobs(tuple(logprobs), tuple(tops))


def likeliest(logits_nV: Tensor, divisor_n: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids, int64, and log-probs, float32, of the k likeliest tokens, [n, k]. A token's log-prob has the bits that it
    has when it is sampled."""
    ids_nK = logits_nV.topk(min(k, logits_nV.shape[1]), dim=1).indices
    each = [logprobs_alone(logits_nV, ids_n.contiguous(), divisor_n) for ids_n in ids_nK.unbind(1)]
    return ids_nK, torch.stack(each, dim=1)


def tops_of(ids_nK: Tensor, logprobs_nK: Tensor) -> list[Top]:
    return [
        tuple(zip(ids, logprobs, strict=True))
        for ids, logprobs in zip(ids_nK.tolist(), logprobs_nK.tolist(), strict=True)
    ]

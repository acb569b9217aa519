"""One step on the device: sequences -> tensors -> forward -> logits -> tokens and log-probs on the host.

A forward has one query for each decoding sequence, first, and after them the tokens of the chunks; only the decoding
queries have logits. What changes rarely lives in arrays with one row for each place in the batch, written when a
sequence comes or its pages change: sampling parameters, block tables. What changes every step (last token, length) is
read from the sequences. All of it is assembled in numpy and crosses to the device in a few copies; tokens and log-probs
come back in one.

B decoding sequences, C chunks, S = B + C, T tokens, P pages of the longest block table, W pages of the longest
possible one, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octetrl.engine.kv_cache import KVCache
from octetrl.engine.request import Chunk, Step
from octetrl.engine.sampler import SamplingRows, sample, sequence_key
from octetrl.kernels.linear_logprobs import logprobs_of
from octetrl.layers.context import PagedContext
from octetrl.models.decoder import Decoder, poisoned_tokens


class Sampled(NamedTuple):
    """Of each decoding sequence, in the step's order."""

    tokens: list[int]  # -1: the logits were not finite
    logprobs: list[float]


class Inputs(NamedTuple):
    """A forward's input, made on the host."""

    token_position_slot_3T: np.ndarray  # int64
    table_SP: np.ndarray  # int32
    cu_seqlens_context_2S1: np.ndarray  # int32; row 1: context lengths, then one unused number
    max_query_len: int
    max_context_len: int


NOTHING = Sampled([], [])


class ModelRunner:
    """Rows for `max_batch` sequences of at most `max_tokens` tokens."""

    def __init__(
        self, model: Decoder, *, max_batch: int, max_tokens: int, page_size: int, device: torch.device
    ) -> None:
        self.model, self.device, self._page_size = model, device, page_size
        self._table_RW = np.full((max_batch, -(-max_tokens // page_size)), -1, dtype=np.int32)
        self._integers_3R = np.zeros((3, max_batch), dtype=np.int64)  # key, prompt length, top_k
        self._fractions_3R = np.ones((3, max_batch), dtype=np.float32)  # temperature, top_p, min_p
        self._rows_B = np.zeros(0, dtype=np.int64)
        self._parameters: SamplingRows | None = None
        self.poisoned_tokens = torch.zeros((), dtype=torch.int64, device=device)  # added to by every forward
        self._prompt_lengths_B = torch.zeros(0, dtype=torch.int64, device=device)

    @torch.no_grad()
    def run(self, step: Step, cache: KVCache) -> Sampled:
        """Runs the step; the caches hold its tokens afterwards."""
        self._take_in(step)
        cache.copy_pages(step.page_copies)
        inputs = self._inputs(step)
        token_T, position_T, slot_T = self._to_device(inputs.token_position_slot_3T).unbind()
        cu_seqlens_S1, context_S1 = self._to_device(inputs.cu_seqlens_context_2S1).unbind()
        context = PagedContext(
            layers=cache.layers,
            slot_mapping_T=slot_T,
            block_table_BP=self._to_device(inputs.table_SP),
            cu_seqlens_q_B1=cu_seqlens_S1,
            context_lens_B=context_S1[:-1],
            max_query_len=inputs.max_query_len,
            max_context_len=inputs.max_context_len,
        )
        hidden_TE = self.model(token_T, position_T, context)
        self.poisoned_tokens += poisoned_tokens(hidden_TE)
        if not step.decode:
            return NOTHING
        num_decoding = len(step.decode)
        return self._sample(hidden_TE[:num_decoding], position_T[:num_decoding])

    def _sample(self, hidden_BE: Tensor, position_B: Tensor) -> Sampled:
        logits_BV = self.model.logits(hidden_BE)
        rows = self._sampling_rows(position_B)
        token_B = sample(logits_BV, rows)
        temperature_B = torch.where(rows.temperature_N == 0, 1.0, rows.temperature_N)
        logprob_B, _ = logprobs_of(logits_BV, token_B.clamp_min(0), temperature_B)
        bits_2B = torch.stack((token_B.int(), logprob_B.view(torch.int32))).cpu().numpy()
        return Sampled(bits_2B[0].tolist(), bits_2B[1].view(np.float32).tolist())

    def _take_in(self, step: Step) -> None:
        """Writes the rows of new sequences and the block tables that changed."""
        for sequence in step.admitted:
            request = sequence.group.request
            sampling = request.sampling
            key = sequence_key(request.seed, sequence.sibling)
            self._integers_3R[:, sequence.row] = key, len(request.prompt_token_ids), sampling.top_k
            self._fractions_3R[:, sequence.row] = sampling.temperature, sampling.top_p, sampling.min_p
        for sequence in step.repaged:
            row_W = self._table_RW[sequence.row]
            row_W[: len(sequence.pages)] = sequence.pages
            row_W[len(sequence.pages) :] = -1
        rows_B = np.fromiter((s.row for s in step.decode), np.int64, len(step.decode))
        if step.admitted or not np.array_equal(rows_B, self._rows_B):
            self._rows_B, self._parameters = rows_B, None

    def _sampling_rows(self, position_B: Tensor) -> SamplingRows:
        """The parameters of the decoding rows, sent anew when the batch changed, and the counters of this step."""
        if self._parameters is None:
            integers_3B, fractions_3B = self._integers_3R[:, self._rows_B], self._fractions_3R[:, self._rows_B]
            key_B, self._prompt_lengths_B, top_k_B = self._to_device(integers_3B).unbind()
            temperature_B, top_p_B, min_p_B = self._to_device(fractions_3B).unbind()
            filtered_B = (integers_3B[2] > 0) | (fractions_3B[1] < 1) | (fractions_3B[2] > 0)
            self._parameters = SamplingRows(
                key_N=key_B,
                counter_N=self._prompt_lengths_B,
                temperature_N=temperature_B,
                top_k_N=top_k_B,
                top_p_N=top_p_B,
                min_p_N=min_p_B,
                draws=bool((fractions_3B[0] > 0).any()),
                filters=bool((filtered_B & (fractions_3B[0] > 0)).any()),
            )
        return replace(self._parameters, counter_N=position_B + 1 - self._prompt_lengths_B)

    def _inputs(self, step: Step) -> Inputs:
        num_decoding, page_size = len(step.decode), self._page_size
        token_B = np.fromiter((s.token_ids[-1] for s in step.decode), np.int64, num_decoding)
        context_B = np.fromiter((len(s.token_ids) for s in step.decode), np.int64, num_decoding)
        position_B = context_B - 1
        slot_B = self._table_RW[self._rows_B, position_B // page_size].astype(np.int64) * page_size
        slot_B += position_B % page_size
        columns = [np.stack((token_B, position_B, slot_B)), *(self._chunk_columns(c) for c in step.chunks)]
        context_S = np.concatenate((context_B, [chunk.stop for chunk in step.chunks]))
        query_lens_S = np.ones(len(context_S), dtype=np.int64)
        query_lens_S[num_decoding:] = [chunk.stop - chunk.start for chunk in step.chunks]
        cu_seqlens_context_2S1 = np.zeros((2, len(context_S) + 1), dtype=np.int32)
        cu_seqlens_context_2S1[0, 1:] = query_lens_S.cumsum()
        cu_seqlens_context_2S1[1, :-1] = context_S
        max_context = int(context_S.max())
        return Inputs(
            token_position_slot_3T=np.concatenate(columns, axis=1),
            table_SP=self._tables(step.chunks, -(-max_context // page_size)),
            cu_seqlens_context_2S1=cu_seqlens_context_2S1,
            max_query_len=int(query_lens_S.max()),
            max_context_len=max_context,
        )

    def _chunk_columns(self, chunk: Chunk) -> np.ndarray:
        """Tokens, positions and slots of a chunk, int64 [3, stop - start]."""
        position_t = np.arange(chunk.start, chunk.stop)
        page_t = np.array(chunk.owner.pages, dtype=np.int64)[position_t // self._page_size]
        slot_t = page_t * self._page_size + position_t % self._page_size
        return np.stack((np.array(chunk.owner.token_ids[chunk.start : chunk.stop]), position_t, slot_t))

    def _tables(self, chunks: Many[Chunk], width: int) -> np.ndarray:
        table_BP = self._table_RW[self._rows_B, :width]
        if not chunks:
            return table_BP
        table_CP = np.full((len(chunks), width), -1, dtype=np.int32)
        for row_P, chunk in zip(table_CP, chunks, strict=True):
            pages = chunk.owner.pages[:width]
            row_P[: len(pages)] = pages
        return np.concatenate((table_BP, table_CP))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

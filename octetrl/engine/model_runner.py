"""Runs one step on the device: changed rows -> page copies -> a forward -> tokens and log-probs, copied to the host.

A decode forward reads and writes the batch's rows on the device, sampling included, so forwards follow one another
without the host. On a GPU each batch size is one captured graph (forward_graphs.py). `launch` returns before the device
is done, with a `Results` that can be read later. A prefill forward takes chunks of prompts and only writes their K and
V, a few short ones by a graph (prompt_rows.py).

**Batch rows.** The state of each place in the batch, on the device:

    token, length      the next query and the number of tokens up to it; every forward advances both
    prompt, key ...    of the sampler (sampler.py)
    table              the sequence's pages
    plan               the rows of the running batch, in its order, then the idle row; and each row's draft

The host writes only what changes: per step at most one copy of numbers and one of pages, from pinned memory. It never
waits for the device. The last row is always idle. Its length is 0, so attention returns zeros for it and nothing is
written to the cache. Batches are padded with it. A forward with drafts has several rows of one sequence; its plan is
one copy from one pinned buffer (draft_rows.py).

B sequences of a decode forward, C chunks, T tokens of the chunks, E hidden size, R places and the idle row, N rows of a
forward with drafts, W pages of the longest possible block table, P of the longest one now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octetrl.config.schema import EngineConfig
from octetrl.engine.block_manager import BlockManager
from octetrl.engine.draft_rows import DraftRows
from octetrl.engine.forward_graphs import ForwardGraphs, can_capture, padded_batch, padded_drafts
from octetrl.engine.kv_cache import KVCache
from octetrl.engine.pinned import to_device
from octetrl.engine.prompt_rows import PromptRows
from octetrl.engine.request import Chunk, RunningSequence, Step
from octetrl.engine.row_edits import RowEdits
from octetrl.engine.sampler import SamplingRows, sample, sequence_key
from octetrl.engine.scheduler import Scheduler
from octetrl.engine.transcript import Batch
from octetrl.kernels.gemm.linear_logprobs import logprobs_alone
from octetrl.kernels.quantize.count_poisoned import count_poisoned
from octetrl.kernels.rows.advance_rows import advance_rows
from octetrl.kernels.rows.gather_rows import DecodeRows, gather_rows
from octetrl.kernels.rows.settle_drafts import settle_drafts
from octetrl.layers.context import PagedContext
from octetrl.models.decoder import Decoder
from octetrl.models.rollout_forward import can_fuse, rollout_forward
from octetrl.system.errors import RunFailed


class BatchRows:
    """Rows for `max_batch` sequences of at most `max_tokens` tokens, on `device`."""

    def __init__(self, *, max_batch: int, max_tokens: int, page_size: int, device: torch.device) -> None:
        self._device, self._page_size, self._idle = device, page_size, max_batch
        rows = max_batch + 1
        self._integers_5R = torch.zeros(
            5, rows, dtype=torch.int64, device=device
        )  # as kernels/rows/gather_rows.py has them
        self._fractions_3R = torch.ones(3, rows, dtype=torch.float32, device=device)
        self._table_RW = torch.zeros(rows, -(-max_tokens // page_size), dtype=torch.int32, device=device)
        # row of the sequence, draft, offset of the draft; rows of the forward before that are kept, and their number
        self._plan_4R = torch.full((4, rows), max_batch, dtype=torch.int64, device=device)
        self._next_4R = torch.zeros(4, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._next = self._next_4R.numpy()
        self.active_R, self.kept_R = self._plan_4R[0], self._plan_4R[3]  # as kernels/rows/count_kept_rows.py has it
        self._draws_R = np.zeros(rows, dtype=bool)
        self._filters_R = np.zeros(rows, dtype=bool)

    def reset(self) -> None:
        """Clears the block tables of an earlier cache."""
        self._table_RW.zero_()

    def join(self, sequences: Sequence[RunningSequence]) -> None:
        """Writes the last known token and the sampling parameters of each sequence into its row."""
        if not sequences:
            return
        integers_n6 = np.empty((len(sequences), 6), dtype=np.int64)
        fractions_n3 = np.empty((len(sequences), 3), dtype=np.float32)
        for n, sequence in enumerate(sequences):
            request, tokens = sequence.group.request, sequence.token_ids
            sampling = request.sampling
            key = sequence_key(request.seed, sequence.sibling)
            integers_n6[n] = sequence.row, tokens[-1], len(tokens), sequence.prompt_length, key, sampling.top_k
            fractions_n3[n] = sampling.temperature, sampling.top_p, sampling.min_p
            filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
            self._draws_R[sequence.row] = sampling.temperature > 0
            self._filters_R[sequence.row] = filters and sampling.temperature > 0
        integers = to_device(integers_n6, self._device)
        self._integers_5R.index_copy_(1, integers[:, 0], integers[:, 1:].t())
        self._fractions_3R.index_copy_(1, integers[:, 0], to_device(fractions_n3, self._device).t())

    def write_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Writes entries (row, index, page) of the block tables."""
        if pages:
            row_n, index_n, page_n = to_device(np.array(pages, dtype=np.int64).T, self._device).unbind()
            self._table_RW.index_put_((row_n, index_n), page_n.int())

    def activate(self, row_B: np.ndarray, padded: int) -> None:
        """Sets the batch: these rows, then idle ones up to `padded`."""
        active = np.full(padded, self._idle, dtype=np.int64)
        active[: len(row_B)] = row_B
        self._plan_4R[0, :padded].copy_(to_device(active, self._device))

    def activate_drafts(self, drafts: DraftRows, padded: int, kept: tuple[np.ndarray, int]) -> None:
        """Sets the rows of a forward with drafts, then idle ones up to `padded`. `kept`: rows of the last such forward
        whose tokens were kept, and the number of all its rows. All launched forwards have been read."""
        size, plan_4R = len(drafts.row_N), self._next
        plan_4R[0, :size], plan_4R[1, :size], plan_4R[2, :size] = drafts.row_N, drafts.token_N, drafts.offset_N
        plan_4R[0, size:padded] = self._idle
        plan_4R[2, size:padded] = 0
        plan_4R[3] = 0
        plan_4R[3, kept[0]] = 1
        plan_4R[3, -1] = kept[1]
        self._plan_4R.copy_(self._next_4R, non_blocking=True)

    def samples_how(self, row_B: np.ndarray) -> tuple[bool, bool]:
        """Whether some row is not greedy, and whether some row has top-k, top-p or min-p."""
        return bool(self._draws_R[row_B].any()), bool(self._filters_R[row_B].any())

    # ------------------------------------------------------------ in the forward, on the device alone

    def gather(self, batch: int, *, drafts: bool = False) -> DecodeRows:
        """The first `batch` rows of the plan: one query each."""
        state = (self._integers_5R, self._fractions_3R, self._table_RW, self._page_size)
        return gather_rows(self._plan_4R[0, :batch], *state, self._plan_4R[1:3, :batch] if drafts else None)

    def draft_offsets(self, batch: int) -> Tensor:
        """How far the draft of each row lies behind its sequence's query, int64 [batch]; 0 in a sequence's own row."""
        return self._plan_4R[2, :batch]

    def advance(self, batch: int, token_B: Tensor, logprob_B: Tensor, *, drafts: bool = False) -> Tensor:
        """Each sequence's token, or the last that its right drafts led to, becomes its next query. Returns tokens and
        log-probs as int32 [2, B], the log-probs bit by bit."""
        if drafts:
            return settle_drafts(token_B, logprob_B, self._plan_4R[:3, :batch], self._integers_5R)
        return advance_rows(token_B, logprob_B, self._plan_4R[0, :batch], self._integers_5R)


class Sampled(NamedTuple):
    """Token and log-prob of each sequence of a batch, in the batch's order."""

    token_B: np.ndarray  # int32; -1: the logits were not finite
    logprob_B: np.ndarray  # float32


NOT_COUNTED = (np.zeros(0, dtype=np.int64), 0)


class Results:
    """A decode forward's tokens and log-probs, while they are copied to the host."""

    def __init__(
        self, bits_2B: Tensor, num_sequences: int, edits: RowEdits | None = None, drafts: DraftRows | None = None
    ) -> None:
        """bits_2B: int32 on the device: tokens, and log-probs bit by bit. It may be overwritten after this."""
        self._num_sequences, self._edits, self.drafts = num_sequences, edits, drafts
        self._arrived: torch.cuda.Event | None = None
        if bits_2B.is_cuda:
            self._bits_2B = torch.empty(bits_2B.shape, dtype=bits_2B.dtype, pin_memory=True)
            self._bits_2B.copy_(bits_2B, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._bits_2B = bits_2B

    def read(self) -> Sampled:
        """The tokens and log-probs. Waits for the device if necessary."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if self._edits is not None:
            self._edits.deliver()
        bits_2B = self._bits_2B[:, : self._num_sequences].numpy()
        return Sampled(bits_2B[0], bits_2B[1].view(np.float32))


class ModelRunner:
    """Rows for the sequences of a batch, of at most `max_tokens` tokens."""

    new_blocks: Callable[[int, int], BlockManager] = BlockManager
    new_scheduler: type[Scheduler] = Scheduler
    draft_chunk = 1 << 40  # a query and its drafts lie in one chunk of so many tokens, from a sequence's first one

    def __init__(self, model: Decoder, config: EngineConfig, max_tokens: int, device: torch.device) -> None:
        self.model, self.device = model, device
        max_batch, page_size = config.max_batch, config.page_size
        self.poisoned_tokens = torch.zeros((), dtype=torch.int64, device=device)  # added to by every forward
        self.graphs = ForwardGraphs(device) if device.type == "cuda" and can_capture(model) else None
        self.fused = device.type == "cuda" and can_fuse(model)
        whole = model.group.size == 1
        self.prompts = PromptRows(self.graphs, self._forward, max_tokens, page_size) if self.graphs and whole else None
        self._page_size, self._max_batch, self._max_tokens = page_size, max_batch, max_tokens
        self._rows = BatchRows(max_batch=max_batch, max_tokens=max_tokens, page_size=page_size, device=device)
        self._cu_seqlens_B1 = torch.arange(max_batch + 2, dtype=torch.int32, device=device)
        self._batch: Batch | None = None
        self._how = (False, False)
        self._drafted: Batch | None = None  # the batch of the last forward with drafts
        self._kept: tuple[np.ndarray, int] = NOT_COUNTED  # rows of it, and their number, that `count_kept` adds up

    def reset(self) -> None:
        """Prepares for a new call of `generate`, perhaps with another cache."""
        self.poisoned_tokens.zero_()
        self._rows.reset()
        self._batch = self._drafted = None
        self._kept = NOT_COUNTED

    @torch.no_grad()
    def launch(self, step: Step, batch: Batch, cache: KVCache) -> Results | None:
        """Launches the step; returns None if it has only chunks. `batch`: the decoding sequences, one object while
        unchanged. The results of drafts come behind the batch's."""
        cache.copy_pages(step.page_copies)
        self._rows.write_pages(step.new_pages)
        if not step.decode:
            self._prefill(step.chunks, cache)
            return None
        self._rows.join(step.joined)
        if step.drafts is not None:
            return self._launch_drafts(batch, step.drafts, cache)
        size = len(batch.sequences) if self.graphs is None else padded_batch(len(batch.sequences), self._max_batch)
        if batch is not self._batch:
            self._rows.activate(batch.row_B, size)
            self._drafted = None
            self._batch, self._how = batch, self._rows.samples_how(batch.row_B)
        if batch.edited:  # kernel by kernel: the host decides what each of these forwards changes
            edits = RowEdits(batch.edited, self.device)
            return Results(self._decode(size, *self._how, cache, edits=edits), len(batch.sequences), edits)
        if self.graphs is None:
            return Results(self._decode(size, *self._how, cache), len(batch.sequences))
        return Results(self.graphs.run(self._decode, size, *self._how, cache), len(batch.sequences))

    def _launch_drafts(self, batch: Batch, drafts: DraftRows, cache: KVCache) -> Results:
        num_rows = len(drafts.row_N)
        size = self.padded_rows(num_rows)
        self._rows.activate_drafts(drafts, size, self._kept)
        self._kept = NOT_COUNTED
        if batch is not self._drafted:
            self._drafted, self._how = batch, self._rows.samples_how(batch.row_B)
        self._batch = None
        how = (size, *self._how, cache)
        bits_2N = self._verify(*how) if self.graphs is None else self.graphs.run(self._verify, *how)
        return Results(bits_2N, num_rows, drafts=drafts)

    def padded_rows(self, num_rows: int) -> int:
        """Number of rows of a forward with drafts, idle ones included."""
        return num_rows if self.graphs is None else padded_drafts(num_rows, self._max_batch)

    def keep_rows(self, row_n: np.ndarray, num_rows: int) -> None:
        """Records which of the last forward's `num_rows` rows with drafts became tokens. Their clamped values count."""
        self._kept = (row_n, num_rows)

    def num_poisoned(self) -> int:
        """Tokens that met a non-finite activation. RunFailed if a worker that shares the model did not write its part
        of a forward in time, which leaves NaN. Waits for the device."""
        memory = self.model.group.memory
        if memory is not None and memory.has_failed:
            raise RunFailed("a worker that shares this model did not write its part of a forward in time; see its log")
        return int(self.poisoned_tokens)

    def count_kept(self, cache: KVCache) -> None:
        """Counts the clamped values of the rows that were kept; otherwise the next forward with drafts does."""
        cache.count_rows(self._kept[0].tolist())
        self._kept = NOT_COUNTED

    def forget_drafts(self, slots: Sequence[int], cache: KVCache) -> None:
        """Forgets a forward with drafts that was not finite, after which no row has moved (settle_drafts.py). `slots`:
        where K and V of its drafts are. The next forward decodes the same tokens again."""
        cache.count_rows(())
        cache.clear_slots(slots)

    def _decode(
        self, size: int, draws: bool, filters: bool, cache: KVCache, drafts: bool = False, edits: RowEdits | None = None
    ) -> Tensor:
        """One token for each of the first `size` active rows: int32 [2, B], tokens and the bits of their log-probs.
        drafts: some rows verify drafts. Then clamped values are counted row by row."""
        if drafts:
            cache.count_kept(self._rows.kept_R, self._max_batch)
        inputs = self._rows.gather(size, drafts=drafts)
        context = PagedContext(
            layers=cache.layers_by_row(self._max_batch) if drafts else cache.layers,
            slot_mapping_T=inputs.slot_B,
            block_table_BP=inputs.table_BW,
            cu_seqlens_q_B1=self._cu_seqlens_B1[: size + 1],
            context_lens_B=inputs.length_B,
            max_query_len=1,
            max_context_len=self._max_tokens,
            draft_offset_B=self._rows.draft_offsets(size) if drafts else None,
        )
        hidden_BE = self._forward(inputs.token_B, inputs.position_B, context, counts=not drafts)
        logits_BV = self.model.logits(hidden_BE)
        sampled_BV = logits_BV if edits is None else edits.edited(logits_BV)
        token_B = sample(sampled_BV, SamplingRows.of(inputs, draws=draws, filters=filters))
        if edits is not None:
            edits.note_tops(logits_BV, inputs.divisor_B)
        logprob_B = logprobs_alone(logits_BV, token_B.clamp_min(0), inputs.divisor_B)
        return self._rows.advance(size, token_B, logprob_B, drafts=drafts)

    def _verify(self, size: int, draws: bool, filters: bool, cache: KVCache) -> Tensor:
        """`_decode` of rows of which some verify drafts."""
        return self._decode(size, draws, filters, cache, drafts=True)

    def _prefill(self, chunks: Sequence[Chunk], cache: KVCache) -> None:
        columns_3T = np.concatenate([self._chunk_columns(chunk) for chunk in chunks], axis=1)
        context_C = np.array([chunk.stop for chunk in chunks], dtype=np.int32)
        lengths_C = np.array([chunk.stop - chunk.start for chunk in chunks], dtype=np.int32)
        if self.prompts is not None and (size := self.prompts.size(columns_3T[1])) is not None:
            table_CP = self._chunk_tables(chunks, int(context_C.max()))
            _score_prompts(self.model, chunks, self.prompts.run(columns_3T, lengths_C, table_CP, size, cache))
            return
        token_T, position_T, slot_T = to_device(columns_3T, self.device).unbind()
        context = PagedContext(
            layers=cache.layers,
            slot_mapping_T=slot_T,
            block_table_BP=to_device(self._chunk_tables(chunks, int(context_C.max())), self.device),
            cu_seqlens_q_B1=to_device(np.concatenate(([0], lengths_C.cumsum())).astype(np.int32), self.device),
            context_lens_B=to_device(context_C, self.device),
            max_query_len=int(lengths_C.max()),
            max_context_len=int(context_C.max()),
        )
        _score_prompts(self.model, chunks, self._forward(token_T, position_T, context))

    def _forward(self, token_T: Tensor, position_T: Tensor, context: PagedContext, *, counts: bool = True) -> Tensor:
        """The last hidden states. `counts`: tokens that are not finite; those of drafts are decoded again."""
        if self.fused:
            hidden_TE = rollout_forward(self.model, token_T, position_T, context)
        else:
            hidden_TE = self.model(token_T, position_T, context)
        if counts:
            count_poisoned(hidden_TE, self.poisoned_tokens)
        return hidden_TE

    def _chunk_columns(self, chunk: Chunk) -> np.ndarray:
        """Tokens, positions and slots of a chunk, int64 [3, stop - start]."""
        position_t = np.arange(chunk.start, chunk.stop)
        page_t = np.array(chunk.owner.pages, dtype=np.int64)[position_t // self._page_size]
        slot_t = page_t * self._page_size + position_t % self._page_size
        return np.stack((np.array(chunk.owner.token_ids[chunk.start : chunk.stop]), position_t, slot_t))

    def _chunk_tables(self, chunks: Sequence[Chunk], max_context: int) -> np.ndarray:
        table_CP = np.full((len(chunks), -(-max_context // self._page_size)), -1, dtype=np.int32)
        for row_P, chunk in zip(table_CP, chunks, strict=True):
            pages = chunk.owner.pages[: len(row_P)]
            row_P[: len(pages)] = pages
        return table_CP


def _score_prompts(model: Decoder, chunks: Sequence[Chunk], hidden_TE: Tensor) -> None:
    """Adds a prefill's hidden states to the scores of the prompts that want them."""
    begin = 0
    for chunk in chunks:
        end = begin + chunk.stop - chunk.start
        if chunk.owner.prompt_scores is not None:
            chunk.owner.prompt_scores.add(model, hidden_TE[begin:end], chunk.start)
        begin = end

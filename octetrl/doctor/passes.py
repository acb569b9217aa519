"""Both sides' forwards over one set of sequences, teacher-forced: the trainer's packs, the engine's pages.

A *pass* runs all sequences through one model in one way and records the values of each row:

    packed             whole sequences end to end, micro-batches within the budget: the trainer
    each alone         a micro-batch for each sequence
    decode             prompts prefilled, then one token of every sequence at a time: the engine
    chunked prefill    prompt and answer in chunks that cut every sequence
    prefix hit         uses pages that an earlier sequence with the same beginning wrote
    in another batch   the first sequence decoded alone, the others together in reverse order, with pages in reverse

A row is a token of a sequence. Its log-prob is that of the next token, if that was sampled. The engine never computes a
sequence's last token. Passes compute no gradients and keep no state, so a pass can run again for a closer look at one
site. On a GPU the forwards are the fused ones of a run (taps.py).

T tokens of a forward, B sequences in it, N rows with a log-prob, P pages of the longest table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from operator import eq

import torch
from torch import Tensor

from octetrl.doctor.taps import Note, Site, Tap
from octetrl.engine.kv_cache import CacheFormat, KVCache
from octetrl.engine.sequence_states import SequenceStates
from octetrl.kernels.gemm.linear_logprobs import logprobs_alone
from octetrl.layers.context import PackedContext, PagedContext
from octetrl.trainer.forward import KVReplay

LOGITS, LOGPROB = Site(None, "logits"), Site(None, "log-prob")
LOGIT_ROWS = 64  # recorded at a time
SMALL_PAGE = 16


@dataclass(frozen=True)
class DrawnSequences:
    """Prompts with the engine's answers. Row `starts[b] + t` is token t of sequence b."""

    token_ids: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(accumulate((len(ids) for ids in self.token_ids), initial=0))

    @property
    def num_rows(self) -> int:
        return self.starts[-1]

    @cached_property
    def token_R(self) -> Tensor:
        return torch.tensor([token for ids in self.token_ids for token in ids], device=self.device)

    @cached_property
    def drawn_R(self) -> Tensor:
        """bool: whether the next token was sampled, so that this row has a log-prob."""
        mask_R = torch.zeros(self.num_rows, dtype=torch.bool)
        for start, ids, prompt in zip(self.starts, self.token_ids, self.prompt_lengths, strict=False):
            mask_R[start + prompt - 1 : start + len(ids) - 1] = True
        return mask_R.to(self.device)

    def place_of(self, row: int) -> tuple[int, int]:
        """Sequence and position of a row."""
        sequence = max(b for b, start in enumerate(self.starts[:-1]) if start <= row)
        return sequence, row - self.starts[sequence]


@dataclass(frozen=True, slots=True)
class LogprobRule:
    """Settings of log-probs: the recipe's temperature and, for the trainer, its chunk of rows."""

    temperature: float
    chunk: int


Run = Callable[[Note], None]
MakeTap = Callable[[Note], Tap]


@dataclass(frozen=True, slots=True)
class Pass:
    """One way of running one side. `run(note)` may be called again."""

    side: str  # "trainer" or "engine"
    way: str
    run: Run

    @property
    def name(self) -> str:
        return f"{self.side}, {self.way}"


# ---------------------------------------------------------------- the trainer


def packed_pass(
    make_tap: MakeTap, drawn: DrawnSequences, kv: KVReplay, rule: LogprobRule, budget: int, way: str
) -> Pass:
    """Whole sequences in order, `budget` tokens a micro-batch. A longer sequence has its own micro-batch."""

    def run(note: Note) -> None:
        tap = make_tap(note)
        with tap.open(), torch.set_grad_enabled(tap.with_graph):
            for first, last in _micro_batches(drawn, budget):
                _packed_forward(tap, drawn, first, last, kv, rule)

    return Pass("trainer", way, run)


def _micro_batches(drawn: DrawnSequences, budget: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 sequence of each micro-batch."""
    first, starts = 0, drawn.starts
    for b in range(len(drawn.token_ids)):
        if b > first and starts[b + 1] - starts[first] > budget:
            yield first, b
            first = b
    yield first, len(drawn.token_ids)


def _packed_forward(tap: Tap, drawn: DrawnSequences, first: int, last: int, kv: KVReplay, rule: LogprobRule) -> None:
    starts = drawn.starts[first : last + 1]
    lengths = [stop - start for start, stop in pairwise(starts)]
    tap.rows_T = torch.arange(starts[0], starts[-1], device=drawn.device)
    context = PackedContext(
        cu_seqlens_B1=torch.tensor([start - starts[0] for start in starts], dtype=torch.int32, device=drawn.device),
        max_seqlen=max(lengths),
        kv_mode=kv.kv_mode,
        kv_scale_LS=kv.kv_scale_LS,
    )
    position_T = torch.cat([torch.arange(length, device=drawn.device) for length in lengths])
    hidden_TE = tap.forward(drawn.token_R[tap.rows_T], position_T, context)
    drawn_T = drawn.drawn_R[tap.rows_T]
    rows_N, hidden_NE = tap.rows_T[drawn_T], hidden_TE[drawn_T]
    for rows_C, hidden_CE in zip(rows_N.split(LOGIT_ROWS), hidden_NE.split(LOGIT_ROWS), strict=True):
        tap.note(LOGITS, rows_C, tap.model.logits(hidden_CE))
    logprobs_N, _ = tap.model.logprobs(hidden_NE, drawn.token_R[rows_N + 1], rule.temperature, rule.chunk)
    tap.note(LOGPROB, rows_N, logprobs_N[:, None])


# ---------------------------------------------------------------- the engine


@dataclass(frozen=True, slots=True)
class PassPiece:
    """Tokens [start, stop) of a sequence in one forward."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """An engine's forwards, and the pages of each sequence."""

    way: str
    forwards: tuple[tuple[PassPiece, ...], ...]
    tables: tuple[tuple[int, ...], ...]
    page_size: int


@dataclass(frozen=True, slots=True)
class EngineLimits:
    page_size: int
    prefill_chunk: int
    max_batch: int
    finds_prefixes: bool = True


def paged_pass(
    make_tap: MakeTap,
    drawn: DrawnSequences,
    plan: Plan,
    rule: LogprobRule,
    page_of: Callable[[int], CacheFormat],
    scale_LS: Tensor | None,
) -> Pass:
    """The engine's model over its own pages. `page_of(page_size)`: the format of a page."""

    @torch.no_grad()
    def run(note: Note) -> None:
        num_pages = 1 + max(page for table in plan.tables for page in table)
        cache = KVCache(page_of(plan.page_size), num_pages, drawn.device, scale_LS)
        tap = make_tap(note)
        states = SequenceStates(tap.model, len(plan.tables), drawn.device)
        with tap.open():
            for pieces in plan.forwards:
                _paged_forward(tap, drawn, plan, pieces, (cache, states), rule)

    return Pass("engine", plan.way, run)


def _paged_forward(
    tap: Tap,
    drawn: DrawnSequences,
    plan: Plan,
    pieces: Sequence[PassPiece],
    held: tuple[KVCache, SequenceStates],
    rule: LogprobRule,
) -> None:
    device, size, (cache, states) = drawn.device, plan.page_size, held
    slots = [plan.tables[p.sequence][t // size] * size + t % size for p in pieces for t in range(p.start, p.stop)]
    positions = [t for p in pieces for t in range(p.start, p.stop)]
    starts = torch.tensor([drawn.starts[p.sequence] for p in pieces for _ in range(p.start, p.stop)], device=device)
    position_T = torch.tensor(positions, device=device)
    tap.rows_T = starts + position_T
    widest = max(-(-p.stop // size) for p in pieces)
    tables = [(*plan.tables[p.sequence][: -(-p.stop // size)],) for p in pieces]
    context = PagedContext(
        layers=cache.layers,
        slot_mapping_T=torch.tensor(slots, device=device),
        block_table_BP=_int32([[*table, *[-1] * (widest - len(table))] for table in tables], device),
        cu_seqlens_q_B1=_int32(list(accumulate((p.stop - p.start for p in pieces), initial=0)), device),
        context_lens_B=_int32([p.stop for p in pieces], device),
        max_query_len=max(p.stop - p.start for p in pieces),
        max_context_len=max(p.stop for p in pieces),
    )
    slot_B = torch.tensor([piece.sequence for piece in pieces], device=device)
    context = states.slots_of(context, slot_B, one_chunk=context.max_query_len == 1)
    hidden_TE = tap.forward(drawn.token_R[tap.rows_T], position_T, context)
    drawn_T = drawn.drawn_R[tap.rows_T]
    rows_N = tap.rows_T[drawn_T]
    if rows_N.numel() == 0:
        return
    for rows_C, hidden_CE in zip(rows_N.split(LOGIT_ROWS), hidden_TE[drawn_T].split(LOGIT_ROWS), strict=True):
        logits_CV = tap.model.logits(hidden_CE)
        temperature_C = torch.full((rows_C.numel(),), rule.temperature, dtype=torch.float32, device=device)
        tap.note(LOGITS, rows_C, logits_CV)
        tap.note(LOGPROB, rows_C, logprobs_alone(logits_CV, drawn.token_R[rows_C + 1], temperature_C)[:, None])


def _int32(values: Sequence[object], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# ---------------------------------------------------------------- plans


def engine_plans(drawn: DrawnSequences, limits: EngineLimits) -> list[Plan]:
    """The engine's ways in the module's docstring that these sequences allow."""
    size = limits.page_size
    everyone = range(len(drawn.token_ids))
    ends = [len(ids) - 1 for ids in drawn.token_ids]  # the last token is never computed
    whole = [PassPiece(b, 0, ends[b]) for b in everyone]
    chunk = max(SMALL_PAGE, max(ends) * 3 // 8) | 1
    reverse = [*reversed(everyone)]
    alone, rest = reverse[-1:], reverse[:-1]
    plans = [
        Plan("decode", tuple(_rollout(drawn, everyone, limits)), _own_pages(drawn, everyone, size), size),
        Plan("chunked prefill", tuple(_chunks(whole, chunk)), _own_pages(drawn, everyone, size), size),
    ]
    hit = _prefix_hits(drawn, limits) if limits.finds_prefixes else None
    if hit is not None:
        plans.append(hit)
    batches = (*_rollout(drawn, alone, limits), *_rollout(drawn, rest, limits))
    return [*plans, Plan("in another batch", batches, _own_pages(drawn, reverse, size), size)]


def _rollout(
    drawn: DrawnSequences, sequences: Sequence[int], limits: EngineLimits, cached: Sequence[int] | None = None
) -> Iterator[tuple[PassPiece, ...]]:
    """Prefills prompts without their last tokens, then decodes. `cached`: tokens that need no prefill."""
    begins = {b: 0 if cached is None else cached[b] for b in sequences}
    prompts = {b: max(begins[b], drawn.prompt_lengths[b] - 1) for b in sequences}
    yield from _chunks([PassPiece(b, begins[b], prompts[b]) for b in sequences], limits.prefill_chunk)
    for step in range(max((len(drawn.token_ids[b]) for b in sequences), default=0)):
        at = {b: prompts[b] + step for b in sequences if prompts[b] + step < len(drawn.token_ids[b]) - 1}
        going = [PassPiece(b, t, t + 1) for b, t in at.items()]
        for first in range(0, len(going), limits.max_batch):
            yield tuple(going[first : first + limits.max_batch])


def _chunks(pieces: Iterable[PassPiece], chunk: int) -> Iterator[tuple[PassPiece, ...]]:
    """Forwards of `chunk` tokens that hold the pieces in their order, cut where a forward is full."""
    forward: list[PassPiece] = []
    room = chunk
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, start + room)
            forward.append(PassPiece(piece.sequence, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield tuple(forward)
                forward, room = [], chunk
    if forward:
        yield tuple(forward)


def _own_pages(drawn: DrawnSequences, order: Iterable[int], page_size: int) -> tuple[tuple[int, ...], ...]:
    """Pages for every sequence, allocated in this order."""
    tables: dict[int, tuple[int, ...]] = {}
    given = 0
    for b in order:
        count = -(-len(drawn.token_ids[b]) // page_size)
        tables[b] = tuple(range(given, given + count))
        given += count
    return tuple(tables[b] for b in sorted(tables))


def _prefix_hits(drawn: DrawnSequences, limits: EngineLimits) -> Plan | None:
    """Prompts share full pages with equal tokens. An earlier sequence writes them, before or in the same forward.

    Uses small pages if the recipe's are too large to share. None if nothing is shared.
    """
    for size in dict.fromkeys((limits.page_size, SMALL_PAGE)):
        tables = [list(table) for table in _own_pages(drawn, range(len(drawn.token_ids)), size)]
        cached = [0] * len(tables)
        for b in range(len(tables)):
            for a in range(b):
                prompts = (drawn.token_ids[c][: drawn.prompt_lengths[c] - 1] for c in (a, b))
                pages = len([*takewhile(bool, map(eq, *prompts))]) // size  # with equal tokens
                if pages * size > cached[b]:
                    cached[b] = pages * size
                    tables[b][:pages] = tables[a][:pages]
        if any(cached):
            order = range(len(tables))
            first = [b for b in order if not cached[b]]
            then = [b for b in order if cached[b]]
            forwards = (*_rollout(drawn, first, limits), *_rollout(drawn, then, limits, cached))
            return Plan("prefix hit", forwards, tuple(map(tuple, tables)), size)
    return None

"""Slots for what sequences keep of linear attention: the parts of the engine that a model with such layers has instead.

A running sequence has the slot of its row. A prompt that siblings share is prefilled into a slot of its own, and each
sibling starts with a copy of it (`Step.state_copies`). When all siblings have started, the prompt's slot and pages are
free. If no slot is left for a prompt, its sibling prefills the prompt alone.

**Snapshots.** A prompt can continue from cached pages only where a slot has the state after the same tokens. A slot
always has the state at the start of its last chunk of 64 tokens (kernels/delta_rule/state.py). So a copy of a slot is a
snapshot of its sequence's last whole chunk, which has the key of the pages up to there. Snapshots are taken

    of a prompt       when it is in the cache; of one that siblings share, its slot becomes the snapshot
    of an answer      when it ends or is cancelled, for the next turn of its conversation
    of a sequence     when it is preempted

Prompts and snapshots share the slots behind those of the rows. If none is free, the snapshot that was used longest ago
makes room; one whose page is used for something else goes with the page. A hit that ends within a page copies the page.
On a GPU an answer that ends up to two tokens before a whole chunk does leaves no snapshot: forwards that were launched
before its end was known have moved its slot to the next chunk.

**Drafts** are rows behind their sequence's own one, in one chunk. Those that turn out wrong are open rows, which the
next forward writes again.

Bits never depend on any of this: a state follows from a sequence's tokens, whatever pieces they were computed in
(kernels/delta_rule/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octetrl.config.memory import state_slots
from octetrl.config.schema import EngineConfig
from octetrl.engine.block_manager import BlockManager, content_keys
from octetrl.engine.kv_cache import KVCache
from octetrl.engine.model_runner import ModelRunner, Results
from octetrl.engine.pinned import to_device
from octetrl.engine.request import Chunk, Prefix, RequestGroup, RunningSequence, Step
from octetrl.engine.scheduler import Scheduler
from octetrl.engine.transcript import Batch
from octetrl.kernels.delta_rule.state import SlotRows, copy_slot, empty_state
from octetrl.layers.context import PagedContext
from octetrl.layers.sequence_slots import SequenceSlots
from octetrl.models.blocks.gated_delta.module import GatedDelta
from octetrl.models.decoder import Decoder
from octetrl.shapes.delta_rule import CHUNK

IDLE = -1  # the slot of a row that belongs to no sequence


class SequenceStates:
    """The slots of every layer with linear attention. Their content needs no clearing. `most_rows`: of one sequence in
    a decode forward."""

    def __init__(self, model: Decoder, slots: int, device: torch.device, most_rows: int = 1) -> None:
        blocks = {index: layer.attention for index, layer in enumerate(model.decoder_layers())}
        deltas = {index: block for index, block in blocks.items() if isinstance(block, GatedDelta)}
        self.layers = {}
        if deltas:
            (shape,) = {block.shape for block in deltas.values()}
            dtype = next(iter(deltas.values())).dtype
            self._all = empty_state(shape, slots, shape.conv_rows(most_rows), dtype, device, (len(deltas),))
            self.layers = {index: self._all.of_layer(place) for place, index in enumerate(deltas)}
        self._most_rows = most_rows

    def slots_of(self, context: PagedContext, slot_B: Tensor, *, one_chunk: bool) -> PagedContext:
        """The context of a forward whose sequences have these slots, int64. `one_chunk`: a row for each of them, or
        its drafts behind it."""
        bounds_B1, longest = context.cu_seqlens_q_B1, context.max_query_len
        first_B = context.context_lens_B - (bounds_B1[1:] - bounds_B1[:-1])
        if context.draft_offset_B is not None:
            bounds_B1, longest = _with_drafts(context.draft_offset_B), self._most_rows
        rows = SlotRows(bounds_B1, slot_B, first_B.long(), longest, one_chunk)
        return replace(context, states=SequenceSlots(self.layers, rows))

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """For each (a, b), one after another, copies slot `a` to slot `b` in every layer. The host does not wait for
        the device."""
        for source, target in copies:
            copy_slot(self._all, source, target)


def _with_drafts(offset_N: Tensor) -> Tensor:
    """Bounds of sequences whose drafts follow their own row, int32 [N + 1]: a draft's own sequence has no rows. On the
    device alone, as part of a graph. offset_N: 0 in a sequence's own row."""
    row_N = torch.arange(len(offset_N), dtype=torch.int32, device=offset_N.device)
    own_N = torch.where(offset_N == 0, row_N, len(offset_N))
    next_N = own_N.flip(0).cummin(0).values.flip(0)
    return torch.nn.functional.pad(next_N, (0, 1), value=len(offset_N))


class StateBlocks(BlockManager):
    """The pages, and the slots of prompts and snapshots. It outlives a session, as the pages do."""

    def __init__(self, slots: Iterable[int], num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size, unit=min(page_size, CHUNK))
        self._free_slots = list(slots)
        self._snapshots: dict[bytes, int] = {}  # the one that was used longest ago first

    @property
    def has_slot(self) -> bool:
        return bool(self._free_slots or self._snapshots)

    def take_slot(self) -> int:
        """A slot for a prompt or a snapshot; the oldest snapshot makes room."""
        if self._free_slots:
            return self._free_slots.pop()
        return self._snapshots.pop(next(iter(self._snapshots)))

    def free_slot(self, slot: int) -> None:
        self._free_slots.append(slot)

    def needs_snapshot(self, token_ids: Sequence[int]) -> bytes | None:
        """The key of a snapshot after these tokens, whole chunks. None: there is one, or nothing could continue from
        it."""
        *_, key = content_keys(token_ids, self.unit)
        if key in self._snapshots:
            self._snapshots[key] = self._snapshots.pop(key)
            return None
        return key if key in self._page_of else None

    def keep(self, key: bytes, slot: int) -> None:
        """Records that this slot has the state of `key` from now on."""
        self._snapshots[key] = slot

    def find_state(self, token_ids: Sequence[int]) -> tuple[list[int], int, int | None]:
        """Pages with the beginning of these tokens, up to the last snapshot of which all pages are cached, how many
        tokens they are, and the snapshot's slot. Adds an owner to each page."""
        number, pages, key = self._longest(token_ids)
        if key is None:
            return [], 0, None
        slot = self._snapshots[key] = self._snapshots.pop(key)
        for page in pages:
            self._kept.pop(page, None)
            self._owners[page] += 1
        self.peak_used = max(self.peak_used, self.num_used)
        return pages, number, slot

    def longest_state(self, token_ids: Sequence[int]) -> int:
        """How many tokens `find_state` would find."""
        return self._longest(token_ids)[0]

    def _longest(self, token_ids: Sequence[int]) -> tuple[int, list[int], bytes | None]:
        pages: list[int] = []
        longest: tuple[int, list[int], bytes | None] = 0, [], None
        for number, key in enumerate(content_keys(token_ids, self.unit)):
            page = self._page_of.get(key)
            if page is None:
                break
            pages[number * self.unit // self.page_size :] = [page]
            if key in self._snapshots:
                longest = (number + 1) * self.unit, list(pages), key
        return longest

    def forget(self) -> None:
        super().forget()
        self._free_slots += self._snapshots.values()
        self._snapshots.clear()

    def is_used(self, page: int) -> bool:
        return self._owners[page] > 0

    def _oldest_kept(self) -> int:
        keys = self._keys_of[next(iter(self._kept))]
        self._free_slots += (self._snapshots.pop(key) for key in keys if key in self._snapshots)
        return super()._oldest_kept()


class StateScheduler(Scheduler):
    """Prompts and snapshots have the slots behind those of the rows."""

    blocks: StateBlocks
    since: Callable[[RunningSequence, int], tuple[list[int], list[float]]]  # the transcript's, from its session
    copy_states: Callable[[Sequence[tuple[int, int]]], None]  # the runner's

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._slot_of: dict[Prefix, int] = {}
        self._found_slot: int | None = None  # of the snapshot that was found last
        self._joined_with: dict[RunningSequence, int] = {}  # tokens
        self._state_copies: list[tuple[int, int]] = []  # since the last step, in order
        self._page_copies: list[tuple[int, int]] = []

    def next_step(self, *, results_pending: bool = False) -> Step | None:
        step = super().next_step(results_pending=results_pending)
        if step is not None:
            step.state_copies = self._take_copies()
            step.page_copies += self._page_copies
            self._page_copies = []
        return step

    def _end(self, group: RequestGroup) -> None:
        super()._end(group)
        if not self.has_work:  # perhaps no step follows
            self.copy_states(self._take_copies())

    def _take_copies(self) -> list[tuple[int, int]]:
        """Copies of slots that no step has yet."""
        copies, self._state_copies = self._state_copies, []
        return copies

    # ------------------------------------------------------------ prompts and their siblings

    def _shares_prefix(self, sequence: RunningSequence) -> bool:
        """One that was preempted prefers a snapshot of its own, if the prompt's state would not do more."""
        group = sequence.group
        if not group.shares_prefix or len(sequence.token_ids) == sequence.prompt_length:
            return group.shares_prefix
        longest = self.blocks.longest_state(sequence.token_ids[:-1])
        return longest == 0 or (group.prefix is not None and longest < group.prefix.num_to_cache)

    def _make_prefix(self, group: RequestGroup) -> None:
        if not self.blocks.has_slot:
            return
        super()._make_prefix(group)
        assert group.prefix is not None
        found, slot = self._found_slot, self.blocks.take_slot()  # the last one that is left may be the one found
        self._slot_of[group.prefix] = slot
        if group.prefix.num_cached and found is not None and found != slot:
            self._state_copies.append((found, slot))

    def _drop_prefix(self, group: RequestGroup) -> None:
        prefix = group.prefix
        assert prefix is not None
        super()._drop_prefix(group)
        self._forget_page_copies(prefix.pages)
        slot, key = self._slot_of.pop(prefix), None
        if prefix.is_cached:
            key = self._snapshot_key(prefix, prefix.token_ids, prefix.num_cached)
        if key is None:
            self.blocks.free_slot(slot)
        else:
            self.blocks.keep(key, slot)

    def _run(self, sequence: RunningSequence, prefix: Prefix | None) -> None:
        super()._run(sequence, prefix)
        if prefix is None:
            if sequence.num_cached and self._found_slot is not None:
                self._state_copies.append((self._found_slot, sequence.row))
        elif prefix.is_cached:
            self._state_copies.append((self._slot_of[prefix], sequence.row))

    def _found(self, group: RequestGroup, token_ids: Sequence[int]) -> tuple[list[int], int]:
        self._found_slot = None
        if group.prompt_scores is not None or not self._keeps_prefixes:
            return [], 0
        pages, num_tokens, self._found_slot = self.blocks.find_state(token_ids)
        if num_tokens % self.blocks.page_size:  # its owner may have written behind them
            if self.blocks.num_free == 0:
                self.blocks.release(pages)
                return [], 0
            shared, pages[-1] = pages[-1], self.blocks.allocate()
            self._page_copies.append((shared, pages[-1]))
            self.blocks.release([shared])
        return pages, num_tokens

    def _cached(self, owner: Prefix | RunningSequence) -> None:
        if isinstance(owner, Prefix):
            self._state_copies += ((self._slot_of[owner], sibling.row) for sibling in self._awaiting[owner])
        super()._cached(owner)

    def _start_prefilling(self, step: Step) -> None:
        super()._start_prefilling(step)
        next_group = self.waiting[0].group if self.waiting else None
        for group in list(self._prefixed):
            if group is not next_group and group.prefix is not None and group.prefix.is_cached:
                self._drop_prefix(group)  # its siblings have started

    def _plan_chunks(self, step: Step) -> None:
        super()._plan_chunks(step)
        step.chunks = [replace(chunk, slot=self._slot(chunk.owner)) for chunk in step.chunks]

    def _slot(self, owner: Prefix | RunningSequence) -> int:
        return self._slot_of[owner] if isinstance(owner, Prefix) else owner.row

    # ------------------------------------------------------------ snapshots

    def _remember(self, owner: Prefix | RunningSequence) -> None:
        super()._remember(owner)
        if isinstance(owner, RunningSequence):
            self._take_snapshot(owner, owner.token_ids[: owner.num_to_cache])

    def _preempt(self, sequence: RunningSequence, step: Step) -> None:
        if sequence.joined_at is not None and self._keeps_prefixes and sequence.weights == self._weights:
            token_ids = (sequence.token_ids[: sequence.prompt_length] + self.since(sequence, 0)[0])[:-1]
            self.blocks.remember(token_ids, sequence.pages)
            self._take_snapshot(sequence, token_ids)
        super()._preempt(sequence, step)

    def _join(self, sequence: RunningSequence, step: Step) -> None:
        super()._join(sequence, step)
        self._joined_with[sequence] = len(sequence.token_ids)

    def _leave(self, sequence: RunningSequence) -> None:
        pages = sequence.pages
        super()._leave(sequence)
        self._joined_with.pop(sequence, None)
        self._forget_page_copies(pages)

    def _grow(self, sequence: RunningSequence, step: Step, until: int | None = None) -> bool:
        waiting = {target: source for source, target in self._page_copies}  # a copy of a copy is of the first page
        has_grown = super()._grow(sequence, step, until)
        step.page_copies = [(waiting.get(source, source), target) for source, target in step.page_copies]
        return has_grown

    def _forget_page_copies(self, pages: Sequence[int]) -> None:
        """Drops pending copies to pages that have been released by their last owner."""
        self._page_copies = [copy for copy in self._page_copies if copy[1] not in pages or self.blocks.is_used(copy[1])]

    def _take_snapshot(self, sequence: RunningSequence, token_ids: Sequence[int]) -> None:
        """Of a sequence that has these tokens in the cache, and perhaps others behind them."""
        computed = sequence.num_cached
        if sequence.joined_at is not None:
            length = self._joined_with[sequence] + self.clock - sequence.joined_at
            computed = min(length, sequence.limit) - 1
        key = self._snapshot_key(sequence, token_ids, computed)
        if key is not None and self.blocks.has_slot:
            slot = self.blocks.take_slot()
            self._state_copies.append((sequence.row, slot))
            self.blocks.keep(key, slot)

    def _snapshot_key(self, owner: Prefix | RunningSequence, token_ids: Sequence[int], computed: int) -> bytes | None:
        """The key of the owner's slot as a snapshot; None: it is none. `computed`: tokens of which the slot has the
        state, of which `token_ids` are the owner's."""
        whole = len(token_ids) // CHUNK * CHUNK
        if not self._keeps_prefixes or owner.weights != self._weights or whole == 0:
            return None
        in_state = (computed - 1) // CHUNK * CHUNK
        return self.blocks.needs_snapshot(token_ids[:whole]) if whole >= in_state else None


class StateRunner(ModelRunner):
    """`states`: allocated by the engine before its pages, which take what memory is left."""

    draft_chunk = CHUNK
    new_scheduler = StateScheduler

    def __init__(self, model: Decoder, config: EngineConfig, max_tokens: int, device: torch.device) -> None:
        super().__init__(model, config, max_tokens, device)
        self.prompts = None  # a state follows from one row at a time
        self.states: SequenceStates | None = None
        slots = range(config.max_batch, state_slots(config, config.max_batch))  # behind those of the rows
        self.new_blocks, self._num_slots = partial(StateBlocks, slots), slots.stop
        self._most_rows = config.most_rows
        self._chunk_slots: Tensor | None = None

    def wake(self) -> None:
        if self.states is None:
            self.states = SequenceStates(self.model, self._num_slots, self.device, self._most_rows)

    def sleep(self) -> None:
        self.states = None

    def launch(self, step: Step, batch: Batch, cache: KVCache) -> Results | None:
        self.copy_states(step.state_copies)
        return super().launch(step, batch, cache)

    @torch.no_grad()
    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        self._slots.copy(copies)

    @property
    def _slots(self) -> SequenceStates:
        assert self.states is not None, "the engine is asleep"
        return self.states

    def _prefill(self, chunks: Sequence[Chunk], cache: KVCache) -> None:
        self._chunk_slots = to_device(np.array([chunk.slot for chunk in chunks], dtype=np.int64), self.device)
        super()._prefill(chunks, cache)
        self._chunk_slots = None

    def _forward(self, token_T: Tensor, position_T: Tensor, context: PagedContext, *, counts: bool = True) -> Tensor:
        slot_B, decodes = self._chunk_slots, self._chunk_slots is None
        if slot_B is None:
            row_B = self._rows.active_R[: len(token_T)]
            slot_B = row_B.masked_fill(row_B == self._max_batch, IDLE)
        context = self._slots.slots_of(context, slot_B, one_chunk=decodes)
        return super()._forward(token_T, position_T, context, counts=counts)

"""Slots for what sequences keep of linear attention: the parts of the engine that a model with such layers has instead.

A running sequence has the slot of its row. A prompt that siblings share is prefilled into a slot of its own, and each
sibling starts with a copy of it (`Step.state_copies`). When all siblings have started, the prompt's slot and pages are
free. A state is that of its last token alone, so

- a preempted sequence is computed again from its first token, or from a new slot of its prompt;
- the prefix cache is off: pages of an earlier sequence do not tell the state at their end;
- there are no drafts (config/rules_shape.py).

If no slot is left for a prompt, its sibling prefills the prompt alone. Bits never depend on any of this: a state
follows from a sequence's tokens, whatever pieces they were computed in (kernels/delta_rule/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octetrl.config.memory import state_slots
from octetrl.engine.block_manager import BlockManager
from octetrl.engine.kv_cache import KVCache
from octetrl.engine.model_runner import ModelRunner, Results
from octetrl.engine.pinned import to_device
from octetrl.engine.request import NO_ROW, Chunk, Prefix, RequestGroup, RunningSequence, Step
from octetrl.engine.scheduler import Scheduler
from octetrl.engine.transcript import Batch
from octetrl.kernels.delta_rule.state import SlotRows, copy_slots
from octetrl.layers.context import PagedContext
from octetrl.layers.sequence_slots import SequenceSlots
from octetrl.models.blocks.gated_delta.module import GatedDelta
from octetrl.models.decoder import Decoder

IDLE = -1  # the slot of a row that belongs to no sequence


class SequenceStates:
    """The slots of every layer with linear attention. Their content needs no clearing."""

    def __init__(self, model: Decoder, slots: int, device: torch.device) -> None:
        blocks = {index: layer.attention for index, layer in enumerate(model.decoder_layers())}
        self.layers = {
            index: block.empty_state(slots, device) for index, block in blocks.items() if isinstance(block, GatedDelta)
        }
        self._device = device

    def slots_of(self, context: PagedContext, slot_B: Tensor, *, one_chunk: bool) -> PagedContext:
        """The context of a forward whose sequences have these slots, int64. `one_chunk`: a row for each of them."""
        bounds_B1 = context.cu_seqlens_q_B1
        first_B = context.context_lens_B - (bounds_B1[1:] - bounds_B1[:-1])
        rows = SlotRows(bounds_B1, slot_B, first_B.long(), context.max_query_len, one_chunk)
        return replace(context, states=SequenceSlots(self.layers, rows))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """For each (a, b), copies slot `a` to slot `b` in every layer. The host does not wait for the device."""
        if copies:
            source, target = to_device(np.array(copies, dtype=np.int64).T, self._device).unbind()
            for state in self.layers.values():
                copy_slots(state, source, target)


class StateRunner(ModelRunner):
    """`states`: allocated by the engine before its pages, which take what memory is left."""

    def __init__(self, model: Decoder, *, max_batch: int, **options: Any) -> None:
        super().__init__(model, max_batch=max_batch, **options)
        self.prompts = None  # a state follows from one row at a time
        self.states: SequenceStates | None = None
        self._chunk_slots: Tensor | None = None

    def wake(self) -> None:
        if self.states is None:
            self.states = SequenceStates(self.model, state_slots(self._max_batch), self.device)

    def sleep(self) -> None:
        self.states = None

    def launch(self, step: Step, batch: Batch, cache: KVCache) -> Results | None:
        self._slots.copy(step.state_copies)
        return super().launch(step, batch, cache)

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


class StateScheduler(Scheduler):
    """Prompts have the slots behind those of the rows."""

    def __init__(self, blocks: BlockManager, max_batch: int, prefill_chunk: int, *, keeps_prefixes: bool) -> None:
        super().__init__(blocks, max_batch, prefill_chunk, keeps_prefixes=False)
        self._free_slots = list(range(max_batch, state_slots(max_batch)))
        self._slot_of: dict[Prefix, int] = {}
        self._copied_from: dict[RunningSequence, int] = {}  # slots of prompts, of those that start with them

    def _make_prefix(self, group: RequestGroup) -> None:
        if self._free_slots:
            super()._make_prefix(group)
            assert group.prefix is not None
            self._slot_of[group.prefix] = self._free_slots.pop()

    def _drop_prefix(self, group: RequestGroup) -> None:
        assert group.prefix is not None
        self._free_slots.append(self._slot_of.pop(group.prefix))
        super()._drop_prefix(group)

    def _run(self, sequence: RunningSequence) -> None:
        super()._run(sequence)
        if sequence.group.prefix is not None:
            self._copied_from[sequence] = self._slot_of[sequence.group.prefix]

    def _leave(self, sequence: RunningSequence) -> None:
        super()._leave(sequence)
        self._copied_from.pop(sequence, None)

    def _start_prefilling(self, step: Step) -> None:
        starting = list(self._starting)
        super()._start_prefilling(step)
        started = [one for one in starting if one.row != NO_ROW and one in self._copied_from]
        step.state_copies += [(self._copied_from.pop(one), one.row) for one in started]
        next_group = self.waiting[0].group if self.waiting else None
        for group in list(self._prefixed):
            if group is not next_group and group.prefix is not None and group.prefix.is_cached:
                self._drop_prefix(group)  # its siblings have started

    def _plan_chunks(self, step: Step) -> None:
        super()._plan_chunks(step)
        step.chunks = [replace(chunk, slot=self._slot(chunk.owner)) for chunk in step.chunks]

    def _slot(self, owner: Prefix | RunningSequence) -> int:
        return self._slot_of[owner] if isinstance(owner, Prefix) else owner.row

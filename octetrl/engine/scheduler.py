"""Who runs next: continuous batching over a fixed number of pages.

Every step takes all sequences that are ready to decode and up to `prefill_chunk` tokens of those that are not; a
finished sequence makes room at once. Admission is first come, first served, a sequence after its elder siblings. The
first sibling brings the group's prefix with it; the others share its pages, and take a copy of the last, partly filled
one when they come to write there.

A sequence is admitted when the pages it needs to start are there and one more remains for each running sequence to
grow into. That is a guess, so pages can run out. Then, in this order: prefixes that no running sequence uses are
dropped; the newest running sequence is preempted, which gives up its pages and keeps its tokens, and is prefilled
again when its turn comes; a sequence left alone drops its own group's prefix. All running sequences are older than all
waiting ones, so the eldest always goes on: nobody starves, and nothing is computed twice for a newcomer's sake.

What a sequence generates depends on none of this (sampler.py, kernels/attention_order.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from octetrl.engine.block_manager import BlockManager
from octetrl.engine.request import NO_ROW, Chunk, Group, Prefix, Sequence, Step


class Scheduler:
    """For one call of `generate`. `max_batch` sequences run at most, each with a row of its own."""

    def __init__(self, blocks: BlockManager, *, max_batch: int, prefill_chunk: int) -> None:
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # eldest first
        self.preemptions = 0
        self._prefill_chunk = prefill_chunk
        self._free_rows = list(range(max_batch - 1, -1, -1))
        self._prefixed: list[Group] = []

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences in the order given; each fits the cache when it is alone (the engine has checked)."""
        self.waiting.extend(sequences)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def next_step(self) -> Step:
        """The next forward. It always contains work while `has_work`."""
        step = Step()
        if self.waiting and self._free_rows:
            self._admit(step)
        budget = self._prefill_chunk
        for sequence in tuple(self.running):
            if sequence.row == NO_ROW or _awaits_prefix(sequence):
                continue
            if sequence.writable < len(sequence.token_ids) and not self._grow(sequence, step):
                continue
            if sequence.num_cached == sequence.num_to_cache:
                step.decode.append(sequence)
            else:
                budget -= _plan_chunk(step, sequence, budget)
        for group in self._prefixed:
            assert group.prefix is not None, "a group without prefix is listed as having one"
            budget -= _plan_chunk(step, group.prefix, budget)
        step.admitted = [sequence for sequence in step.admitted if sequence.row != NO_ROW]
        assert step.decode or step.chunks, "the scheduler made a step without work"
        return step

    def complete(self, step: Step) -> None:
        """The chunks of `step` are in the cache now."""
        for chunk in step.chunks:
            chunk.owner.num_cached = chunk.stop

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out for good."""
        self._leave(sequence)
        group = sequence.group
        group.num_unfinished -= 1
        if group.num_unfinished == 0 and group.prefix is not None:
            self._drop_prefix(group)

    def check(self) -> None:
        """Asserts the page accounting: every owner of a page is a running sequence or a prefix."""
        owners = [sequence.pages for sequence in self.running]
        owners += [group.prefix.pages for group in self._prefixed if group.prefix is not None]
        self.blocks.check(owners)

    def _admit(self, step: Step) -> None:
        reserved = sum(self._missing_pages(sequence) + 1 for sequence in self.running)
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            group = sequence.group
            start = self._prefix_tokens(sequence)
            needs_prefix = group.shares_prefix and group.prefix is None
            needed = self.blocks.pages_for(len(sequence.token_ids)) - start // self.blocks.page_size + 1
            needed += self.blocks.pages_for(start) if needs_prefix else 0
            if not self.running:
                for idle in self._idle_groups(besides=group):
                    self._drop_prefix(idle)
            elif self.blocks.num_free < reserved + needed:
                return
            self.waiting.popleft()
            if needs_prefix:
                self._make_prefix(group)
            self._start(sequence)
            step.admitted.append(sequence)
            reserved += self._missing_pages(sequence) + 1

    def _start(self, sequence: Sequence) -> None:
        group = sequence.group
        sequence.row = self._free_rows.pop()
        sequence.num_cached = self._prefix_tokens(sequence)
        sequence.writable = sequence.num_cached // self.blocks.page_size * self.blocks.page_size
        sequence.pages = [] if group.prefix is None else self.blocks.share(group.prefix.pages)
        group.num_running += 1
        self.running.append(sequence)

    def _prefix_tokens(self, sequence: Sequence) -> int:
        group = sequence.group
        return len(group.request.prompt_token_ids) - 1 if group.shares_prefix else 0

    def _missing_pages(self, sequence: Sequence) -> int:
        """Pages that the next token of a running sequence, and what it still prefills, will take."""
        present = sequence.writable // self.blocks.page_size
        return max(0, self.blocks.pages_for(len(sequence.token_ids)) - present)

    def _grow(self, sequence: Sequence, step: Step) -> bool:
        """Gives the sequence pages of its own for all its tokens; False where it had to be preempted itself."""
        blocks, pages = self.blocks, sequence.pages
        while sequence.writable < len(sequence.token_ids):
            index = sequence.writable // blocks.page_size
            while index == len(pages) or blocks.is_shared(pages[index]):
                if blocks.num_free == 0:
                    self._make_room(sequence)
                    if sequence.row == NO_ROW:
                        return False
                elif index == len(pages):
                    pages.append(blocks.allocate())
                else:
                    copy = blocks.allocate()
                    step.page_copies.append((pages[index], copy))
                    blocks.release([pages[index]])
                    pages[index] = copy
            sequence.writable += blocks.page_size
        step.repaged.append(sequence)
        return True

    def _make_room(self, sequence: Sequence) -> None:
        """One measure against having no free page, the mildest left. It may free none yet: call again."""
        idle = self._idle_groups(besides=sequence.group)
        if idle:
            self._drop_prefix(idle[0])
        elif len(self.running) > 1:
            self._preempt(self.running[-1])
        else:
            assert sequence.group.prefix is not None, "a sequence alone in the cache ran out of pages"
            self._drop_prefix(sequence.group)

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.pages)
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.group.num_running -= 1
        sequence.pages, sequence.num_cached, sequence.writable, sequence.row = [], 0, 0, NO_ROW

    def _make_prefix(self, group: Group) -> None:
        token_ids = group.request.prompt_token_ids[:-1]
        num_pages = self.blocks.pages_for(len(token_ids))
        group.prefix = Prefix(token_ids, [self.blocks.allocate() for _ in range(num_pages)])
        self._prefixed.append(group)

    def _drop_prefix(self, group: Group) -> None:
        assert group.prefix is not None, "this group's prefix is gone already"
        self.blocks.release(group.prefix.pages)
        group.prefix = None
        self._prefixed.remove(group)

    def _idle_groups(self, besides: Group) -> list[Group]:
        return [group for group in self._prefixed if group.num_running == 0 and group is not besides]


def _awaits_prefix(sequence: Sequence) -> bool:
    prefix = sequence.group.prefix
    if prefix is None or prefix.num_cached == prefix.num_to_cache:
        return False
    return sequence.num_cached == prefix.num_to_cache  # an elder sibling may be past a prefix that was made again


def _plan_chunk(step: Step, owner: Prefix | Sequence, budget: int) -> int:
    """Adds as much of what `owner` lacks as the budget allows; returns how much."""
    num_tokens = min(budget, owner.num_to_cache - owner.num_cached)
    if num_tokens:
        step.chunks.append(Chunk(owner, owner.num_cached, owner.num_cached + num_tokens))
    return num_tokens

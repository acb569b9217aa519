"""Plans the steps of the engine: continuous batching over a fixed number of pages.

A step is one of two forwards: of prompts' chunks, at most `prefill_chunk` tokens, or of one query of every ready
sequence. Prompts go first, because a fuller batch decodes at the same cost. But a forward of one short prompt costs
about `PREFILL_COST` decode forwards, in which the whole batch stands still. So prompts that arrive one by one wait for
each other until their waiting has cost as much, at most `LONGEST_WAIT` decode forwards. Then all of them are prefilled.
A finished sequence frees its place at once. Admission is first come, first served, and siblings are
admitted in order. The first sibling prefills the group's prefix. The others share its pages. Before a sibling writes
into the last, partly filled page, it copies that page.

The host launches forwards before it has read the results of earlier ones. Everything that a launch needs follows from
counting (`clock`, the number of decode forwards launched): a sequence's length, when it needs its next page, and when
it reaches its limit. The last two are stored in a calendar, so a step costs what changes in it, not the size of the
batch. Only results can show a stop token, so it is known a few forwards late. The tokens sampled in between are
dropped. The pages can be reused at once, because the device runs in order.

A sequence is admitted if the pages that it needs to start are free and one more is left for each running sequence. This
is a guess, so pages can run out. The scheduler then takes these measures, in this order:

- it drops prefixes that no running sequence uses;
- it preempts the newest running sequence, which frees its pages, keeps its tokens, and is prefilled again later;
- if only one sequence is left, it drops the prefix of that sequence's group.

Preemption waits until all results are read, because the tokens must be known. All running sequences are older than all
waiting ones, so the oldest always makes progress. No sequence starves, and no sequence is preempted for a newer one.

What a sequence generates depends on none of this (sampler.py, kernels/attention/attention_order.py).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from octetrl.engine.block_manager import BlockManager
from octetrl.engine.request import NO_ROW, Chunk, Prefix, RequestGroup, RunningSequence, Step

PREFILL_COST, LONGEST_WAIT = 2, 32  # decode forwards


class Scheduler:
    """The scheduler of one session. At most `max_batch` sequences run, each with its own row."""

    def __init__(self, blocks: BlockManager, max_batch: int, prefill_chunk: int, *, keeps_prefixes: bool) -> None:
        self.blocks = blocks
        self._keeps_prefixes = keeps_prefixes  # pages can be found after their owners have finished
        self.waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []  # oldest first
        self.preemptions = 0
        self.clock = 0  # decode forwards launched
        self._prefill_chunk = prefill_chunk
        self._free_rows = list(range(max_batch - 1, -1, -1))
        self._room_changed = False  # whether admission, refused last time, may succeed now
        self._prefixed: list[RequestGroup] = []
        self._awaiting: dict[Prefix, list[RunningSequence]] = {}  # siblings of prefixes that are being prefilled
        self._starting: list[RunningSequence] = []  # whose prefix is cached; they wait for own pages
        self._to_prefill: deque[Prefix | RunningSequence] = deque()
        self._waited = 0.0  # decode forwards, summed over the sequences that wait for prefill
        self._decoding: dict[RunningSequence, None] = {}
        self._joined: list[RunningSequence] = []  # since the last decode forward
        self._batch: tuple[RunningSequence, ...] | None = ()  # `_decoding` as a tuple; None: it has changed
        self._results_pending = False
        self._weights = 0  # how often `change_weights` was called
        self._due: defaultdict[int, list[RunningSequence]] = defaultdict(list)  # by clock: who needs a page or ends

    def submit(self, sequences: Iterable[RunningSequence]) -> None:
        """Queues sequences in the given order, behind the waiting ones. Each fits the cache if it runs alone (the
        session has checked)."""
        self.waiting.extend(sequences)
        self._room_changed = True

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def next_step(self, *, results_pending: bool = False) -> Step | None:
        """The next forward. None means: read pending results first, then call again; only while `results_pending`."""
        step = Step()
        self._results_pending = results_pending
        if self._room_changed and self.waiting and self._free_rows:
            self._admit()
        if results_pending and self._pages_needed() > self.blocks.num_free:
            return None
        self._start_prefilling(step)
        if not self._prefill_waits():
            self._plan_chunks(step)
        if not step.chunks:
            self._plan_decode(step)
        if not step.chunks and not step.decode:
            self._plan_chunks(step)
        if step.decode or step.chunks:
            return step
        assert results_pending, "the scheduler made a step without work"
        return None

    def complete(self, step: Step) -> None:
        """Records that `step` was launched: later forwards find its tokens in the cache."""
        self.clock += bool(step.decode)
        for chunk in step.chunks:
            chunk.owner.num_cached = chunk.stop
            if chunk.stop == chunk.owner.num_to_cache:
                self._cached(chunk.owner)

    def finish(self, sequence: RunningSequence) -> None:
        """Removes a finished sequence. All its tokens are known."""
        self._remember(sequence)
        self._leave(sequence)
        self._end(sequence.group)

    def cancel(self, sequence: RunningSequence) -> None:
        """Removes a waiting or running sequence. Its pages are free at once: forwards in flight write to them before
        any later forward runs. All tokens that it keeps are known."""
        if sequence.row == NO_ROW:
            self.waiting.remove(sequence)
            self._room_changed = True
        else:
            if sequence.joined_at is not None:  # otherwise its pages are not filled yet
                self._remember(sequence)
            self._leave(sequence)
        self._end(sequence.group)

    def change_weights(self, *, keeps_cache: bool) -> list[tuple[RunningSequence, int]]:
        """Prepares for other weights; all results are read. Nobody who starts later finds pages of the old ones. Unless
        running sequences keep their pages, preempts them. Returns those, with the row that each had."""
        self._weights += 1
        preempted = [] if keeps_cache else [(sequence, sequence.row) for sequence in reversed(self.running)]
        for sequence, _ in preempted:
            self._leave(sequence)
            self.waiting.appendleft(sequence)
            self._joined = []
        for group in list(self._prefixed):
            if not keeps_cache or (group.prefix is not None and group.prefix.is_cached):
                self._drop_prefix(group)
        self.blocks.forget()
        return preempted

    def _end(self, group: RequestGroup) -> None:
        group.num_unfinished -= 1
        if group.num_unfinished == 0 and group.prefix is not None:
            self._drop_prefix(group)

    def check(self) -> None:
        """Asserts the page accounting: every owner of a page is a running sequence or a prefix."""
        owners = [sequence.pages for sequence in self.running]
        owners += [group.prefix.pages for group in self._prefixed if group.prefix is not None]
        self.blocks.check(owners)

    # ------------------------------------------------------------ from waiting to running

    def _admit(self) -> None:
        reserved = sum(self._missing_pages(sequence) + 1 for sequence in self.running)
        while self.waiting and self._free_rows:
            sequence = self.waiting[0]
            group = sequence.group
            shares = self._shares_prefix(sequence)
            start = group.prompt_length - 1 if shares else 0
            needs_prefix = shares and group.prefix is None
            needed = self.blocks.pages_for(len(sequence.token_ids)) - start // self.blocks.page_size + 1
            needed += self.blocks.pages_for(start) if needs_prefix else 0
            if not self.running:
                for idle in self._idle_groups(besides=group):
                    self._drop_prefix(idle)
            elif self.blocks.num_free < reserved + needed:
                break
            self.waiting.popleft()
            if needs_prefix:
                self._make_prefix(group)
            self._run(sequence, group.prefix if shares else None)
            reserved += self._missing_pages(sequence) + 1
        self._room_changed = False

    def _run(self, sequence: RunningSequence, prefix: Prefix | None) -> None:
        sequence.row = self._free_rows.pop()
        sequence.weights = self._weights if prefix is None else prefix.weights
        if prefix is not None:
            sequence.pages = self.blocks.share(prefix.pages)
            sequence.num_cached = prefix.num_to_cache
        else:
            sequence.pages, sequence.num_cached = self._found(sequence.group, sequence.token_ids[:-1])
        sequence.writable = sequence.num_cached // self.blocks.page_size * self.blocks.page_size
        sequence.group.num_running += 1
        self.running.append(sequence)
        if prefix is not None and not prefix.is_cached:
            self._awaiting[prefix].append(sequence)
        else:
            self._starting.append(sequence)

    def _shares_prefix(self, sequence: RunningSequence) -> bool:
        """Whether it starts with its group's prefix."""
        return sequence.group.shares_prefix

    def _missing_pages(self, sequence: RunningSequence) -> int:
        """Number of pages for the next token of a running sequence and for what it still prefills."""
        present = sequence.writable // self.blocks.page_size
        return max(0, self.blocks.pages_for(sequence.length(self.clock)) - present)

    def _pages_needed(self) -> int:
        """An upper bound of the pages that this step allocates."""
        return sum(self._missing_pages(sequence) for sequence in (*self._starting, *self._due.get(self.clock, ())))

    # ------------------------------------------------------------ prefill

    def _start_prefilling(self, step: Step) -> None:
        starting, self._starting = self._starting, []
        for sequence in starting:
            if sequence.row == NO_ROW or not self._grow(sequence, step):
                continue
            if sequence.num_cached == sequence.num_to_cache:
                self._join(sequence, step)
            else:
                self._to_prefill.append(sequence)

    def _prefill_waits(self) -> bool:
        """Whether more prompts may come before a forward for them. It is asked once for each decode forward."""
        if not self._to_prefill:
            self._waited = 0.0
            return False
        tokens = sum(owner.num_to_cache - owner.num_cached for owner in self._to_prefill)
        cost = PREFILL_COST * len(self._decoding)
        if self._waited >= cost or tokens >= self._prefill_chunk:
            self._waited = math.inf  # until no chunk is left out
            return False
        waiting = sum(len(self._awaiting[owner]) if isinstance(owner, Prefix) else 1 for owner in self._to_prefill)
        self._waited += max(waiting, cost / LONGEST_WAIT)
        return True

    def _plan_chunks(self, step: Step) -> None:
        """Plans as many prefill chunks as the budget allows, first come, first served."""
        budget = self._prefill_chunk
        for owner in self._to_prefill:
            num_tokens = min(budget, owner.num_to_cache - owner.num_cached)
            if num_tokens == 0:
                return
            step.chunks.append(Chunk(owner, owner.num_cached, owner.num_cached + num_tokens))
            budget -= num_tokens
        if budget > 0:
            self._waited = 0.0

    def _cached(self, owner: Prefix | RunningSequence) -> None:
        self._to_prefill.remove(owner)
        self._remember(owner)
        if isinstance(owner, Prefix):
            self._starting += self._awaiting.pop(owner)
        else:
            self._starting.append(owner)

    # ------------------------------------------------------------ decode

    def _join(self, sequence: RunningSequence, step: Step) -> None:
        """Adds a ready sequence to the batch: it decodes from the next decode forward on."""
        sequence.joined_at = self.clock
        self._decoding[sequence] = None
        self._batch = None
        self._joined.append(sequence)
        self._note_due(sequence)
        step.new_pages += ((sequence.row, index, page) for index, page in enumerate(sequence.pages))

    def _plan_decode(self, step: Step) -> None:
        for sequence in self._due.pop(self.clock, ()):
            if sequence not in self._decoding or self._due_at(sequence) != self.clock:
                continue  # it has left the batch, or has rejoined it since
            if sequence.length(self.clock) == sequence.limit:
                self._stop_decoding(sequence)  # its last results are in flight
            elif self._grow(sequence, step):
                self._note_due(sequence)
        if self._batch is None:
            by_length = sorted(self._decoding, key=lambda sequence: -sequence.length(self.clock))
            self._batch = tuple(by_length)  # attention starts with the longest; all grow equally from here
        step.decode = self._batch
        step.joined = [sequence for sequence in self._joined if sequence in self._decoding]
        self._joined = []

    # ------------------------------------------------------------ drafts

    def grow_for_drafts(self, sequence: RunningSequence, num_drafts: int, step: Step) -> int:
        """Allocates pages for drafts behind a decoding sequence while every running one keeps a page to grow into.
        Returns how many of the drafts have a page."""
        length, page_size = sequence.length(self.clock), self.blocks.page_size
        spare = max(0, self.blocks.num_free - len(self.running))
        writable = sequence.writable
        self._grow(sequence, step, until=min(length + num_drafts, writable + spare * page_size))
        if sequence.writable > writable:
            self._note_due(sequence)
        return min(num_drafts, sequence.writable - length)

    def accept(self, sequence: RunningSequence, num_drafts: int) -> None:
        """Records that the last forward added so many tokens more than one, none of them past its pages."""
        assert sequence.joined_at is not None, "a sequence had drafts that does not decode"
        sequence.joined_at -= num_drafts
        self._note_due(sequence)

    def _due_at(self, sequence: RunningSequence) -> int:
        """The clock at which it needs a page, or at which it has reached its limit."""
        ahead = min(sequence.writable + 1, sequence.limit) - sequence.length(self.clock)
        return self.clock + ahead

    def _note_due(self, sequence: RunningSequence) -> None:
        self._due[self._due_at(sequence)].append(sequence)

    def _stop_decoding(self, sequence: RunningSequence) -> None:
        if sequence in self._decoding:
            del self._decoding[sequence]
            self._batch = None

    # ------------------------------------------------------------ pages

    def _grow(self, sequence: RunningSequence, step: Step, until: int | None = None) -> bool:
        """Allocates own pages for all tokens of the sequence, or for `until`. Returns False if the sequence itself was
        preempted."""
        blocks, pages, length = self.blocks, sequence.pages, until or sequence.length(self.clock)
        while sequence.writable < length:
            index = sequence.writable // blocks.page_size
            while index == len(pages) or blocks.is_shared(pages[index]):
                if blocks.num_free == 0:
                    self._make_room(sequence, step)
                    if sequence.row == NO_ROW:
                        return False
                elif index == len(pages):
                    pages.append(blocks.allocate())
                else:
                    copy = blocks.allocate()
                    step.page_copies.append((pages[index], copy))
                    blocks.release([pages[index]])
                    pages[index] = copy
            if sequence.joined_at is not None:
                step.new_pages.append((sequence.row, index, pages[index]))
            sequence.writable += blocks.page_size
        return True

    def _make_room(self, sequence: RunningSequence, step: Step) -> None:
        """Takes the mildest measure left to free a page. It may free none yet: call again."""
        idle = self._idle_groups(besides=sequence.group)
        if idle:
            self._drop_prefix(idle[0])
        elif len(self.running) > 1:
            self._preempt(self.running[-1], step)
        else:
            assert sequence.group.prefix is not None, "a sequence alone in the cache ran out of pages"
            self._drop_prefix(sequence.group)

    def _preempt(self, sequence: RunningSequence, step: Step) -> None:
        assert not self._results_pending, "a sequence was preempted whose tokens are not all known yet"
        own = set(sequence.pages)
        step.page_copies = [copy for copy in step.page_copies if copy[1] not in own]
        step.preempted.append((sequence, sequence.row))
        self._leave(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _leave(self, sequence: RunningSequence) -> None:
        self._stop_decoding(sequence)
        if sequence in self._to_prefill:
            self._to_prefill.remove(sequence)
        for siblings in (*self._awaiting.values(), self._starting):
            if sequence in siblings:
                siblings.remove(sequence)
        self.blocks.release(sequence.pages)
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.group.num_running -= 1
        sequence.pages, sequence.num_cached, sequence.writable = [], 0, 0
        sequence.row, sequence.joined_at = NO_ROW, None
        self._room_changed = True

    def _make_prefix(self, group: RequestGroup) -> None:
        token_ids = group.request.prompt_token_ids[:-1]
        pages, num_cached = self._found(group, token_ids)
        pages += (self.blocks.allocate() for _ in range(self.blocks.pages_for(len(token_ids)) - len(pages)))
        group.prefix = Prefix(token_ids, pages, num_cached, group.prompt_scores, self._weights)
        self._prefixed.append(group)
        if not group.prefix.is_cached:
            self._to_prefill.append(group.prefix)
            self._awaiting[group.prefix] = []

    def _found(self, group: RequestGroup, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Cached pages with the beginning of these tokens, and how many tokens that is. None if prefill must score."""
        pages = self.blocks.find(token_ids) if group.prompt_scores is None else []
        return pages, len(pages) * self.blocks.page_size

    def _remember(self, owner: Prefix | RunningSequence) -> None:
        if self._keeps_prefixes and owner.weights == self._weights:
            self.blocks.remember(owner.token_ids[: owner.num_to_cache], owner.pages)

    def _drop_prefix(self, group: RequestGroup) -> None:
        prefix = group.prefix
        assert prefix is not None, "this group's prefix is gone already"
        self.blocks.release(prefix.pages)
        group.prefix = None
        self._prefixed.remove(group)
        if not prefix.is_cached:
            self._to_prefill.remove(prefix)
            waiting = self._awaiting.pop(prefix)
            assert not waiting, "a prefix that siblings wait for was dropped"
        self._room_changed = True

    def _idle_groups(self, besides: RequestGroup) -> list[RequestGroup]:
        return [group for group in self._prefixed if group.num_running == 0 and group is not besides]


def longest_first(groups: Sequence[RequestGroup]) -> list[RequestGroup]:
    """Sorts requests by expected length, longest first. Requests without an expected length go first, as they came.

    The longest should start first, because otherwise the last ones run alone. A request of unknown length may be long.
    """

    def key(group: RequestGroup) -> float:
        expected = group.request.expected_tokens
        return -math.inf if expected is None else -expected

    return sorted(groups, key=key)

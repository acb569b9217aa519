"""The scheduler without a model: a simulated forward that checks what a real one would rely on."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.engine.block_manager import BlockManager
from octetrl.engine.request import NO_ROW, Prefix, RequestGroup, RunningSequence, Step
from octetrl.engine.scheduler import LONGEST_WAIT, PREFILL_COST, Scheduler
from octetrl.engine.stopping import Stopping, TextDecoder
from octetrl.records import GenerationRequest, SamplingParams

PAGE = 16


def sequences_of(prompt_length: int, num_siblings: int, max_new_tokens: int, index: int = 0) -> list[RunningSequence]:
    prompt = tuple(range(1000 * index, 1000 * index + prompt_length))
    asked = GenerationRequest(str(index), prompt, SamplingParams(max_new_tokens), num_siblings=num_siblings)
    group = RequestGroup(asked, index, prompt_length + max_new_tokens, num_unfinished=num_siblings)
    stopping = Stopping(frozenset(), (), group.limit, decode=TextDecoder(lambda token_ids: ""))
    return [RunningSequence(group, sibling, stopping, list(prompt)) for sibling in range(num_siblings)]


def token_of(sequence: RunningSequence, position: int) -> int:
    """What this sequence says at `position`: known to the device at once, to the host when results come."""
    prompt = sequence.group.request.prompt_token_ids
    return prompt[position] if position < len(prompt) else 7 * position + sequence.sibling


class Simulation:
    """A cache that holds token ids: what a query would read must be its own sequence's tokens. Results come `lag`
    forwards late; a sequence `ends_at` a number of tokens that the scheduler does not know of."""

    def __init__(self, num_pages: int, max_batch: int, prefill_chunk: int, lag: int = 0, page: int = PAGE) -> None:
        self.page = page
        self.blocks = BlockManager(num_pages, page)
        self.scheduler = Scheduler(self.blocks, max_batch=max_batch, prefill_chunk=prefill_chunk, keeps_prefixes=True)
        self.max_batch, self.prefill_chunk, self.lag = max_batch, prefill_chunk, lag
        self.slots: dict[tuple[int, int], int] = {}
        self.tables: dict[int, dict[int, int]] = {}  # row -> index -> page, as the device has them
        self.prefilled = 0
        self.steps: list[Step] = []
        self.ends_at: dict[RunningSequence, int] = {}
        self.later: dict[int, list[RunningSequence]] = {}  # by the number of steps made: who is submitted then
        self.cancelled: dict[int, list[RunningSequence]] = {}  # and who is cancelled
        self.known: dict[RunningSequence, int] = {}  # tokens whose results were read, of sequences that decode
        self.in_flight: deque[list[tuple[RunningSequence, int, int]]] = deque()  # (sequence, join, token's position)

    def run(self, sequences: list[RunningSequence], max_steps: int = 5000) -> None:
        self.scheduler.submit(sequences)
        while self.scheduler.has_work or self.later:
            assert len(self.steps) < max_steps, "no progress"
            self._come_and_go()
            if not self.scheduler.has_work:
                self.in_flight.clear()
                self.steps.append(Step())  # time goes by
                continue
            step = self.scheduler.next_step(results_pending=bool(self.in_flight))
            if step is not None:
                self.launch(step)
            if self.in_flight and (step is None or len(self.in_flight) > self.lag):
                self.take(self.in_flight.popleft())
        self.scheduler.check()
        assert self.blocks.num_used == 0

    def _come_and_go(self) -> None:
        self.scheduler.submit(self.later.pop(len(self.steps), []))
        for sequence in self.cancelled.pop(len(self.steps), []):
            if sequence.row != NO_ROW or sequence in self.scheduler.waiting:
                self.settle(sequence)
                self.scheduler.cancel(sequence)
                self.scheduler.check()

    def launch(self, step: Step) -> None:
        self.steps.append(step)
        self.scheduler.check()
        running = self.scheduler.running
        assert len(running) <= self.max_batch
        assert len({s.row for s in running}) == len(running)
        assert all(0 <= s.row < self.max_batch for s in running)
        for sequence, _ in step.preempted:
            assert not self.in_flight, "preempted with tokens unknown"
            self.settle(sequence)
        assert not (step.decode and step.chunks)
        self._copy_pages(step)
        for row, index, page in step.new_pages:
            self.tables.setdefault(row, {})[index] = page
        self._prefill(step)
        clock = self.scheduler.clock
        for sequence in step.decode:
            position = sequence.length(clock) - 1
            assert position + 1 < sequence.group.limit
            assert sequence.pages == [self.tables[sequence.row][i] for i in range(len(sequence.pages))]
            self._write(sequence, position, token_of(sequence, position))
            self._read(sequence, [token_of(sequence, p) for p in range(position + 1)])
        if step.decode:
            self.in_flight.append([(s, s.joined_at or 0, s.length(clock)) for s in step.decode])
        for sequence in step.joined:
            self.known[sequence] = len(sequence.token_ids)
        self.scheduler.complete(step)

    def take(self, results: list[tuple[RunningSequence, int, int]]) -> None:
        for sequence, joined_at, position in results:
            if sequence.row == NO_ROW or sequence.joined_at not in (joined_at, None) or sequence not in self.known:
                continue
            assert position == self.known[sequence]
            self.known[sequence] += 1
            if self.known[sequence] == self.ends_at.get(sequence, sequence.group.limit):
                self.settle(sequence)
                self.scheduler.finish(sequence)

    def settle(self, sequence: RunningSequence) -> None:
        count = self.known.pop(sequence, len(sequence.token_ids))
        sequence.token_ids += [token_of(sequence, p) for p in range(len(sequence.token_ids), count)]

    def _prefill(self, step: Step) -> None:
        num_chunk_tokens = sum(chunk.stop - chunk.start for chunk in step.chunks)
        assert num_chunk_tokens <= self.prefill_chunk
        self.prefilled += num_chunk_tokens
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.stop):
                self._write(chunk.owner, position, chunk.owner.token_ids[position])
        for chunk in step.chunks:
            self._read(chunk.owner, list(chunk.owner.token_ids[: chunk.stop]))

    def _copy_pages(self, step: Step) -> None:
        before = dict(self.slots)
        assert len({target for _, target in step.page_copies}) == len(step.page_copies), "two copies to one page"
        for source, target in step.page_copies:
            for offset in range(self.page):
                self.slots[target, offset] = before.get((source, offset), -1)

    def _write(self, owner: RunningSequence | Prefix, position: int, token: int) -> None:
        page = owner.pages[position // self.page]
        expected_owners = 1
        if isinstance(owner, Prefix):  # siblings share it before it is filled
            expected_owners += sum(page in s.pages for s in self.scheduler.running)
        assert self.blocks._owners[page] == expected_owners, "a shared page was written"
        self.slots[page, position % self.page] = token

    def _read(self, owner: RunningSequence | Prefix, expected: list[int]) -> None:
        held = [self.slots[owner.pages[p // self.page], p % self.page] for p in range(len(expected))]
        assert held == expected


def test_a_prompt_is_prefilled_once_and_shared() -> None:
    simulation = Simulation(num_pages=64, max_batch=16, prefill_chunk=2048)
    simulation.run(sequences_of(prompt_length=40, num_siblings=8, max_new_tokens=5))
    assert simulation.prefilled == 39
    assert len(simulation.steps) == 6  # the prefill, five tokens
    assert len(simulation.steps[1].page_copies) == 8  # 39 = 2 full pages and a part, which each sibling copies
    assert simulation.blocks.peak_used == 3 + 8


def test_a_prompt_is_prefilled_once_even_when_its_siblings_come_one_by_one() -> None:
    simulation = Simulation(num_pages=64, max_batch=3, prefill_chunk=2048)
    simulation.run(sequences_of(prompt_length=40, num_siblings=8, max_new_tokens=5))
    assert simulation.prefilled == 39


def test_whole_pages_are_not_copied() -> None:
    simulation = Simulation(num_pages=64, max_batch=16, prefill_chunk=2048)
    simulation.run(sequences_of(prompt_length=33, num_siblings=4, max_new_tokens=5))
    assert all(not step.page_copies for step in simulation.steps)


def test_prompts_are_prefilled_in_chunks_before_anyone_decodes() -> None:
    simulation = Simulation(num_pages=64, max_batch=16, prefill_chunk=16)
    simulation.run(sequences_of(5, 1, 20) + sequences_of(70, 1, 3, index=1))
    sizes = [sum(chunk.stop - chunk.start for chunk in step.chunks) for step in simulation.steps]
    assert sizes == [16, 16, 16, 16, 9] + [0] * 20
    assert [len(step.decode) for step in simulation.steps[5:]] == [2] * 3 + [1] * 17


@pytest.mark.parametrize("every", [1, 3, 40])
def test_prompts_that_come_one_by_one_wait_for_each_other(every: int) -> None:
    """64 sequences decode while others come: prefill costs about as much as their waiting, and none waits long."""
    simulation = Simulation(num_pages=4000, max_batch=200, prefill_chunk=4096)
    comes = {10 + every * i: sequences_of(20, 1, 3, index=64 + i) for i in range(120 // every)}
    simulation.later = dict(comes)
    simulation.run([s for i in range(64) for s in sequences_of(20, 1, 240, index=i)])
    at = {chunk.owner: i for i, step in enumerate(simulation.steps) if i > 5 for chunk in step.chunks}
    stood_still = 64 * PREFILL_COST * len(set(at.values()))
    waits = [at[sequence] - came for came, (sequence,) in comes.items() if sequence in at]
    assert len(waits) == len(comes) and max(waits) <= LONGEST_WAIT + len(set(at.values()))
    assert sum(waits) < 1.5 * stood_still
    at_once = 64 * PREFILL_COST * len(comes)
    assert stood_still + sum(waits) < {1: 0.3, 3: 0.5, 40: 1.5}[every] * at_once


def test_a_step_says_only_what_changed() -> None:
    """40 sequences of 100 tokens, each of which needs a page every 16: nothing else is said of them."""
    simulation = Simulation(num_pages=400, max_batch=64, prefill_chunk=4096, lag=2)
    simulation.run([s for i in range(40) for s in sequences_of(3 + i % 16, 1, 100, index=i)])
    decoding = [step for step in simulation.steps if step.decode]
    assert len(decoding) == 100
    assert len({id(step.decode) for step in decoding}) == 1
    assert [len(step.joined) for step in decoding] == [40] + [0] * 99
    assert sum(len(step.new_pages) for step in decoding[1:]) <= 40 * 7


def test_what_was_drawn_after_an_end_is_dropped_and_its_pages_are_used_again() -> None:
    simulation = Simulation(num_pages=8, max_batch=2, prefill_chunk=64, lag=2)
    sequences = [s for i in range(6) for s in sequences_of(10, 1, 40, index=i)]
    simulation.ends_at = {sequence: 13 + 3 * i for i, sequence in enumerate(sequences)}
    simulation.run(sequences)
    assert [len(sequence.token_ids) for sequence in sequences] == list(simulation.ends_at.values())


def test_preemption_takes_the_newest_and_brings_it_back() -> None:
    simulation = Simulation(num_pages=6, max_batch=8, prefill_chunk=64)
    sequences = [s for i in range(3) for s in sequences_of(10, 1, 70, index=i)]
    finish_order: list[int] = []
    finish = simulation.scheduler.finish

    def record(sequence: RunningSequence) -> None:
        finish_order.append(sequence.group.index)
        finish(sequence)

    simulation.scheduler.finish = record  # type: ignore[method-assign]
    simulation.run(sequences)
    assert simulation.scheduler.preemptions > 0
    assert finish_order == [0, 1, 2]
    assert all(len(s.token_ids) == 80 for s in sequences)


def test_a_prefix_that_nobody_uses_makes_room_for_the_eldest() -> None:
    """The group is preempted, and its prompt's two pages are all that the first sequence can still take."""
    simulation = Simulation(num_pages=6, max_batch=2, prefill_chunk=64)
    simulation.run(sequences_of(10, 1, 70) + sequences_of(33, 2, 30, index=1))
    assert simulation.scheduler.preemptions > 0
    assert simulation.prefilled > 9 + 32  # the prompt had to be prefilled again


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(1, 50)), min_size=1, max_size=5),
    st.integers(1, 10),
    st.integers(1, 6),
    st.sampled_from([16, 37, 256]),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_nothing_is_lost_or_mixed_up_whatever_the_cache(
    shapes: list[tuple[int, int, int]],
    spare_pages: int,
    max_batch: int,
    prefill_chunk: int,
    lag: int,
    chance: random.Random,
) -> None:
    """The smallest cache allowed holds just the longest sequence."""
    longest = max(prompt + new - 1 for prompt, _, new in shapes)
    simulation = Simulation(-(-longest // PAGE) + spare_pages - 1, max_batch, prefill_chunk, lag)
    sequences = [s for i, shape in enumerate(shapes) for s in sequences_of(*shape, index=i)]
    for sequence in sequences:
        simulation.ends_at[sequence] = chance.randint(sequence.prompt_length + 1, sequence.group.limit)
    simulation.run(sequences)
    for sequence in sequences:
        assert sequence.token_ids == [token_of(sequence, p) for p in range(simulation.ends_at[sequence])]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 4), st.integers(1, 50), st.integers(0, 90), st.integers(0, 150)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 10),
    st.integers(1, 6),
    st.sampled_from([16, 37, 256]),
    st.integers(0, 3),
)
def test_nothing_is_lost_or_mixed_up_whoever_comes_and_goes(
    visits: list[tuple[int, int, int, int, int]], spare_pages: int, max_batch: int, prefill_chunk: int, lag: int
) -> None:
    """A visit: prompt, siblings, new tokens, when it comes, when it is cancelled; prompts repeat earlier ones."""
    longest = max(prompt + new - 1 for prompt, _, new, _, _ in visits)
    simulation = Simulation(-(-longest // PAGE) + spare_pages - 1, max_batch, prefill_chunk, lag)
    stayed = []
    for index, (prompt, num_siblings, new, comes, goes) in enumerate(visits):
        sequences = sequences_of(prompt, num_siblings, new, index=index % 2)
        simulation.later.setdefault(comes, []).extend(sequences)
        if goes > comes and goes < 100:
            simulation.cancelled.setdefault(goes, []).extend(sequences[goes % 2 :])
            sequences = sequences[: goes % 2]
        stayed += sequences
    simulation.run([])
    for sequence in stayed:
        assert sequence.token_ids == [token_of(sequence, p) for p in range(sequence.group.limit)]


def test_a_prompt_that_goes_on_from_an_earlier_answer_prefills_what_is_new() -> None:
    simulation = Simulation(num_pages=64, max_batch=8, prefill_chunk=2048)
    (first,) = sequences_of(prompt_length=40, num_siblings=1, max_new_tokens=30)
    simulation.run([first])
    assert simulation.prefilled == 39
    turn = (*first.token_ids, 8, 9)  # 72 tokens; of the first 69, which were cached, 64 fill pages
    asked = GenerationRequest("turn", turn, SamplingParams(5), num_siblings=2)
    group = RequestGroup(asked, 0, len(turn) + 5, num_unfinished=2)
    stopping = Stopping(frozenset(), (), group.limit, decode=TextDecoder(lambda token_ids: ""))
    simulation.prefilled = 0
    simulation.run([RunningSequence(group, sibling, stopping, list(turn)) for sibling in range(2)])
    assert simulation.prefilled == 71 - 64
    simulation.blocks.forget()
    simulation.prefilled = 0
    simulation.run(sequences_of(prompt_length=40, num_siblings=1, max_new_tokens=30))
    assert simulation.prefilled == 39


# ---------------------------------------------------------------- pages and their owners


def test_a_page_is_free_when_its_last_owner_lets_go() -> None:
    blocks = BlockManager(num_pages=4, page_size=16)
    pages = [blocks.allocate(), blocks.allocate()]
    shared = blocks.share(pages)
    assert blocks.is_shared(pages[0]) and blocks.num_used == 2
    blocks.release(pages)
    assert not blocks.is_shared(shared[0]) and blocks.num_used == 2
    blocks.release(shared)
    assert blocks.num_free == 4 and blocks.peak_used == 2


def test_pages_for() -> None:
    blocks = BlockManager(num_pages=4, page_size=16)
    assert [blocks.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_misuse_is_an_error() -> None:
    blocks = BlockManager(num_pages=1, page_size=16)
    page = blocks.allocate()
    with pytest.raises(AssertionError, match="none of 1 pages is free"):
        blocks.allocate()
    with pytest.raises(AssertionError, match="do not explain"):
        blocks.check([])
    blocks.release([page])
    with pytest.raises(AssertionError, match="has no owner"):
        blocks.release([page])
    with pytest.raises(AssertionError, match="cannot be shared"):
        blocks.share([page])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 99)), max_size=60))
def test_counts_are_always_explained_by_the_owners(actions: list[tuple[str, int]]) -> None:
    blocks = BlockManager(num_pages=5, page_size=16)
    owners: list[list[int]] = []
    for action, choice in actions:
        if action == "allocate" and blocks.num_free:
            owners.append([blocks.allocate()])
        elif action == "share" and owners:
            owners.append(blocks.share(owners[choice % len(owners)]))
        elif action == "release" and owners:
            blocks.release(owners.pop(choice % len(owners)))
        blocks.check(owners)


def test_what_a_free_page_holds_is_found_until_the_page_is_taken() -> None:
    blocks = BlockManager(num_pages=4, page_size=2)
    pages = [blocks.allocate() for _ in range(3)]
    blocks.remember((1, 2, 3, 4, 5), pages)  # two full pages and a half
    blocks.release(pages)
    assert blocks.num_free == 4
    assert blocks.find((1, 2, 3, 9)) == pages[:1]
    assert blocks.find((1, 2, 3, 4, 5, 6)) == pages[:2] and blocks.is_shared(pages[0])
    assert blocks.find((3, 4)) == []  # a page is its tokens and all before them
    for owner in (pages[:1], pages[:2]):
        blocks.release(owner)
    blank = [blocks.allocate(), blocks.allocate()]
    assert not set(blank) & set(pages[:2])  # blank pages go first,
    assert [blocks.allocate(), blocks.allocate()] == pages[1::-1]  # then a sequence's last ones, released longest ago
    assert blocks.find((1, 2)) == []
    blocks.check([blank, pages[:2]])


def test_forgetting_frees_nothing_and_finds_nothing() -> None:
    blocks = BlockManager(num_pages=2, page_size=2)
    pages = [blocks.allocate(), blocks.allocate()]
    blocks.remember((1, 2, 3, 4), pages)
    blocks.release(pages[1:])
    blocks.forget()
    assert blocks.num_free == 1 and blocks.find((1, 2, 3, 4)) == []
    blocks.check([pages[:1]])

"""The scheduler without a model: a simulated forward that checks what a real one would rely on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.engine.block_manager import BlockManager
from octetrl.engine.request import Group, Prefix, Sequence, Step
from octetrl.engine.scheduler import Scheduler
from octetrl.engine.stopping import Stopping
from octetrl.records import GenerationRequest, SamplingParams

PAGE = 16


def sequences_of(prompt_length: int, num_siblings: int, max_new_tokens: int, index: int = 0) -> list[Sequence]:
    prompt = tuple(range(1000 * index, 1000 * index + prompt_length))
    asked = GenerationRequest(str(index), prompt, SamplingParams(max_new_tokens), num_siblings=num_siblings)
    group = Group(asked, index, prompt_length + max_new_tokens, num_unfinished=num_siblings)
    stopping = Stopping(frozenset(), (), group.limit, decode=lambda token_ids: "")
    return [Sequence(group, sibling, stopping, list(prompt)) for sibling in range(num_siblings)]


class Simulation:
    """A cache that holds token ids: what a query would read must be its own sequence's tokens."""

    def __init__(self, num_pages: int, max_batch: int, prefill_chunk: int) -> None:
        self.blocks = BlockManager(num_pages, PAGE)
        self.scheduler = Scheduler(self.blocks, max_batch=max_batch, prefill_chunk=prefill_chunk)
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.slots: dict[tuple[int, int], int] = {}
        self.prefilled = 0
        self.steps: list[Step] = []

    def run(self, sequences: list[Sequence], max_steps: int = 5000) -> None:
        self.scheduler.submit(sequences)
        while self.scheduler.has_work:
            assert len(self.steps) < max_steps, "no progress"
            self.step()
        self.scheduler.check()
        assert self.blocks.num_used == 0

    def step(self) -> None:
        step = self.scheduler.next_step()
        self.steps.append(step)
        self.scheduler.check()
        assert len(self.scheduler.running) <= self.max_batch
        assert len({s.row for s in self.scheduler.running}) == len(self.scheduler.running)
        assert all(0 <= s.row < self.max_batch for s in self.scheduler.running)
        self._copy_pages(step)
        num_chunk_tokens = sum(chunk.stop - chunk.start for chunk in step.chunks)
        assert num_chunk_tokens <= self.prefill_chunk
        self.prefilled += num_chunk_tokens
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.stop):
                self._write(chunk.owner, position)
        for sequence in step.decode:
            self._write(sequence, len(sequence.token_ids) - 1)
        for chunk in step.chunks:
            self._read(chunk.owner, chunk.stop)
        self.scheduler.complete(step)
        for sequence in step.decode:
            self._read(sequence, len(sequence.token_ids))
            token = 7 * len(sequence.token_ids) + sequence.sibling
            sequence.append(token, 0.0)
            if sequence.stopping.after(token, len(sequence.token_ids)):
                self.scheduler.finish(sequence)

    def _copy_pages(self, step: Step) -> None:
        before = dict(self.slots)
        for source, target in step.page_copies:
            for offset in range(PAGE):
                self.slots[target, offset] = before.get((source, offset), -1)

    def _write(self, owner: Sequence | Prefix, position: int) -> None:
        page = owner.pages[position // PAGE]
        expected_owners = 1
        if isinstance(owner, Prefix):  # siblings share it before it is filled
            expected_owners += sum(page in s.pages for s in self.scheduler.running)
        assert self.blocks._owners[page] == expected_owners, "a shared page was written"
        self.slots[page, position % PAGE] = owner.token_ids[position]

    def _read(self, owner: Sequence | Prefix, num_tokens: int) -> None:
        held = [self.slots[owner.pages[p // PAGE], p % PAGE] for p in range(num_tokens)]
        assert held == list(owner.token_ids[:num_tokens])


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


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    simulation = Simulation(num_pages=64, max_batch=16, prefill_chunk=16)
    simulation.run(sequences_of(5, 1, 20) + sequences_of(70, 1, 3, index=1))
    sizes = [sum(chunk.stop - chunk.start for chunk in step.chunks) for step in simulation.steps]
    assert sizes[:6] == [16, 16, 16, 16, 9, 0]
    assert all(step.decode for step in simulation.steps[1:])


def test_preemption_takes_the_newest_and_brings_it_back() -> None:
    simulation = Simulation(num_pages=6, max_batch=8, prefill_chunk=64)
    sequences = [s for i in range(3) for s in sequences_of(10, 1, 70, index=i)]
    finish_order: list[int] = []
    finish = simulation.scheduler.finish

    def record(sequence: Sequence) -> None:
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
)
def test_nothing_is_lost_or_mixed_up_whatever_the_cache(
    shapes: list[tuple[int, int, int]], spare_pages: int, max_batch: int, prefill_chunk: int
) -> None:
    """The smallest cache allowed holds just the longest sequence."""
    longest = max(prompt + new - 1 for prompt, _, new in shapes)
    simulation = Simulation(-(-longest // PAGE) + spare_pages - 1, max_batch, prefill_chunk)
    sequences = [s for i, shape in enumerate(shapes) for s in sequences_of(*shape, index=i)]
    simulation.run(sequences)
    for sequence in sequences:
        assert len(sequence.token_ids) == sequence.group.limit
        prompt = sequence.group.request.prompt_token_ids
        expected = [7 * n + sequence.sibling for n in range(len(prompt), sequence.group.limit)]
        assert sequence.token_ids == [*prompt, *expected]

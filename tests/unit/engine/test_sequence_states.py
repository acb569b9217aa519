"""Slots of states without a model: a simulated forward continues only from the state of the token before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.config.memory import state_slots
from octetrl.config.schema import EngineConfig
from octetrl.engine.request import RequestGroup, RunningSequence, Step
from octetrl.engine.sequence_states import StateBlocks, StateScheduler
from octetrl.engine.stopping import Stopping, TextDecoder
from octetrl.records import GenerationRequest, SamplingParams
from octetrl.shapes.delta_rule import CHUNK
from tests.unit.engine.test_scheduler import PAGE, Simulation, sequences_of, token_of

CONFIG = EngineConfig(page_size=PAGE)


def slots_of(max_batch: int, snapshots: int = 4) -> range:
    config = CONFIG.model_copy(update={"max_batch": max_batch, "state_snapshots": snapshots})
    return range(max_batch, state_slots(config, max_batch))


class StateSimulation(Simulation):
    """A slot holds the tokens that its state is of. Nothing of it is cleared: a first token replaces what is there. It
    may go back to the start of its last chunk."""

    def __init__(
        self, num_pages: int, max_batch: int, prefill_chunk: int, lag: int = 0, page: int = PAGE, snapshots: int = 4
    ) -> None:
        super().__init__(num_pages, max_batch, prefill_chunk, lag, page)
        self.slot_range = slots_of(max_batch, snapshots)
        self.blocks: StateBlocks = StateBlocks(self.slot_range, num_pages, page)
        self.states: dict[int, list[int]] = {}
        self.copied = 0
        self.open()

    def open(self) -> None:
        """A new session with the pages and slots of the one before."""
        self.scheduler: StateScheduler = StateScheduler(
            self.blocks, self.max_batch, self.prefill_chunk, keeps_prefixes=True
        )
        self.scheduler.since, self.scheduler.copy_states = self.since, self._copy

    def since(self, sequence: RunningSequence, skip: int) -> tuple[list[int], list[float]]:
        known = range(sequence.prompt_length + skip, self.known.get(sequence, len(sequence.token_ids)))
        return [token_of(sequence, p) for p in known], []

    def run(self, sequences: list[RunningSequence], max_steps: int = 5000) -> None:
        super().run(sequences, max_steps)
        free = {*self.blocks._free_slots, *self.blocks._snapshots.values()}
        assert free == set(self.slot_range) and not self.scheduler._slot_of, "a slot is lost"

    def launch(self, step: Step) -> None:
        self._copy(step.state_copies)
        slots = [chunk.slot for chunk in step.chunks] + [sequence.row for sequence in step.decode]
        assert len(set(slots)) == len(slots) and all(0 <= slot < self.slot_range.stop for slot in slots)
        for chunk in step.chunks:
            self._advance(chunk.slot, chunk.start, list(chunk.owner.token_ids[: chunk.stop]))
        for sequence in step.decode:
            length = sequence.length(self.scheduler.clock)
            self._advance(sequence.row, length - 1, [token_of(sequence, p) for p in range(length)])
        super().launch(step)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        for source, target in copies:
            if source in self.states:  # otherwise its sequence has left before its first token
                self.states[target] = self.states[source]
                self.copied += 1

    def _advance(self, slot: int, start: int, tokens: list[int]) -> None:
        if start > 0:
            held = self.states[slot]
            assert held[:start] == tokens[:start], "not the state of the token before"
            assert start >= (len(held) - 1) // CHUNK * CHUNK, "a full chunk is in the state"
        self.states[slot] = tokens


def test_siblings_copy_their_prompts_state_and_its_slot_is_free_again() -> None:
    simulation = StateSimulation(num_pages=200, max_batch=12, prefill_chunk=64)
    simulation.run([s for index in range(5) for s in sequences_of(40, 4, 10, index=index)])
    assert simulation.copied == 20 and simulation.prefilled == 5 * 39


def test_a_prompt_without_a_slot_is_prefilled_by_each_sibling() -> None:
    """Pairs of siblings fill the batch, and only one of four places has a slot more."""
    simulation = StateSimulation(num_pages=200, max_batch=8, prefill_chunk=512, snapshots=0)
    simulation.run([s for index in range(4) for s in sequences_of(40, 2, 10, index=index)])
    assert simulation.copied == 4 and simulation.prefilled == 6 * 39


def turn_of(tokens: list[int], new: int = 5) -> list[RunningSequence]:
    """A request whose prompt is these tokens."""
    asked = GenerationRequest("turn", tuple(tokens), SamplingParams(new))
    group = RequestGroup(asked, 0, len(tokens) + new, num_unfinished=1)
    stopping = Stopping(frozenset(), (), group.limit, decode=TextDecoder(lambda token_ids: ""))
    return [RunningSequence(group, 0, stopping, list(tokens))]


def conversation(page: int = 128, lag: int = 2, snapshots: int = 4) -> tuple[StateSimulation, list[int]]:
    """After a prompt of 100 tokens and an answer of 200, in a session of its own."""
    simulation = StateSimulation(40, 4, 2048, lag, page, snapshots)
    (first,) = sequences_of(100, 1, 200)
    simulation.run([first])
    simulation.open()
    simulation.prefilled = 0
    return simulation, first.token_ids


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize(("kept", "start"), [(300, 256), (256, 256), (255, 64), (110, 64), (64, 64), (63, 0)])
def test_the_next_turn_continues_from_the_last_snapshot_that_its_tokens_have(page: int, kept: int, start: int) -> None:
    """Snapshots are after 64 tokens, at the prompt's end, and after 256, at the answer's."""
    simulation, tokens = conversation(page)
    simulation.run(turn_of([*tokens[:kept], 8, 9, 10]))
    assert simulation.prefilled == kept + 2 - start
    simulation.open()
    simulation.blocks.forget()
    simulation.prefilled = 0
    simulation.run(turn_of(tokens))
    assert simulation.prefilled == 299


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("prompt", [65, 100, 193])
def test_siblings_of_a_prompt_that_is_cached_whole_have_its_part_of_a_page(prompt: int, siblings: int) -> None:
    simulation = StateSimulation(40, 4, 2048, page=128)
    simulation.run(sequences_of(prompt, siblings, 10))
    simulation.open()
    simulation.prefilled = 0
    simulation.slots |= {(page, offset): -7 for page in simulation.blocks._blank for offset in range(128)}
    simulation.run(sequences_of(prompt, siblings, 10))
    assert simulation.prefilled == (prompt - 1) % CHUNK


def test_pages_and_snapshots_go_together_and_the_oldest_goes_first() -> None:
    simulation, tokens = conversation(page=64, snapshots=1)
    assert len(simulation.blocks._snapshots) == 2  # a slot for prompts is one more
    simulation.run(turn_of([8, *tokens[:100]]))
    assert len(simulation.blocks._snapshots) == 2  # in place of the first prompt's
    simulation.open()
    simulation.prefilled = 0
    simulation.run(turn_of(tokens))
    assert simulation.prefilled == 299 - 256
    simulation.open()
    pages = [simulation.blocks.allocate() for _ in range(simulation.blocks.num_free)]
    assert not simulation.blocks._snapshots and not simulation.blocks._page_of
    simulation.blocks.release(pages)


def test_an_answer_that_ends_just_behind_a_chunk_leaves_its_prompts_snapshot() -> None:
    """Forwards that were launched before its end was known have moved its slot on."""
    for ends_at, start in ((255, 192), (256, 64), (257, 256), (258, 256)):
        simulation = StateSimulation(40, 4, 2048, lag=2, page=64)
        (first,) = sequences_of(100, 1, 300)
        simulation.ends_at[first] = ends_at
        simulation.run([first])
        simulation.open()
        simulation.prefilled = 0
        simulation.run(turn_of([*first.token_ids, *range(9)]))
        assert (ends_at, ends_at + 8 - simulation.prefilled) == (ends_at, start)


def test_a_preempted_sequence_continues_from_its_own_snapshot() -> None:
    simulation = StateSimulation(14, 4, 2048)
    simulation.run([s for index in range(2) for s in sequences_of(70, 1, 80, index=index)])
    assert simulation.scheduler.preemptions == 1
    assert simulation.prefilled == 2 * 69 + 48  # of 112 tokens, whose state after 64 was kept


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(1, 150), st.integers(1, 5), st.integers(1, 90), st.integers(0, 90), st.integers(0, 150)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 10),
    st.integers(1, 9),
    st.sampled_from([16, 37, 256]),
    st.integers(0, 3),
    st.sampled_from([(16, 0), (16, 1), (32, 5), (64, 2), (128, 5)]),
    st.randoms(use_true_random=False),
)
def test_states_follow_their_sequences_while_requests_come_and_go(
    visits: list[tuple[int, int, int, int, int]],
    spare_pages: int,
    max_batch: int,
    prefill_chunk: int,
    lag: int,
    sizes: tuple[int, int],
    chance: random.Random,
) -> None:
    """A visit: prompt, siblings, new tokens, when it comes, when it is cancelled. Few pages: some are preempted. Sizes:
    of a page, and how many snapshots have room."""
    longest = max(prompt + new - 1 for prompt, _, new, _, _ in visits)
    page, snapshots = sizes
    simulation = StateSimulation(-(-longest // page) + spare_pages - 1, max_batch, prefill_chunk, lag, page, snapshots)
    for index, (prompt, num_siblings, new, comes, goes) in enumerate(visits):
        sequences = sequences_of(prompt, num_siblings, new, index=index % 2)
        simulation.later.setdefault(comes, []).extend(sequences)
        if comes < goes < 100:
            simulation.cancelled.setdefault(goes, []).extend(sequences[goes % 2 :])
        for sequence in sequences:
            simulation.ends_at[sequence] = chance.randint(sequence.prompt_length + 1, sequence.group.limit)
    simulation.run([])


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_new_weights_keep_states_or_compute_them_again(keeps_cache: bool) -> None:
    simulation = StateSimulation(num_pages=200, max_batch=6, prefill_chunk=32)
    scheduler = simulation.scheduler
    scheduler.submit([s for index in range(3) for s in sequences_of(40, 3, 10, index=index)])
    for _ in range(9):
        step = scheduler.next_step()
        assert step is not None
        simulation.launch(step)
    for sequence, _ in scheduler.change_weights(keeps_cache=keeps_cache):
        simulation.settle(sequence)
    if not keeps_cache:
        simulation.states.clear()
    simulation.in_flight.clear()
    while scheduler.running or scheduler.waiting:
        step = scheduler.next_step()
        assert step is not None
        simulation.launch(step)
        for sequence in [s for s in scheduler.running if s.length(scheduler.clock) == s.limit]:
            simulation.settle(sequence)
            scheduler.finish(sequence)

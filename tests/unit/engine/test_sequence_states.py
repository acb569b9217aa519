"""Slots of states without a model: a simulated forward continues only from the state of the token before."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.config.memory import state_slots
from octetrl.engine.request import Step
from octetrl.engine.sequence_states import StateScheduler
from tests.unit.engine.test_scheduler import PAGE, Simulation, sequences_of, token_of


class StateSimulation(Simulation):
    """A slot holds the tokens that its state is of. Nothing of it is cleared: a first token replaces what is there."""

    def __init__(self, num_pages: int, max_batch: int, prefill_chunk: int, lag: int = 0) -> None:
        super().__init__(num_pages, max_batch, prefill_chunk, lag)
        self.scheduler = StateScheduler(self.blocks, max_batch, prefill_chunk, keeps_prefixes=True)
        self.states: dict[int, list[int]] = {}
        self.copied = 0

    def launch(self, step: Step) -> None:
        assert len({target for _, target in step.state_copies}) == len(step.state_copies), "two copies to one slot"
        self.states |= {target: self.states[source] for source, target in step.state_copies}
        self.copied += len(step.state_copies)
        slots = [chunk.slot for chunk in step.chunks] + [sequence.row for sequence in step.decode]
        assert len(set(slots)) == len(slots) and all(0 <= slot < state_slots(self.max_batch) for slot in slots)
        for chunk in step.chunks:
            self._advance(chunk.slot, chunk.start, list(chunk.owner.token_ids[: chunk.stop]))
        for sequence in step.decode:
            length = sequence.length(self.scheduler.clock)
            self._advance(sequence.row, length - 1, [token_of(sequence, p) for p in range(length)])
        super().launch(step)

    def _advance(self, slot: int, start: int, tokens: list[int]) -> None:
        assert start == 0 or self.states[slot] == tokens[:start], "not the state of the token before"
        self.states[slot] = tokens


def test_siblings_copy_their_prompts_state_and_its_slot_is_free_again() -> None:
    simulation = StateSimulation(num_pages=200, max_batch=12, prefill_chunk=64)
    simulation.run([s for index in range(5) for s in sequences_of(40, 4, 10, index=index)])
    assert simulation.copied == 20 and simulation.prefilled == 5 * 39
    assert len(simulation.scheduler._free_slots) == state_slots(12) - 12  # type: ignore[attr-defined]


def test_a_prompt_without_a_slot_is_prefilled_by_each_sibling() -> None:
    """Pairs of siblings fill the batch, and only one of four places has a slot more."""
    simulation = StateSimulation(num_pages=200, max_batch=8, prefill_chunk=512)
    simulation.run([s for index in range(4) for s in sequences_of(40, 2, 10, index=index)])
    assert simulation.copied == 4 and simulation.prefilled == 6 * 39


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 5), st.integers(1, 50), st.integers(0, 90), st.integers(0, 150)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 10),
    st.integers(1, 9),
    st.sampled_from([16, 37, 256]),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_states_follow_their_sequences_while_requests_come_and_go(
    visits: list[tuple[int, int, int, int, int]],
    spare_pages: int,
    max_batch: int,
    prefill_chunk: int,
    lag: int,
    chance: random.Random,
) -> None:
    """A visit: prompt, siblings, new tokens, when it comes, when it is cancelled. Few pages: some are preempted."""
    longest = max(prompt + new - 1 for prompt, _, new, _, _ in visits)
    simulation = StateSimulation(-(-longest // PAGE) + spare_pages - 1, max_batch, prefill_chunk, lag)
    for index, (prompt, num_siblings, new, comes, goes) in enumerate(visits):
        sequences = sequences_of(prompt, num_siblings, new, index=index % 2)
        simulation.later.setdefault(comes, []).extend(sequences)
        if comes < goes < 100:
            simulation.cancelled.setdefault(goes, []).extend(sequences[goes % 2 :])
        for sequence in sequences:
            simulation.ends_at[sequence] = chance.randint(sequence.prompt_length + 1, sequence.group.limit)
    simulation.run([])
    assert not simulation.scheduler._slot_of and not simulation.scheduler._copied_from  # type: ignore[attr-defined]


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

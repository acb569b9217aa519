"""Calls become segments: every sampled token once, after the prompt that it was sampled from."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.agents.calls import AgentCall, discarded, turns_of
from octetrl.records import Completion, FinishReason, Rollout, RolloutStatus, Task


def call(prompt: tuple[int, ...], answer: tuple[int, ...], *, constrained: bool = False, serial: int = 0) -> AgentCall:
    logprobs = tuple(-float(serial * 100 + place + 1) for place in range(len(answer)))
    return AgentCall(prompt, Completion(answer, logprobs, "", FinishReason.STOP, 0, "none"), constrained, f"{serial}")


@st.composite
def programs(draw: st.DrawFn) -> list[AgentCall]:
    """Calls that continue, branch, compact, retry, and answers that a grammar has constrained."""
    calls: list[AgentCall] = []
    for serial in range(draw(st.integers(1, 8))):
        prompt = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)))
        if calls and draw(st.integers(0, 9)) < 8:
            earlier = draw(st.sampled_from(calls))
            whole = earlier.token_ids
            kind = draw(st.sampled_from(["continues", "cut", "again"]))
            base = {
                "continues": whole,
                "cut": whole[: draw(st.integers(1, len(whole)))],
                "again": earlier.prompt_token_ids,
            }
            prompt = base[kind] + (prompt[:-1] if kind != "again" else ())
        answer = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=3)))
        calls.append(call(prompt, answer, constrained=draw(st.integers(0, 9)) == 0, serial=serial))
    return draw(st.permutations(calls))


@settings(max_examples=400, deadline=None)
@given(calls=programs())
def test_every_sampled_token_is_trained_once_in_its_context(calls: list[AgentCall]) -> None:
    left_out = discarded(calls)
    expected: Counter[tuple[tuple[int, ...], float]] = Counter()
    for number, one in enumerate(calls):
        if number not in left_out and not one.is_constrained:
            for place, logprob in enumerate(one.completion.logprobs):
                expected[one.prompt_token_ids + one.completion.token_ids[: place + 1], logprob] += 1
    rollout = Rollout(Task("t", "?"), turns_of(calls, left_out), RolloutStatus.SCORED, 1.0)
    trained: Counter[tuple[tuple[int, ...], float]] = Counter()
    for segment in rollout.segments:
        so_far: tuple[int, ...] = ()
        for turn in segment:
            so_far += turn.prompt_token_ids
            for token, logprob in zip(turn.completion.token_ids, turn.completion.logprobs, strict=True):
                so_far += (token,)
                trained[so_far, logprob] += 1
    assert trained == expected


def test_a_loop_is_one_segment_and_a_branch_another() -> None:
    first = call((1, 2), (3,))
    second = call((1, 2, 3, 4), (5, 6))
    branch = call((1, 2, 3, 7), (8,))
    segments = Rollout(Task("t", "?"), turns_of([first, second, branch]), RolloutStatus.SCORED, 1.0).segments
    assert [[turn.prompt_token_ids for turn in turns] for turns in segments] == [[(1, 2), (4,)], [(1, 2, 3, 7)]]


def test_an_answer_that_was_lost_is_discarded_and_one_that_ends_a_branch_is_not() -> None:
    lost, kept = call((1,), (2,)), call((1,), (3,), serial=1)
    assert discarded([lost, kept]) == set()
    assert discarded([lost, kept, call((1, 3, 4), (5,), serial=2)]) == {0}
    sibling = replace(lost, request=kept.request)  # the program compared both answers of one request
    assert discarded([sibling, kept, call((1, 3, 4), (5,), serial=2)]) == set()

"""Calls become segments: every sampled token once, after the prompt that it was sampled from."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.agents.calls import AgentCall, after, turns_of
from octetrl.records import Completion, FinishReason, Rollout, RolloutStatus, Task
from octetrl.rollout.history import Piece
from octetrl.rollout.samples import TrainedRollout, samples_of

END = 2


def call(prompt: Piece, answer: tuple[int, ...], *, constrained: bool = False, serial: int = 0) -> AgentCall:
    logprobs = tuple(-float(serial * 100 + place + 1) for place in range(len(answer)))
    completion = Completion(answer, logprobs, "", FinishReason.STOP, 0, "none")
    return AgentCall(prompt, after(prompt, answer, answer[-1] == END), completion, is_constrained=constrained)


tokens = st.sampled_from([(0,), (1,), (0, 1), (0, END), (END,), (0, 1, END)])  # few, so that many are equal


@st.composite
def programs(draw: st.DrawFn) -> list[AgentCall]:
    """Calls that continue, branch, compact and repeat, unread answers, and some that a grammar has constrained."""
    root = Piece()
    calls: list[AgentCall] = []
    for serial in range(draw(st.integers(1, 8))):
        prompt = root.add(draw(tokens), "")
        if calls and draw(st.integers(0, 9)) < 8:
            earlier = draw(st.sampled_from(calls))
            kinds = {
                "continues": lambda end: end.add(draw(tokens), ""),
                "before its end": lambda end: end.parent.add(draw(tokens), ""),
                "goes on": lambda end: end,
                "cut": lambda end: root.add(end.all_tokens()[: draw(st.integers(1, end.num_tokens))], ""),
            }
            kind = draw(st.sampled_from([*kinds, "again", "again"]))
            prompt = earlier.prompt if kind == "again" else kinds[kind](earlier.end)
        made = call(prompt, draw(tokens), constrained=draw(st.integers(0, 9)) == 0, serial=serial)
        made.is_unread = draw(st.integers(0, 9)) == 0
        calls.append(made)
    return draw(st.permutations(calls))


@settings(max_examples=400, deadline=None)
@given(calls=programs(), chance=st.randoms(use_true_random=False))
def test_every_sampled_token_is_trained_once_in_its_context(calls: list[AgentCall], chance: Random) -> None:
    expected: Counter[tuple[tuple[int, ...], float]] = Counter()
    for one in calls:
        assert one.end.all_tokens() == one.prompt.all_tokens() + one.completion.token_ids
        if not one.is_unread and not one.is_constrained:
            for place, logprob in enumerate(one.completion.logprobs):
                expected[one.prompt.all_tokens() + one.completion.token_ids[: place + 1], logprob] += 1
    rollout, other = (
        Rollout(Task("t", "?"), turns_of(order), RolloutStatus.SCORED, 1.0, calls=({},))
        for order in (calls, chance.sample(calls, len(calls)))
    )
    trained: Counter[tuple[tuple[int, ...], float]] = Counter()
    for segment in rollout.segments:
        so_far: tuple[int, ...] = ()
        for turn in segment:
            so_far += turn.prompt_token_ids
            for token, logprob in zip(turn.completion.token_ids, turn.completion.logprobs, strict=True):
                so_far += (token,)
                trained[so_far, logprob] += 1
    assert trained == expected
    if rollout.turns:
        ours, theirs = (samples_of([TrainedRollout(one, 1.0, 0)]) for one in (rollout, other))
        assert ours == theirs


def segments_of(calls: list[AgentCall]) -> list[list[tuple[int, ...]]]:
    rollout = Rollout(Task("t", "?"), turns_of(calls), RolloutStatus.SCORED, 1.0)
    return [[turn.prompt_token_ids for turn in turns] for turns in rollout.segments]


def test_a_loop_is_one_segment_and_a_branch_another() -> None:
    first = call(Piece().add((1, 0), ""), (3,))
    second = call(first.end.add((4,), ""), (5, 6))
    branch = call(first.end.add((7,), ""), (8,))
    assert segments_of([first, second, branch]) == [[(1, 0), (4,)], [(1, 0, 3, 7)]]


def test_an_answer_that_was_dropped_is_trained_on_and_an_unread_one_is_not() -> None:
    prompt = Piece().add((1,), "")
    dropped, kept = call(prompt, (0,)), call(prompt, (3,))
    longer = call(kept.end.add((4,), ""), (5,))
    assert segments_of([dropped, kept, longer]) == [[(1,)], [(1,), (4,)]]
    dropped.is_unread = True
    assert segments_of([dropped, kept, longer]) == [[(1,), (4,)]]


def test_an_answer_that_begins_another_is_a_segment_of_its_own() -> None:
    prompt = Piece().add((1,), "")
    ended, cut = call(prompt, (0, END)), call(prompt, (0,))
    assert ended.end.parent is cut.end and segments_of([ended, cut]) == [[(1,)], [(1,)]]


def test_a_long_rollout_holds_each_token_once() -> None:
    prompt, calls = Piece().add(range(2000), ""), []
    for serial in range(60):
        calls.append(call(prompt, tuple(range(300)), serial=serial))
        prompt = calls[-1].end.add(range(500), "")
    pieces = {one for last in calls for one in path(last.end)}
    assert sum(len(piece.token_ids) for piece in pieces) == calls[-1].end.num_tokens == 49_500
    (turns,) = Rollout(Task("t", "?"), turns_of(calls), RolloutStatus.SCORED, 1.0).segments
    assert len(turns) == 60


def path(piece: Piece | None) -> list[Piece]:
    return [] if piece is None else [piece, *path(piece.parent)]

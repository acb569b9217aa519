"""An open session: when a request comes, and who else is there, changes none of its bits; who leaves gives up its
pages at once; an unfinished answer continues in another engine."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

from octetrl.engine.engine import Engine
from octetrl.engine.session import Session
from octetrl.engine.weights import weight_set
from octetrl.models.decoder import Decoder
from octetrl.records import Completion, GenerationRequest, SessionEvent
from octetrl.system.errors import UserError
from tests.unit.engine.tiny_engine import CONTEXT_LENGTH, EOS, SPEC, Graphs, policy_of, request, tiny_engine

STOP = "X"
ASKED = [
    request("drawn", prompt_length=21, num_siblings=2, seed=1, max_new_tokens=20, ignore_eos=True),
    request("short", prompt_length=1, num_siblings=2, seed=2, max_new_tokens=9, top_k=20, top_p=0.9),
    request("greedy", prompt_length=33, seed=3, max_new_tokens=12, temperature=0.0),
    request("cool", prompt_length=16, num_siblings=3, seed=4, max_new_tokens=25, temperature=0.7, ignore_eos=True),
    request("stopped", prompt_length=40, num_siblings=2, seed=5, max_new_tokens=30, stop=(STOP, "QQ")),
    request("token", prompt_length=11, num_siblings=1, seed=6, max_new_tokens=30, stop_token_ids=(7, 9, 30)),
]
Answers = dict[tuple[str, int], Completion]
ROOMS = {  # engine settings, and forwards launched ahead
    "roomy": ({"page_size": 16}, 0),
    "ahead": ({"page_size": 16}, 2),
    "crowded": ({"page_size": 16, "prefill_chunk": 16, "max_batch": 3}, 2),
    "few pages": ({"page_size": 16, "kv_cache_tokens": 96}, 0),
    "few pages ahead": ({"page_size": 16, "kv_cache_tokens": 96}, 3),
    "no prefixes": ({"page_size": 16, "prefix_cache": "off"}, 1),
}


@cache
def all_alone(precision: str) -> Answers:
    return alone(precision, ASKED)


def alone(precision: str, asked: list[GenerationRequest]) -> Answers:
    found: Answers = {}
    for one in asked:
        for sibling, completion in enumerate(tiny_engine(precision).generate([one])[0]):
            found[one.id, sibling] = completion
    return found


def engine_of(room: str, precision: str = "bf16") -> Engine:
    config, lag = ROOMS[room]
    engine = tiny_engine(precision, **config)
    engine._lag = lag
    return engine


def finished(events: list[SessionEvent]) -> Answers:
    return {(e.request_id, e.sibling): e.completion for e in events if e.completion is not None}


def drain(session: Session) -> list[SessionEvent]:
    events = []
    while session.has_work:
        events += session.events()
        session._scheduler.check()
    return events


@pytest.mark.parametrize(
    ("room", "precision"),
    [(room, "bf16") for room in ROOMS] + [("crowded", "fp8_full"), ("few pages ahead", "fp8_dynamic")],
)
def test_whoever_comes_late_draws_what_he_would_alone(room: str, precision: str) -> None:
    engine = engine_of(room, precision)
    events: list[SessionEvent] = []
    with engine.session() as session:
        for one in ASKED:
            session.submit(one)
            for _ in range(5):
                events += session.events()
        events += drain(session)
        assert session.pages_in_use == 0
    assert finished(events) == all_alone(precision)
    if "few" in room:
        assert engine.metrics is not None and engine.metrics.preemptions > 0


@pytest.mark.parametrize("room", ["roomy", "crowded", "few pages ahead"])
def test_siblings_with_limits_of_their_own_end_there_and_keep_their_tokens(room: str) -> None:
    whole = request("group", prompt_length=21, num_siblings=4, seed=1, max_new_tokens=30, ignore_eos=True)
    limits = (30, 1, 17, 16)
    (expected,) = tiny_engine(page_size=16).generate([whole])
    (found,) = engine_of(room).generate([replace(whole, answer_limits=limits)])
    assert [one.token_ids for one in found] == [one.token_ids[:n] for one, n in zip(expected, limits, strict=True)]
    assert [one.logprobs for one in found] == [one.logprobs[:n] for one, n in zip(expected, limits, strict=True)]
    part = replace(whole, first_sibling=2, num_siblings=2, answer_limits=limits)  # of one of several workers
    assert engine_of(room).generate([part])[0] == found[2:]
    for wrong in ((30, 1, 17), (30, 1, 17, 0), (30, 1, 17, 31)):
        with pytest.raises(UserError, match=r"answer_limits is .*; give 1 to max_new_tokens for every sibling"):
            engine_of(room).generate([replace(whole, answer_limits=wrong)])


@pytest.mark.parametrize("room", ["roomy", "crowded", "few pages ahead"])
def test_streamed_tokens_are_the_completions(room: str) -> None:
    events: list[SessionEvent] = []
    with engine_of(room).session() as session:
        for number, one in enumerate(ASKED):
            session.submit(one, streams=number != 1)
            events += session.events()
        events += drain(session)
    whole = finished(events)
    assert whole == all_alone("bf16")
    for (request_id, sibling), completion in whole.items():
        told = [e for e in events if (e.request_id, e.sibling) == (request_id, sibling)]
        assert sum((e.token_ids for e in told), ()) == completion.token_ids
        assert sum((e.logprobs for e in told), ()) == completion.logprobs
        assert [e.completion is None for e in told] == [True] * (len(told) - 1) + [False]
        streams = request_id != ASKED[1].id
        assert len(told) == (len(completion.token_ids) if streams else 1)


@pytest.mark.parametrize(("room", "seed"), [(room, seed) for seed, room in enumerate(ROOMS)])
def test_who_is_cancelled_frees_his_pages_and_leaves_the_others_as_they_were(room: str, seed: int) -> None:
    chance = random.Random(seed)
    cancelled = {one.id for one in chance.sample(ASKED, 3)}
    after = {request_id: chance.randrange(12) for request_id in cancelled}
    events: list[SessionEvent] = []
    with engine_of(room).session() as session:
        for one in ASKED:
            session.submit(one, streams=True)
        clock = 0
        while session.has_work:
            for request_id in cancelled:
                if after[request_id] == clock:
                    session.cancel(request_id)
                    session._scheduler.check()
                    assert all(s.group.request.id != request_id for s in session._unfinished())
                    assert all(s.group.request.id != request_id for s in session._reported)
                    events = [e for e in events if e.request_id != request_id]
            events += session.events()
            session._scheduler.check()
            clock += 1
        assert session.pages_in_use == 0
        # pages of the cancelled are remembered only where they hold what they say: a second life finds no stale ones
        for one in ASKED:
            session.submit(one)
        again = drain(session)
    expected = all_alone("bf16")
    assert finished(events) == {key: value for key, value in expected.items() if key[0] not in cancelled}
    assert {e.request_id for e in events}.isdisjoint(cancelled)
    assert finished(again) == expected


def test_a_cancelled_request_gives_its_place_to_those_that_wait() -> None:
    first, second = request("a", 40, max_new_tokens=100, ignore_eos=True), request("b", 40, max_new_tokens=9)
    with tiny_engine(page_size=16, max_batch=1, kv_cache_tokens=160).session() as session:
        session.submit(request("never", num_siblings=3))
        session.cancel("never")
        assert not session.has_work and session.events() == []
        assert (session.metrics().steps, session.metrics().cancelled) == (0, 3), "it cost nothing"
        session.submit(first)
        for _ in range(10):
            session.events()
        session.submit(second)
        session.events()
        assert session.progress().waiting == 1
        session.cancel("a")
        assert session.pages_in_use == 0
        events = drain(session)
        session.cancel("a")  # unknown by now
        session.cancel("b")  # finished
        assert session.metrics().cancelled == 4 and session.metrics().completions == 1
    assert finished(events) == alone("bf16", [second])


def test_who_waited_behind_a_cancelled_one_is_admitted_at_once() -> None:
    with tiny_engine(page_size=16, kv_cache_tokens=160).session() as session:
        session.submit(request("runs", 60, max_new_tokens=90, ignore_eos=True))
        session.events()
        session.submit(request("large", 120, seed=1))
        session.submit(request("small", 5, seed=2))
        session.events()
        assert session.progress().waiting == 2
        session.cancel("large")
        session.events()
        assert session.progress().waiting == 0


def test_pages_that_were_not_filled_are_not_taken_for_filled() -> None:
    """Cancelled between two chunks of its prompt."""
    asked = [request("a", prompt_length=120), request("b", prompt_length=120, num_siblings=2)]
    for one in asked:
        with tiny_engine(page_size=16, prefill_chunk=16).session() as session:
            session.submit(one)
            session.events()
            session.cancel(one.id)
            session.submit(one)
            events = drain(session)
        assert finished(events) == alone("bf16", [one])


@pytest.mark.parametrize("lag", [0, 2])
def test_the_next_turn_of_a_conversation_finds_its_beginning(lag: int) -> None:
    engine = tiny_engine("fp8_full", page_size=16)
    engine._lag = lag
    first = request("first", prompt_length=40, max_new_tokens=40, ignore_eos=True, seed=3)
    other = request("other", prompt_length=12, max_new_tokens=90, ignore_eos=True, seed=4)
    events: list[SessionEvent] = []
    with engine.session() as session:
        session.submit(other)
        session.submit(first)
        while not any(e.request_id == "first" for e in events):
            events += session.events()
        told = finished(events)["first", 0].token_ids
        prefilled = session.metrics().prefilled_tokens
        turn = GenerationRequest("turn", (*first.prompt_token_ids, *told, 8, 9), first.sampling, seed=5)
        session.submit(turn)
        events += drain(session)
        assert session.metrics().prefilled_tokens - prefilled == 81 - 64
    assert finished(events) == alone("fp8_full", [first, other, turn])


def test_prefixes_outlive_the_session_until_new_weights_come() -> None:
    engine = tiny_engine(page_size=16, kv_cache_tokens=640)
    asked = request("a", prompt_length=40)
    for prefilled in (39, 7):
        with engine.session() as session:
            session.submit(asked)
            drain(session)
            assert session.metrics().prefilled_tokens == prefilled
    engine.publish(1)
    engine.generate([asked])
    assert engine.metrics is not None and engine.metrics.prefilled_tokens == 39


def test_of_those_submitted_at_once_the_longest_starts_first() -> None:
    engine, started = tiny_engine(max_batch=1), []
    run = engine._runner.launch

    def launch(step, batch, cache):
        started.extend(sequence.group.request.id for sequence in step.joined)
        return run(step, batch, cache)

    engine._runner.launch = launch
    with engine.session() as session:
        for name, expected in (("short", 3), ("long", 9), ("unknown", None)):
            session.submit(GenerationRequest(name, (3, 4), request().sampling, expected_tokens=expected))
        session.events()
        session.submit(GenerationRequest("longer", (3, 4), request().sampling, expected_tokens=99))
        drain(session)
    assert started == ["unknown", "long", "short", "longer"]


def test_what_cannot_be_served_is_refused_and_the_others_go_on() -> None:
    with tiny_engine(page_size=16, kv_cache_tokens=64).session() as session:
        session.submit(request("good"))
        session.events()
        for bad, said in (
            (request("good"), "not finished yet"),
            (request("long", prompt_length=CONTEXT_LENGTH), "leaves none to generate"),
            (request("large", prompt_length=40, max_new_tokens=60), "the KV cache has 4"),
        ):
            with pytest.raises(UserError, match=said):
                session.submit(bad)
        events = drain(session)
        session.submit(request("good"))  # its id is free again
        assert finished(drain(session)) == finished(events)
    assert finished(events) == alone("bf16", [request("good")])


def held_bytes(engine: Engine) -> list[bytes]:
    """All weights, codes and scales of the engine's model."""
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in engine._model.state_dict().values()]


def test_one_session_at_a_time_and_no_new_weights_meanwhile() -> None:
    engine, other = tiny_engine("fp8_full"), Decoder(SPEC, policy_of("fp8_full"), "train")
    other.random_init(7)
    before = held_bytes(engine)
    with engine.session() as session:
        session.submit(request())
        session.events()
        scales = engine.kv_scales
        assert scales is not None
        refused = (
            engine.session, lambda: engine.generate([request()]), lambda: engine.publish(1), engine.sleep,
            lambda: engine.set_kv_scales(scales), lambda: engine.put_weights(weight_set(other, 1, scales)),
        )  # fmt: skip
        for verb in refused:
            with pytest.raises(RuntimeError, match="while the engine has an open session"):
                verb()
        assert held_bytes(engine) == before  # refused before anything was copied
    assert engine._blocks is not None and engine._blocks.num_used == 0  # what was unfinished is cancelled
    assert engine.metrics is not None and engine.metrics.cancelled == 1
    engine.publish(1)


def test_a_step_that_fails_ends_the_session_and_the_pages_go() -> None:
    engine = tiny_engine(page_size=16, kv_cache_tokens=320)
    expected = engine.generate([request()])
    launch = engine._runner.launch

    def fail(step, batch, cache):
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"), engine.session() as session:
        session.submit(request())
        engine._runner.launch = fail
        session.events()
    assert engine._cache is None
    engine._runner.launch = launch
    assert engine.generate([request()]) == expected


def test_what_it_did_is_counted_while_it_goes_on() -> None:
    engine = tiny_engine(page_size=16)
    seen = []
    with engine.session(seen.append) as session:
        assert session.events() == [] and session.metrics().idle_share > 0.99
        session.submit(request("a", num_siblings=3, max_new_tokens=20))
        events = drain(session)
        metrics = session.metrics()
    tokens = sum(len(completion.token_ids) for completion in finished(events).values())
    assert (metrics.completions, metrics.generated_tokens, metrics.prompt_tokens) == (3, tokens, 10)
    assert 0 < metrics.idle_share < 1 and 0 < metrics.batch_occupancy < 1 and 0 < metrics.cache_occupancy <= 1
    assert len(seen) == metrics.steps and (seen[-1].done, seen[-1].total) == (3, 3)
    assert EOS not in {token for event in events for token in event.token_ids[:-1]}


def test_a_session_is_told_what_it_captured_itself() -> None:
    engine = tiny_engine()
    engine.generate([request()])
    assert engine.metrics is not None and engine.metrics.session_capture_seconds is None
    engine._runner.graphs = graphs = Graphs()  # type: ignore[assignment]
    for tokens, own, ever in ((2, 0.5, 0.5), (3, 0.75, 1.25), (0, 0.0, 1.25)):
        engine.generate([request(max_new_tokens=tokens, ignore_eos=True)] if tokens else [])
        assert engine.metrics is not None and graphs.seconds == ever
        assert (engine.metrics.session_capture_seconds, engine.metrics.capture_seconds) == (own, ever)


def test_an_open_sessions_cache_on_a_cpu_holds_whole_contexts_within_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes is not known, so not what the requests want, as with `generate`."""
    whole = CONTEXT_LENGTH // 16
    with tiny_engine(page_size=16, max_batch=4).session() as session:
        assert session.metrics().kv_capacity_tokens == 4 * (whole + 1) * 16
    monkeypatch.setattr("octetrl.engine.engine.OPEN_CACHE_BYTES", 1)
    with tiny_engine(page_size=16).session() as session:
        assert session.metrics().kv_capacity_tokens == CONTEXT_LENGTH
        session.submit(request(prompt_length=CONTEXT_LENGTH - 3, ignore_eos=True))
        assert len(drain(session)) == 1


# ---------------------------------------------------------------- in another engine


@pytest.mark.parametrize(
    ("room", "precision"), [("ahead", "bf16"), ("few pages ahead", "bf16"), ("crowded", "fp8_full")]
)
def test_an_answer_continues_in_another_engine(room: str, precision: str) -> None:
    """It moves with what it has said, as to another worker: tokens, log-probs, text and stops are those of one that
    never moved. A stop string may begin before the move."""
    for steps in (1, 9):
        moved: list[GenerationRequest] = []
        found: Answers = {}
        with engine_of(room, precision).session() as session:
            for one in ASKED:
                session.submit(one)
            for _ in range(steps):
                found |= finished(session.events())
            for (name, sibling), (token_ids, logprobs) in session.answers_so_far().items():
                whole = next(one for one in ASKED if one.id == name)
                said = (tuple(token_ids), tuple(logprobs))
                moved.append(replace(whole, id=f"{name} {sibling}", first_sibling=sibling, num_siblings=1, said=said))
        with engine_of("roomy", precision).session() as session:
            for one in moved:
                session.submit(one)
            while session.has_work:
                for (name, sibling), completion in finished(session.events()).items():
                    found[name.split()[0], sibling] = completion
        assert steps == 1 or any(one.said[0] for one in moved)
        assert found == all_alone(precision)


def test_what_cannot_continue_is_refused() -> None:
    with engine_of("roomy").session() as session:
        whole = request("whole", prompt_length=5, num_siblings=2, max_new_tokens=3)
        for wrong in (
            replace(whole, said=((5,), (-1.0,))),  # whose siblings?
            replace(whole, num_siblings=1, said=((5, 6), (-1.0,))),
            replace(whole, num_siblings=1, said=((5, 6, 7), (-1.0, -1.0, -1.0))),  # it has ended
        ):
            with pytest.raises(UserError, match=r"said is .*; give one sibling, fewer tokens than its limit"):
                session.submit(wrong)

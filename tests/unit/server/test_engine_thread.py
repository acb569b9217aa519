"""The engine's thread: what it is told, what it tells, and that nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from octetrl.records import SessionEvent
from octetrl.server.engine_thread import Accepted, EngineThread, Event
from octetrl.server.errors import ApiError
from tests.unit.engine.tiny_engine import request, tiny_engine

Told = SimpleQueue[tuple[str, Event]]


class Bench:
    def __init__(self, **config: Any) -> None:
        self.engine = tiny_engine(**config)
        self.thread = EngineThread(self.engine.session)
        self.told: Told = SimpleQueue()

    def start(self) -> None:
        self.thread.start(lambda events: [self.told.put(event) for event in events])  # type: ignore[func-returns-value]

    def next(self) -> tuple[str, Event]:
        return self.told.get(timeout=60)

    def finished(self) -> dict[str, SessionEvent]:
        found: dict[str, SessionEvent] = {}
        while self.thread._siblings or not self.told.empty():
            name, event = self.next()
            if isinstance(event, SessionEvent) and event.completion is not None:
                found[name] = event
        return found


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(page_size=16, kv_cache_tokens=160)
    bench.start()
    yield bench
    bench.thread.stop()
    assert not bench.thread.is_alive


def test_requests_are_accepted_or_refused_and_told(bench: Bench) -> None:
    asked = [request("a", seed=1), request("large", prompt_length=200), request("b", seed=2)]
    expected = [tiny_engine().generate([asked[n]])[0][0] for n in (0, 2)]
    for one in asked:
        bench.thread.submit(one, streams=False)
    told = [bench.next() for _ in range(5)]
    assert ("a", Accepted()) in told and ("b", Accepted()) in told
    assert [type(event) for name, event in told if name == "large"] == [ApiError]
    drawn = {name: event.completion for name, event in told if isinstance(event, SessionEvent)}
    assert [drawn["a"], drawn["b"]] == expected


def test_a_cancel_that_comes_with_the_request_is_obeyed(bench: Bench) -> None:
    launch, gate = bench.engine._runner.launch, threading.Event()

    def launch_later(*inputs: Any) -> Any:
        assert gate.wait(60)  # else "a" might get a token between its two commands
        return launch(*inputs)

    bench.engine._runner.launch = launch_later  # type: ignore[method-assign]
    bench.thread.submit(request("first", max_new_tokens=1), streams=False)
    assert bench.next() == ("first", Accepted())
    for _ in range(20):
        bench.thread.submit(request("a", max_new_tokens=100, ignore_eos=True), streams=True)
        bench.thread.cancel("a")
    bench.thread.submit(request("b", max_new_tokens=2), streams=False)
    gate.set()
    while (told := bench.next())[0] != "b" or not isinstance(told[1], SessionEvent):
        assert told[0] == "first" or isinstance(told[1], Accepted)
    assert bench.thread.pages_in_use == 0


def test_a_failure_fails_those_at_hand_and_the_next_is_served(bench: Bench) -> None:
    launch, begun = bench.engine._runner.launch, threading.Event()

    def fail(*inputs: Any) -> None:
        begun.wait(60)
        raise RuntimeError("no luck")

    bench.engine._runner.launch = fail  # type: ignore[method-assign,assignment]
    bench.thread.submit(request("a"), streams=True)
    assert bench.next() == ("a", Accepted())
    bench.thread.submit(request("b"), streams=False)
    begun.set()
    told = [bench.next() for _ in range(3)]
    assert [(name, str(event)) for name, event in (told[0], told[2])] == [
        (name, "the engine failed: RuntimeError: no luck") for name in "ab"
    ]
    assert told[1] == ("b", Accepted())
    assert bench.thread.error == "RuntimeError: no luck" and bench.thread.failures == 2
    bench.engine._runner.launch = launch  # type: ignore[method-assign]
    bench.thread.submit(request("c"), streams=False)
    assert [type(bench.next()[1]) for _ in range(2)] == [Accepted, SessionEvent]
    assert bench.thread.error is None


def test_who_cancels_while_no_session_is_open_is_not_served(bench: Bench) -> None:
    """After a failure the thread waits for a request; one that is cancelled behind it stays cancelled."""
    launch = bench.engine._runner.launch

    def fail(*inputs: Any) -> None:
        raise RuntimeError("no luck")

    bench.engine._runner.launch = fail  # type: ignore[method-assign,assignment]
    bench.thread.submit(request("a"), streams=False)
    assert [type(bench.next()[1]) for _ in range(2)] == [Accepted, ApiError]
    bench.engine._runner.launch = launch  # type: ignore[method-assign]
    opening, opens = threading.Event(), bench.thread._open_session

    def open_later() -> Any:
        assert opening.wait(60)
        return opens()

    bench.thread._open_session = open_later
    bench.thread.submit(request("b"), streams=True)
    bench.thread.cancel("b")
    opening.set()
    assert bench.next() == ("b", Accepted())
    bench.thread.submit(request("c"), streams=False)
    assert [bench.next()[0] for _ in range(2)] == ["c", "c"]


def test_an_engine_that_cannot_start_says_so() -> None:
    bench = Bench()

    def fail(*inputs: Any) -> None:
        raise RuntimeError("no memory")

    bench.engine._cache_for = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="could not start: RuntimeError: no memory"):
        bench.start()
    assert not bench.thread.is_alive

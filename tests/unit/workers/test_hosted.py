"""A worker's session is closed while other calls wait for it: by learning beside the tail, and by Ctrl-C."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from octetrl.config.cluster import DeadlineConfig
from octetrl.engine.admission import Admission
from octetrl.records import GenerationProgress, GenerationRequest, Sample, SamplingParams
from octetrl.rollout.backend import OnSession, SessionRecord
from octetrl.telemetry.console import Console
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.workers.assignment import Costs
from octetrl.workers.build import WorkerState
from octetrl.workers.hosted import HostedWorker, WorkerPlan
from octetrl.workers.hosted_session import HostedSession
from octetrl.workers.tail import TailSampler, TailWorkers
from octetrl.workers.team import Call, Deadlines
from tests.unit.workers.thread_team import ThreadTeam

LAYOUT = PackingLayout(tokens_per_micro_batch=64)


class Endless:
    """A session whose answers never end. It has all that `HostedSession` calls."""

    num_pages, pages_in_use = 64, 0

    def __init__(self) -> None:
        self._requests: dict[str, GenerationRequest] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, request: GenerationRequest, *, streams: bool = False) -> None:
        self._requests[request.id] = request

    def cancel(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def events(self, wait_seconds: float) -> list[Any]:
        time.sleep(0.001)
        return []

    def progress(self) -> GenerationProgress:
        return GenerationProgress(0, len(self._requests), 0, 0, 0.0)

    def answer_lengths(self) -> dict[str, int]:
        if "broken" in self._requests:
            raise RuntimeError("out of memory")
        return dict.fromkeys(self._requests, 1)

    def answers_so_far(self) -> dict[tuple[str, int], tuple[list[int], list[float]]]:
        return {(name, one.first_sibling): ([5], [-1.0]) for name, one in self._requests.items()}

    def metrics(self) -> None:
        return None

    def adopt(self, put: Any, *, keeps_cache: bool) -> list[Any]:
        raise RuntimeError("no weights")


class WithoutModel(HostedWorker):
    """Its engine's session is `Endless`; all calls and threads are a worker's own."""

    def __init__(self) -> None:
        engine = SimpleNamespace(max_batch=8, page_size=16)
        recipe: Any = SimpleNamespace(engine=engine)
        super().__init__(WorkerPlan(recipe, 0, 1, True, os.getcwd(), None), "")
        self.freed = 0

    @property
    def _policy(self) -> Any:
        @contextmanager
        def session(on_end: OnSession) -> Iterator[Endless]:
            yield Endless()
            on_end(SessionRecord({"time/rollout": 1.0}))

        def free_cache() -> None:
            self.freed += 1

        return SimpleNamespace(session=session, peers=None, free_cache=free_cache)

    def build(self, store: str | None) -> WorkerState:
        return WorkerState(LAYOUT, 0, needs_calibration=False, weights_are_whole=True)

    def begin_update(self, divisor: float) -> None:
        self._update = SimpleNamespace(add=lambda part: None)  # type: ignore[assignment]


def opened_worker() -> WithoutModel:
    """With an open session, while it learns beside its tail."""
    worker = WithoutModel()
    worker.begin_update(1.0)
    worker.open_session()
    return worker


class InterruptedTeam(ThreadTeam):
    """Ctrl-C comes while the driver waits for `withdraw`: when it has ended, or as it begins."""

    def __init__(self, count: int, *, ended: bool) -> None:
        self.workers: list[Any] = [WithoutModel() for _ in range(count)]
        self.begun = []
        self._pool, self._ended, self._strikes = ThreadPoolExecutor(4 * count), ended, True

    def collect(self, phase: str, calls: Sequence[Call]) -> list[Any]:
        if self._strikes and self.begun[-1][1] == "withdraw":
            self._strikes = False
            if self._ended:
                super().collect(phase, calls)
            raise KeyboardInterrupt
        return super().collect(phase, calls)


def test_a_poll_sees_its_session_end_while_another_call_closes_it() -> None:
    """The other call closes the session between two of the poll's looks at it."""
    worker = opened_worker()
    end, own = worker._session_end, threading.get_ident()
    assert end is not None

    class ClosedMeanwhile(Future[None]):
        def done(self) -> bool:
            if threading.get_ident() == own:
                with ThreadPoolExecutor(1) as other:
                    other.submit(worker.withdraw).result(120)
                assert worker._session is None
            return end.done()

        def result(self, timeout: float | None = None) -> None:
            end.result(timeout)

    worker._session_end = ClosedMeanwhile()
    assert not worker.poll(0.01, 0.0).events
    assert worker.freed == 1


def test_a_session_that_is_closed_twice_says_the_same() -> None:
    worker = opened_worker()
    withdrawn = worker.withdraw()
    assert worker.close_session() == withdrawn.record
    assert worker.freed == 1  # a second time would take the cache from a backward


@pytest.mark.parametrize("ended", [False, True])
def test_ctrl_c_while_answers_move_ends_as_ctrl_c(ended: bool) -> None:
    team = InterruptedTeam(2, ended=ended)
    admission = Admission(1 << 16, 1 << 14, frozenset((1,)), lambda _: "")
    sampler = TailSampler(team, admission, Deadlines(DeadlineConfig()))
    workers = TailWorkers(team, Console("quiet", 1), sampler, costs=Costs(1.0, 0.0))
    workers.begin_step(1.0)
    workers.offer(pack([Sample((5, 6, 7), (False, False, True), (0.0, 0.0, -1.0), 1.0, 0)], LAYOUT, "sequence"))
    requests = [GenerationRequest(name, (5, 6), SamplingParams(max_new_tokens=20)) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        workers.generate(requests, lambda _: None)
    assert (1, "withdraw") in team.begun
    for worker in team.workers:
        worker._computing.submit(lambda: None).result(120)  # no session holds the thread
    team._pool.shutdown()
    assert all(worker._session is None for worker in team.workers)


def test_who_waits_behind_a_command_that_fails_is_answered() -> None:
    """A session ends by one command; the next was taken together with it."""
    session = HostedSession()
    calls = [lambda: session.adopt(lambda: pytest.fail("nothing is put"), keeps_cache=True), session.measure]
    with ThreadPoolExecutor(2) as threads:
        waiting = []
        for call in calls:
            waiting.append(threads.submit(call))
            while len(session._commands) < len(waiting):
                time.sleep(0.001)
        with pytest.raises(RuntimeError, match="no weights"):
            session.run(Endless())
        assert str(waiting[0].exception(120)) == "no weights" and waiting[1].result(120) is None


def test_a_call_whose_read_fails_says_why() -> None:
    worker = opened_worker()
    worker.submit([GenerationRequest("broken", (5, 6), SamplingParams(max_new_tokens=20))], False)
    with ThreadPoolExecutor(1) as other:
        assert str(other.submit(worker.withdraw).exception(120)) == "out of memory"

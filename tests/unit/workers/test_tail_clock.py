"""By a simulated clock: two workers, one long answer. Training on the others is hidden behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from octetrl.config.cluster import DeadlineConfig
from octetrl.engine.admission import Admission
from octetrl.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    PackedBatch,
    PolicyUpdate,
    Sample,
    SamplingParams,
    SessionEvent,
)
from octetrl.rollout.backend import SessionRecord
from octetrl.telemetry.console import Console
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.workers import sampler as sampling
from octetrl.workers import tail
from octetrl.workers.assignment import Costs, Room
from octetrl.workers.build import WorkerState
from octetrl.workers.hosted_session import SessionNews, Withdrawn
from octetrl.workers.tail import PartQueue, TailSampler, TailSession, TailWorkers
from octetrl.workers.team import Call, Deadlines, ProcessTeam

TOKEN, MICRO_BATCH, GROUPS, SHORT, LONG = 0.01, 1.0, 8, 100, 1500  # seconds, seconds, groups of 2, tokens
LAYOUT = PackingLayout(tokens_per_micro_batch=1 << 20)
ADMISSION = Admission(1 << 16, 1 << 14, frozenset((1,)), lambda _: "")
PART = pack([Sample((5, 6, 7), (False, False, True), (0.0, 0.0, -1.0), 1.0, 0)], LAYOUT, "sequence")
Answer = tuple[float, Callable[[], Any]]  # when a call ends, and its result


@dataclass
class Drawing:
    request: GenerationRequest
    sibling: int
    said: int
    began: float
    length: int

    @property
    def ends(self) -> float:
        return self.began + (self.length - self.said) * TOKEN


@dataclass
class SimulatedWorker:
    drawing: list[Drawing] = field(default_factory=list)
    free_at: float = 0.0


class SimulatedTeam(ProcessTeam):
    """Each answer takes `TOKEN` seconds a token, each micro-batch `MICRO_BATCH`, all else nothing."""

    host = "127.0.0.1"

    def __init__(self, count: int, lengths: dict[tuple[str, int], int]) -> None:
        self.now, self._lengths = 0.0, lengths
        self._workers = [SimulatedWorker() for _ in range(count)]

    @property
    def size(self) -> int:
        return len(self._workers)

    def place(self, worker: int) -> str:
        return f"worker {worker}"

    def collect(self, phase: str, calls: Sequence[Call]) -> list[Any]:
        self.now = max([self.now, *(call.reference[0] for call in calls)])
        return [self.result(call) for call in calls]

    def begin(self, worker: int, verb: str, *arguments: Any) -> Call:
        ends, result = getattr(self, f"_{verb}")(self._workers[worker], *arguments)
        return Call(worker, (ends, result))

    def wait_any(self, calls: Sequence[Call], seconds: float) -> list[Call]:
        self.now = max(self.now, min([self.now + seconds, *(call.reference[0] for call in calls)]))
        return [call for call in calls if call.reference[0] <= self.now]

    def result(self, call: Call) -> Any:
        return call.reference[1]()

    def lose(self, worker: int, phase: str, seconds: float, why: str) -> Exception:
        return AssertionError(why)

    def close(self) -> None:
        pass

    def _at_once(self, result: Any) -> Answer:
        return self.now, lambda: result

    def _begin_update(self, *_: Any) -> Answer:
        return self._at_once(None)

    def _build(self, *_: Any) -> Answer:
        return self._at_once(WorkerState(LAYOUT, 0, needs_calibration=False, weights_are_whole=True))

    _state = _build

    def _open_session(self, *_: Any) -> Answer:
        return self._at_once(Room(8, 1 << 20))

    def _close_session(self, *_: Any) -> Answer:
        return self._at_once(SessionRecord({"time/rollout": 0.0}))

    def _finish_update(self, *_: Any) -> Answer:
        return self._at_once(PolicyUpdate(1, {}))

    def _submit(self, worker: SimulatedWorker, requests: list[GenerationRequest], _: bool) -> Answer:
        for one in requests:
            for sibling in range(one.first_sibling, one.first_sibling + one.num_siblings):
                length = self._lengths[one.id.split("#")[0], sibling]
                worker.drawing.append(Drawing(one, sibling, len(one.said[0]), self.now, length))
        return self._at_once(None)

    def _poll(self, worker: SimulatedWorker, wait: float, linger: float) -> Answer:
        first = min((one.ends for one in worker.drawing), default=math.inf)
        ends = min(self.now + wait, max(self.now, first) + linger)
        return ends, lambda: SessionNews(self._ended(worker, ends), None)

    def _ended(self, worker: SimulatedWorker, by: float) -> list[SessionEvent]:
        ended = [one for one in worker.drawing if one.ends <= by]
        worker.drawing = [one for one in worker.drawing if one.ends > by]
        return [SessionEvent(one.request.id, one.sibling, (), (), completion(one.length)) for one in ended]

    def _withdraw(self, worker: SimulatedWorker) -> Answer:
        events, answers = self._ended(worker, self.now), {}
        for one in worker.drawing:
            count = one.said + int((self.now - one.began) / TOKEN)
            answers[one.request.id, one.sibling] = ([5] * count, [-1.0] * count)
        worker.drawing = []
        return self._at_once(Withdrawn(answers, events, SessionRecord({"time/rollout": 0.0})))

    def _train_part(self, worker: SimulatedWorker, part: PackedBatch) -> Answer:
        assert not worker.drawing, "it draws"
        worker.free_at = max(self.now, worker.free_at) + len(part.minibatches[0]) * MICRO_BATCH
        return worker.free_at, lambda: None


def completion(length: int) -> Completion:
    return Completion((5,) * length, (-1.0,) * length, "", FinishReason.STOP, 0, "digest")


def request(name: str, siblings: int = 1) -> GenerationRequest:
    return GenerationRequest(name, (5, 6), SamplingParams(max_new_tokens=2000), num_siblings=siblings)


def opened_on(team: SimulatedTeam, tokens: int = 1 << 20) -> TailSession:
    """A session with room for so many tokens on each worker, while one micro-batch waits."""
    queue = PartQueue(team, Costs(1.0, 0.0))
    queue.offer(PART)
    return TailSession(queue, team, [Room(8, tokens)] * team.size, ADMISSION, Deadlines(DeadlineConfig()))


def seconds_of_step(
    monkeypatch: pytest.MonkeyPatch, *, waits: bool, long: Sequence[str] = ("g3",)
) -> tuple[float, TailWorkers]:
    """Of 8 groups; those in `long` have a long answer. `waits`: all are offered when the last has ended."""
    lengths = {(f"g{group}", sibling): SHORT for group in range(GROUPS) for sibling in range(2)}
    lengths |= {(group, 1): LONG for group in long}
    team = SimulatedTeam(2, lengths)
    for module in (sampling, tail):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: team.now))
    sampler = TailSampler(team, ADMISSION, Deadlines(DeadlineConfig()))
    workers = TailWorkers(team, Console("quiet", 1), sampler, costs=Costs(1.0, 0.0))
    requests = [request(f"g{group}", 2) for group in range(GROUPS)]
    ended: dict[int, int] = {}

    def on_completions(new: Sequence[tuple[int, int, Completion]]) -> None:
        for group, _, _ in new:
            ended[group] = ended.get(group, 0) + 1
            if ended[group] == 2 and not waits:
                workers.offer(PART)

    workers.begin_step(2.0 * GROUPS)
    drawn = workers.generate(requests, on_completions)
    assert [[len(one.token_ids) for one in of_group] for of_group in drawn] == [
        [lengths[f"g{group}", sibling] for sibling in range(2)] for group in range(GROUPS)
    ]
    for _ in range(GROUPS if waits else 0):
        workers.offer(PART)
    if not waits:
        assert ended == dict.fromkeys(range(GROUPS), 2)
    update = workers.finish_step()
    assert update.metrics["train/beside_tail_share"] == (0.0 if waits else (GROUPS - len(long)) / GROUPS)
    return team.now, workers


def test_training_is_hidden_behind_one_long_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = LONG * TOKEN
    waited, _ = seconds_of_step(monkeypatch, waits=True)
    hidden, workers = seconds_of_step(monkeypatch, waits=False)
    assert waited == pytest.approx(decode + GROUPS / 2 * MICRO_BATCH, abs=0.2)
    assert hidden == pytest.approx(decode + MICRO_BATCH, abs=0.2)  # the long answer's own micro-batch
    assert workers._tail.tail_seconds == pytest.approx(decode - SHORT * TOKEN, abs=0.3)


def test_answers_move_where_both_workers_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups have a long answer, drawn by different workers: one of them moves and keeps its place."""
    step, workers = seconds_of_step(monkeypatch, waits=False, long=("g3", "g4"))
    assert workers._tail.moved_answers == 1
    assert step == pytest.approx(LONG * TOKEN + MICRO_BATCH, abs=0.2)


@pytest.mark.parametrize(("tokens", "fits"), [(2 * (2 + 1000), True), (2 * (2 + 1000) - 1, False)])
def test_a_tail_has_room_on_one_worker_and_nothing_waits(tokens: int, fits: bool) -> None:
    """Two running answers, each expected to have its prompt's 2 tokens and half of 2000 more."""
    opened = opened_on(SimulatedTeam(2, {(name, 0): LONG for name in "abc"}), tokens)
    for name in "ab":
        opened.submit(request(name))
    opened._give_out()
    assert opened._is_tail() is fits
    opened.submit(request("c"))
    assert not opened._is_tail()


@pytest.mark.parametrize("polled", [False, True])
def test_an_answer_that_ended_since_the_last_poll_is_not_lost(polled: bool) -> None:
    """`polled`: a poll has it, and the driver has not read the poll. Otherwise no poll has seen it."""
    team = SimulatedTeam(2, {("long", 0): LONG, ("short", 0): SHORT})
    opened = opened_on(team)
    for name in ("long", "short"):
        opened.submit(request(name))
    assert opened.events(0.0) == [] and [len(worker.drawing) for worker in team._workers] == [1, 1]
    if polled:
        (short,) = (n for n, worker in enumerate(team._workers) if worker.drawing[0].request.id.startswith("short"))
        poll = team.begin(short, "poll", SHORT * TOKEN, 0.0)
        news = team.result(poll)  # the worker has answered
        opened._polls = {short: Call(short, (poll.reference[0], lambda: news))}
        assert not team._workers[short].drawing
    else:
        opened._polls.clear()
    team.now = 2 * SHORT * TOKEN
    (event,) = opened._gather()
    assert (event.request_id, event.sibling) == ("short", 0) and event.completion is not None
    assert len(event.completion.token_ids) == SHORT and opened.moved == 0
    assert opened.has_work, "the long answer continues"
    team.now = LONG * TOKEN
    (last,) = opened.events(1.0)
    assert last.request_id == "long" and not opened.has_work

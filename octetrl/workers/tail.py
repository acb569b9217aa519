"""Learning beside the tail of a rollout, on several workers (`rollout.learn_beside_tail`).

    few answers still run            -> they continue on one worker (`TailSession`); the others close their sessions
    a block of groups is complete    -> `offer`: its micro-batches wait for a worker without answers (`PartQueue`)
    the last answer has ended        -> `finish_step`: what is left is dealt to all workers, then one update

An answer moves with the tokens that it has. The other worker prefills them and continues: log-probs of prefill and
decode are equal to the bit, and a sampled token depends on the seed, the sibling and its place alone. So completions
and log-probs are those of a run without this.

Which worker trains on which micro-batch, and in which order, depends on the clock. The micro-batches themselves do
not (run/beside_tail.py). So gradients differ between two such runs by the order of float32 sums. They differ more from
those of a run without this: other samples are packed together, and the loss has another divisor (trainer/streamed.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from octetrl.config.in_words import TAIL_SHARE
from octetrl.records import MicroBatch, OnProgress, PackedBatch, PolicyUpdate, SessionEvent, joined
from octetrl.rollout.backend import SessionRecord
from octetrl.telemetry.console import Console
from octetrl.workers.assignment import Costs, Room, shared_out
from octetrl.workers.hosted_session import SessionNews, Withdrawn
from octetrl.workers.sampler import ManySampler, ManySession
from octetrl.workers.team import Call, ProcessTeam
from octetrl.workers.workers import Workers

CALLS_AHEAD = 2  # micro-batches that a worker has been sent, so that it never waits for the driver


class PartQueue:
    """The micro-batches of one step: those that no worker has yet, and the calls of those that workers train on."""

    def __init__(self, team: ProcessTeam, costs: Costs, step: int | None = None) -> None:
        self._team, self._costs, self._step = team, costs, step
        self._waiting: deque[tuple[float, PackedBatch]] = deque()  # (cost, one micro-batch)
        self._calls: list[tuple[Call, float]] = []
        self.policy_version: int | None = None
        self.denominator = 0.0  # of the loss, over all that was offered
        self.offered = self.early = 0  # tokens: of all micro-batches, and of those begun while answers still ran

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def offer(self, batch: PackedBatch) -> None:
        """A part of the step's batch."""
        for minibatch, denominator in zip(batch.minibatches, batch.loss_denominators, strict=True):
            self.denominator += denominator
            self.policy_version = batch.policy_version
            for one in minibatch:
                part = PackedBatch(((one,),), (denominator,), batch.policy_version, step=self._step)
                self._waiting.append((self._costs.micro_batch(one), part))
                self.offered += _tokens(one)

    def whole(self) -> PackedBatch:
        """The step's batch without its micro-batches, which the workers have."""
        return PackedBatch(((),), (self.denominator,), self.policy_version, step=self._step)

    def advance(self, workers: Collection[int]) -> None:
        """Gives micro-batches to those of `workers` that have room. Does not wait. Raises what a worker raised."""
        self._take(0.0)
        for _ in range(CALLS_AHEAD):
            for worker in workers:
                if self._waiting and sum(call.worker == worker for call, _ in self._calls) < CALLS_AHEAD:
                    cost, part = self._waiting.popleft()
                    self.early += _tokens(part.minibatches[0][0])
                    self._begin(worker, cost, part)

    def _take(self, seconds: float) -> None:
        calls = [call for call, _ in self._calls]
        for ended in self._team.wait_any(calls, seconds) if calls else []:
            self._team.result(ended)
            self._calls = [(call, cost) for call, cost in self._calls if call is not ended]

    def _begin(self, worker: int, cost: float, part: PackedBatch) -> None:
        self._calls.append((self._team.begin(worker, "train_part", part), cost))

    def finish(self) -> None:
        """Deals out what is left by its cost, and waits until all workers have trained on it."""
        loads = [0.0] * self._team.size
        for call, cost in self._calls:
            loads[call.worker] += cost
        waiting, self._waiting = list(self._waiting), deque()
        owners = shared_out([cost for cost, _ in waiting], self._team.size, loads)
        for worker in range(self._team.size):  # one call each, so that its other calls find a free thread
            own = [part for owner, (_, part) in zip(owners, waiting, strict=True) if owner == worker]
            if own:
                micro_batches = tuple(one for part in own for one in part.minibatches[0])
                self._begin(worker, 0.0, replace(own[0], minibatches=(micro_batches,)))
        calls, self._calls = [call for call, _ in self._calls], []
        self._team.collect("train", calls)


class TailSession(ManySession):
    """A session whose last answers continue on one worker, so that the others train on what `queue` has."""

    def __init__(
        self, queue: PartQueue, team: ProcessTeam, rooms: Sequence[Room], *settings: Any, **options: Any
    ) -> None:
        super().__init__(team, rooms, *settings, **options)
        self._queue, self._room = queue, min(room.sequences for room in rooms)
        self.withdrawn: dict[int, SessionRecord] = {}  # of the workers whose sessions are closed
        self.moved = 0  # answers that changed the worker
        self.tail_began: float | None = None  # time.monotonic

    def events(self, wait_seconds: float = 0.0) -> list[SessionEvent]:
        gathered = self._gather() if not self.withdrawn and self._is_tail() else []
        if self.withdrawn:
            self._queue.advance(self.withdrawn)
        return gathered + super().events(0.0 if gathered else wait_seconds)

    def _is_tail(self) -> bool:
        """Few answers run, one worker has room for all of them, and there is something to train on."""
        assignment = self._assignment
        running = sum(assignment.sequences_of(worker) for worker in range(self._team.size))
        few = 0 < running <= max(1, int(self._room * TAIL_SHARE)) and not assignment.num_waiting
        return few and self._queue.has_work and assignment.tail_tokens <= self._smallest_cache

    def _gather(self) -> list[SessionEvent]:
        """Closes all sessions but one, where the unfinished answers continue. Returns events of the closed ones."""
        assignment, workers = self._assignment, range(self._team.size)
        keeper = max(workers, key=lambda worker: (assignment.sequences_of(worker), -worker))
        others = [worker for worker in workers if worker != keeper]
        calls = [self._team.begin(worker, "withdraw") for worker in others]
        withdrawn: list[Withdrawn] = self._team.collect("rollout", calls)
        polls = [self._polls.pop(worker) for worker in others if worker in self._polls]
        news: list[SessionNews] = self._team.collect("rollout", polls)
        events = [event for call, one in zip(polls, news, strict=True) for event in self._of(call.worker, one.events)]
        pieces = []
        for worker, one in zip(others, withdrawn, strict=True):
            events += self._of(worker, one.events)
            assignment.close(worker)
            pieces += assignment.move(worker, keeper, one.answers)
            self._progress[worker] = replace(self._progress[worker], running=0, waiting=0)
            self.withdrawn[worker] = one.record
        if pieces:
            self._moved_at[keeper] = time.monotonic()
            self._team.ask_one(keeper, "submit", "submit", [piece.request for piece in pieces], False)
        self.moved, self.tail_began = len(pieces), time.monotonic()
        return events

    def _of(self, worker: int, events: Sequence[SessionEvent]) -> list[SessionEvent]:
        return list(self._of_requests(worker, events))


class TailSampler(ManySampler):
    """Samples for `TailWorkers`. `queue`: of the step that learns beside its tail; None: between steps."""

    queue: PartQueue | None = None
    moved_answers = 0  # of the step
    tail_seconds = 0.0

    def begin_step(self, queue: PartQueue) -> None:
        self.queue, self.moved_answers, self.tail_seconds = queue, 0, 0.0

    def _session_on(self, rooms: Sequence[Room], linger_seconds: float, on_progress: OnProgress | None) -> ManySession:
        if self.queue is None:
            return super()._session_on(rooms, linger_seconds, on_progress)
        parts = (self.queue, self._leaders, rooms, self._admission, self._deadlines)
        return TailSession(*parts, linger_seconds=linger_seconds, on_progress=on_progress)

    def _close(self, session: ManySession) -> list[SessionRecord]:
        records = dict(session.withdrawn) if isinstance(session, TailSession) else {}
        still_open = [worker for worker in range(self._team.size) if worker not in records]
        calls = [self._team.begin(worker, "close_session") for worker in still_open]
        records |= dict(zip(still_open, self._team.collect("rollout", calls), strict=True))
        if isinstance(session, TailSession) and session.tail_began is not None:
            self.moved_answers += session.moved
            self.tail_seconds += time.monotonic() - session.tail_began
        return [records[worker] for worker in range(self._team.size)]


class TailWorkers(Workers):
    """`Workers` that train on complete parts of a step's batch while its last answers are still sampled.

    Between `begin_step` and `finish_step` a rollout calls `offer` with the parts that are complete.
    """

    def __init__(self, team: ProcessTeam, console: Console, sampler: TailSampler, *, costs: Costs) -> None:
        super().__init__(team, console, sampler, costs=costs)
        self._tail, self._new_queue = sampler, partial(PartQueue, team, costs)

    def begin_step(self, divisor: float, step: int | None = None) -> None:
        """`divisor` of the loss until its denominator is known (trainer/streamed.py). `step`: the batch's."""
        self._team.ask("submit", "begin_update", divisor)
        self._tail.begin_step(self._new_queue(step))

    def offer(self, batch: PackedBatch) -> None:
        """A part of the step's batch, whose groups are complete."""
        assert self._tail.queue is not None, "`begin_step` comes first"
        self._tail.queue.offer(batch)

    def finish_step(self) -> PolicyUpdate:
        """The update, once all parts were offered."""
        queue, self._tail.queue = self._tail.queue, None
        assert queue is not None, "`begin_step` comes first"
        if queue.policy_version is None:
            return self.train(PackedBatch((), (), None))
        with self._console.phase("train"), self._clock("train") as took:
            queue.finish()
        update = self._update("finish_update", [(queue.whole(),)] * self._team.size)
        own = {
            "rollout/moved_answers": float(self._tail.moved_answers),
            "time/tail": self._tail.tail_seconds,
            "train/beside_tail_share": queue.early / queue.offered,
        }
        metrics = {name: value for name, value in update.metrics.items() if name != "train/tokens_per_second"}
        return replace(update, metrics=joined(metrics, own, took))


def _tokens(micro_batch: MicroBatch) -> int:
    return micro_batch.token_ids_T.numel()

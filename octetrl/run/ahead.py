"""Produces the next steps' batches in a thread, while the current step learns (`cluster.max_staleness` above 0).

    thread    may the next batch begin?  -> new weights into the engines -> `collect_batch` -> buffer
    step      buffer -> the batch of this step -> `learn`, which sends new weights

`Lead` has the rule. The batch of step n begins when step n - 1 - K has been learnt. No group is therefore older than K
versions when it is learnt, and the buffer holds K batches at most. Batches are drawn and learnt in the order of their
steps. One policy version draws a batch: an engine takes new weights between two batches. They are sent while it draws
and wait in a second buffer. Without room for one, `learn` waits for the end of the batch and sends them then
(`cluster.weight_buffer`). With `cluster.weights_in_flight` an engine takes them between two forwards, and each token
has a version of its own.

The batch of a step is handed over when the engines have the weights for the next one. With K = 1 the version that draws
each batch therefore does not depend on the clock, and a run repeats its bits.

`place` is the place in the tasks after the last batch that a step took. A checkpoint has it, and a resumed run draws
the batches after it again: no task is skipped or taken twice. With `checkpoint.batches_ahead: saved` the checkpoint has
these batches too (`batches_after`), and the resumed run begins with them (`put_back`).

The place includes the global random generators, from which an environment may draw. While a batch is drawn, only the
thread draws from them: the step reads no task that a user wrote (plain_tasks.py).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TYPE_CHECKING

from octetrl.records import Completion, GenerationRequest, OnCompletions, Sample, SessionEvent
from octetrl.rollout.backend import RolloutSession
from octetrl.rollout.collect import collect_batch
from octetrl.rollout.samples import to_samples
from octetrl.rollout.token_versions import versions_of
from octetrl.run.batches_ahead import BufferedBatch, DataPlace
from octetrl.run.plain_tasks import with_plain_tasks
from octetrl.run.slow_rewards import reward_times
from octetrl.run.step import learn
from octetrl.telemetry.metrics import StepMetrics
from octetrl.workers.protocol import WorkersAhead

if TYPE_CHECKING:
    from octetrl.run.state import Run


@dataclass(frozen=True, slots=True)
class Lead:
    """How far producing may run ahead of learning: by `most` policy versions."""

    most: int

    def may_begin(self, step: int, learnt: int) -> bool:
        """Whether the batch of `step` may be drawn with the weights after step `learnt`."""
        return learnt >= step - 1 - self.most


class RunEnds(Exception):
    """The run ends while a batch is drawn."""


class Ahead:
    """Of one run. `step` is `train_step` with batches that were drawn ahead. It starts the thread."""

    def __init__(self, run: Run, workers: WorkersAhead) -> None:
        self._run, self._workers = run, workers
        self._lead = Lead(run.config.cluster.max_staleness)
        self._changed = threading.Condition()
        self._buffer: dict[int, BufferedBatch] = {}  # by step
        self._taken: tuple[int, BufferedBatch] | None = None  # of the last step
        self._first: int | None = None  # the step whose batch is drawn first; None: the run's next step
        self._learnt = 0
        self._too_old = 0  # groups of a checkpoint that are drawn again; told with the next step
        self._pauses = self._draws = self._ends = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._place: DataPlace | None = None
        workers.between_batches = self._between_batches

    @property
    def place(self) -> DataPlace:
        """The place after the last batch that a step took."""
        return self._place or DataPlace.of(self._run.taskset, self._run.collection.lengths)

    # ------------------------------------------------------------ the step

    def step(self) -> StepMetrics:
        run = self._run
        if self._thread is None:
            self._place, self._learnt = self.place, run.step - 1
            first = run.step if self._first is None else self._first
            self._thread = threading.Thread(target=self._produce, args=(first,), name="produce", daemon=True)
            self._thread.start()
        with run.spans("wait_for_batch"):
            drawn = self._take(run.step)
        run.journal.record(drawn.groups, drawn.counts)
        samples = to_samples(drawn.kept, run.algorithm)
        stale = staleness(samples, run.workers.policy_version, self._lead.most)
        metrics = learn(run, samples)
        with self._changed:
            self._learnt = run.step
            self._changed.notify_all()
        too_old, self._too_old = {"rollout/too_old_groups": float(self._too_old)} if self._too_old else {}, 0
        # a saved batch may have the pause before it, and weights are in flight only now: then `metrics` has that of now
        of_batch = {name: value for name, value in drawn.metrics.items() if name not in metrics}
        return StepMetrics.merge(metrics, of_batch, stale, too_old)

    def _take(self, step: int) -> BufferedBatch:
        with self._changed:
            self._changed.wait_for(lambda: step in self._buffer or self._error is not None)
            if step not in self._buffer:
                assert self._error is not None
                raise self._error
            drawn = self._buffer.pop(step)
            self._taken, self._place = (step, drawn), drawn.place
        return drawn

    # ------------------------------------------------------------ saving and resuming

    def batches_after(self, step: int, *, waits: bool) -> list[BufferedBatch]:
        """The batches of the steps after `step`, without a gap. waits: for the first of them, which the run needs next;
        with one version ahead no other is being drawn then, so that a resumed run repeats the bits."""
        with self._changed:
            if waits and self._thread is not None and step < self._run.config.steps:
                self._changed.wait_for(lambda: step + 1 in self._buffer or self._error is not None or self._ends)
            found = dict(self._buffer) | ({} if self._taken is None else dict([self._taken]))
        return [found[one] for one in takewhile(found.__contains__, count(step + 1))]

    def put_back(self, batches: Sequence[BufferedBatch], step: int) -> None:
        """Begins after `step` with these batches, once the run's cursor has been restored. Those that are too old for
        `cluster.max_staleness`, which may be smaller than before, and those after them are drawn again, and counted."""
        run = self._run
        self._place = DataPlace.of(run.taskset, run.collection.lengths)
        for number, drawn in enumerate(batches):
            oldest = drawn.oldest_version
            if oldest is not None and run.workers.policy_version + number - oldest > self._lead.most:
                break
            self._buffer[step + 1 + number] = drawn
            drawn.place.put_into(run.taskset, run.collection.lengths)
        self._first = step + 1 + len(self._buffer)
        self._too_old = sum(len(drawn.groups) for drawn in batches[len(self._buffer) :])
        if self._too_old:
            run.console.note(f"{self._too_old} saved groups are older than {self._lead.most} versions: sampled again")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No batch is drawn meanwhile, and the engines have the last version. Waits for the batch that is drawn."""
        with ExitStack() as stack:
            with self._run.spans("wait_to_evaluate"):
                stack.enter_context(self._no_batch())
                self._workers.adopt()
            yield

    @contextmanager
    def _between_batches(self) -> Iterator[None]:
        """For new weights that arrive in place. The wait counts as training's wait for the batch."""
        with ExitStack() as stack:
            with self._run.spans("wait_for_batch"):
                stack.enter_context(self._no_batch())
            yield

    @contextmanager
    def _no_batch(self) -> Iterator[None]:
        with self._changed:
            self._pauses = True
            self._changed.wait_for(lambda: not self._draws)
        try:
            yield
        finally:
            with self._changed:
                self._pauses = False
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread, after the engines' next event. A second call does nothing."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------ the thread

    def _produce(self, first: int) -> None:
        try:
            finished: tuple[int, BufferedBatch] | None = None
            for step in range(first, self._run.config.steps + 1):
                waited = self._wait_for(step)
                self._workers.adopt()
                if self._is_first_after_checkpoint(step):
                    self._workers.forget_prefixes()  # a checkpoint has no pages, so a resumed run has none
                self._hand_over(finished)
                finished = step, self._draw(step, waited)
                with self._changed:
                    self._draws = False
                    self._changed.notify_all()
            self._hand_over(finished)
        except RunEnds:
            pass
        except BaseException as error:  # the step that waits for the batch raises it
            with self._changed:
                self._error = error
        finally:
            with self._changed:
                self._draws = False
                self._changed.notify_all()

    def _wait_for(self, step: int) -> float:
        """Until the batch of `step` may begin. Returns seconds."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(
                lambda: self._ends or (not self._pauses and self._lead.may_begin(step, self._learnt))
            )
            if self._ends:
                raise RunEnds
            self._draws = True
        return time.perf_counter() - began

    def _is_first_after_checkpoint(self, step: int) -> bool:
        """Whether a run that is resumed with saved batches begins by drawing the batch of `step`."""
        config = self._run.config.checkpoint
        is_due = bool(config.every) and (step - 1 - self._lead.most) % config.every == 0
        return is_due and config.batches_ahead == "saved"

    def _draw(self, step: int, waited: float) -> BufferedBatch:
        run = self._run
        in_flight = run.config.cluster.weights_in_flight != "off"  # `publish` has the pause
        pause = {} if in_flight else {"time/publish_pause": self._workers.pause_seconds}
        workers = _Stoppable(self._workers, self._check)
        collected = collect_batch(
            run.taskset, run.algorithm.keeps, run.rewards, workers, run.base_collection.at_step(step)
        )
        times = {**run.spans.take(only="rollout"), **reward_times(run.rewards)}
        metrics = {**self._workers.rollout_metrics(), "time/wait_for_weights": waited, **times, **pause}
        groups = tuple(with_plain_tasks(collected.groups))  # the other thread reads no task of the user's
        plain = {id(group): new for group, new in zip(collected.groups, groups, strict=True)}
        kept = tuple(plain[id(group)] for group in collected.kept)
        return BufferedBatch(
            groups, kept, collected.metrics, metrics, DataPlace.of(run.taskset, run.collection.lengths)
        )

    def _hand_over(self, finished: tuple[int, BufferedBatch] | None) -> None:
        if finished is not None:
            step, drawn = finished
            with self._changed:
                self._buffer[step] = drawn
                self._changed.notify_all()

    def _check(self) -> None:
        if self._ends:
            raise RunEnds


def staleness(samples: Sequence[Sample], policy_version: int, most: int) -> dict[str, float]:
    """Metrics of samples that are learnt by the weights of `policy_version`, over their sampled tokens."""
    ages = Counter(
        policy_version - version
        for one in samples
        for version, trained in zip(versions_of(one), one.loss_mask, strict=True)
        if trained
    )
    assert all(0 <= age <= most for age in ages), f"a token is older than {most} versions: {sorted(ages)}"
    tokens = ages.total()
    if not tokens:
        return {}
    return {
        "rollout/staleness": sum(count * age for age, count in ages.items()) / tokens,
        "rollout/on_policy_share": ages[0] / tokens,
    }


class _Stoppable:
    """Generates until `check` raises, which closes the session."""

    def __init__(self, workers: WorkersAhead, check: Callable[[], None]) -> None:
        self._workers, self._check = workers, check

    def generate(
        self, requests: Sequence[GenerationRequest], on_completions: OnCompletions | None = None, /
    ) -> list[list[Completion]]:
        def checked(ended: Sequence[tuple[int, int, Completion]]) -> bool | None:
            self._check()
            return None if on_completions is None else on_completions(ended)

        return self._workers.generate(requests, checked)

    @contextmanager
    def session(self) -> Iterator[RolloutSession]:
        with self._workers.session() as session:
            yield _StoppableSession(session, self._check)


class _StoppableSession:
    def __init__(self, session: RolloutSession, check: Callable[[], None]) -> None:
        self._session, self._check = session, check

    @property
    def has_work(self) -> bool:
        return self._session.has_work

    def submit(self, request: GenerationRequest, /, *, streams: bool = False) -> None:
        self._session.submit(request, streams=streams)

    def cancel(self, request_id: str, /) -> None:
        self._session.cancel(request_id)

    def events(self, wait_seconds: float = 0.0, /) -> Sequence[SessionEvent]:
        self._check()
        return self._session.events(wait_seconds)


def ahead_of(run: Run) -> Ahead | None:
    """None, if a step of the recipe generates and then learns."""
    if not run.config.cluster.max_staleness or not isinstance(run.workers, WorkersAhead):
        return None
    return Ahead(run, run.workers)

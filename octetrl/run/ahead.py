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
thread draws from them: collected groups have plain tasks, so the step reads none that a user wrote.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, takewhile

from octetrl.config.schema import Recipe
from octetrl.records import Sample, joined
from octetrl.rollout.collect import collect_batch
from octetrl.rollout.samples import samples_of, trained_rollouts, versions_of
from octetrl.run.folder.journal import Journal
from octetrl.run.state import BufferedBatch, DataPlace, Run, StepMethod, StepResult
from octetrl.run.step import learn
from octetrl.workers.clock import Clock
from octetrl.workers.roles import SeparateWorkers


@dataclass(frozen=True, slots=True)
class Lead:
    """How far producing may run ahead of learning: by `most` policy versions."""

    most: int

    def may_begin(self, step: int, learnt: int) -> bool:
        """Whether the batch of `step` may be drawn with the weights after step `learnt`."""
        return learnt >= step - 1 - self.most


class RunEnds(Exception):
    """The run ends while a batch is drawn."""


class Ahead(StepMethod):
    """Learns from batches that were drawn ahead. The first step starts the thread."""

    draws_ahead = True

    def __init__(self, recipe: Recipe, workers: SeparateWorkers) -> None:
        self._recipe, self._workers, self._clock = recipe, workers, Clock()
        self._lead = Lead(recipe.cluster.max_staleness)
        self._changed = threading.Condition()
        self._buffer: dict[int, BufferedBatch] = {}  # by step
        self._taken: tuple[int, BufferedBatch] | None = None  # of the last step
        self._first: int | None = None  # the step whose batch is drawn first; None: the run's next step
        self._learnt = 0
        self._too_old = 0  # groups of a checkpoint that are drawn again; a metric of the next step
        self._pauses = self._draws = self._ends = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._place: DataPlace | None = None
        workers.between_batches = self._between_batches

    def place(self, run: Run) -> DataPlace:
        return self._place or super().place(run)

    # ------------------------------------------------------------ the step

    def step(self, run: Run, number: int, journal: Journal) -> StepResult:
        if self._thread is None:
            self._place, self._learnt = self.place(run), number - 1
            first = number if self._first is None else self._first
            self._thread = threading.Thread(target=self._produce, args=(run, first), name="produce", daemon=True)
            self._thread.start()
        with self._clock("wait_for_batch") as waited:
            drawn = self._take(number)
        trained = trained_rollouts(drawn.kept, run.algorithm)
        recorded = journal.record(number, drawn.groups, trained)
        samples = samples_of(trained, run.collection.sampling.temperature)
        stale = staleness(samples, run.workers.policy_version, self._lead.most)
        metrics = learn(run, samples, number)
        with self._changed:
            self._learnt = number
            self._changed.notify_all()
        too_old, self._too_old = {"rollout/too_old_groups": float(self._too_old)} if self._too_old else {}, 0
        # a saved batch may have the pause before it, and weights are in flight only now: then `metrics` has that of now
        left_out = {"time/publish_pause"} & metrics.keys()
        of_batch = {name: value for name, value in drawn.metrics.items() if name not in left_out}
        own = joined(recorded, drawn.counts, of_batch, stale, too_old, waited)
        return StepResult(joined(metrics, own), drawn.groups, reward_times=drawn.reward_times)

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
        """Without a gap. waits: for the first of them, which the run needs next; with one version ahead no other is
        being drawn then, so that a resumed run repeats the bits."""
        with self._changed:
            if waits and self._thread is not None and step < self._recipe.steps:
                self._changed.wait_for(lambda: step + 1 in self._buffer or self._error is not None or self._ends)
            batches = dict(self._buffer) | ({} if self._taken is None else dict([self._taken]))
        return [batches[number] for number in takewhile(batches.__contains__, count(step + 1))]

    def put_back(self, run: Run, batches: Sequence[BufferedBatch], step: int) -> None:
        """Batches that are too old for `cluster.max_staleness`, which may be smaller than before, and those after them
        are drawn again, and counted."""
        self._place = DataPlace.of(run.taskset, run.lengths)
        for number, drawn in enumerate(batches):
            oldest = drawn.oldest_version
            if oldest is not None and run.workers.policy_version + number - oldest > self._lead.most:
                break
            self._buffer[step + 1 + number] = drawn
            drawn.place.put_into(run.taskset, run.lengths)
        self._first = step + 1 + len(self._buffer)
        self._too_old = sum(len(drawn.groups) for drawn in batches[len(self._buffer) :])
        if self._too_old:
            run.console.note(f"{self._too_old} saved groups are older than {self._lead.most} versions: sampled again")

    @contextmanager
    def paused(self) -> Iterator[dict[str, float]]:
        """Waits for the batch that is drawn."""
        with ExitStack() as stack:
            with self._clock("wait_to_evaluate") as waited:
                stack.enter_context(self._no_batch())
                self._workers.adopt()
            yield waited

    @contextmanager
    def _between_batches(self) -> Iterator[dict[str, float]]:
        """For new weights that arrive in place. The wait counts as training's wait for the batch."""
        with ExitStack() as stack:
            with self._clock("wait_for_batch") as waited:
                stack.enter_context(self._no_batch())
            yield waited

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
        """Ends the thread, after the engines' next event."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------ the thread

    def _produce(self, run: Run, first: int) -> None:
        try:
            finished: tuple[int, BufferedBatch] | None = None
            for step in range(first, self._recipe.steps + 1):
                waited = self._wait_for(step)
                self._workers.adopt()
                if self._forgets_pages(step):
                    self._workers.forget_prefixes()  # a checkpoint has no pages, so a resumed run has none
                self._hand_over(finished)
                finished = step, self._draw(run, step, waited)
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

    def _forgets_pages(self, step: int) -> bool:
        """Whether pages are kept, and a run that is resumed with saved batches begins by drawing that of `step`."""
        checkpoint, learnt = self._recipe.checkpoint, step - 1 - self._lead.most
        is_due = learnt > 0 and checkpoint.every > 0 and learnt % checkpoint.every == 0
        return is_due and checkpoint.batches_ahead == "saved" and self._recipe.engine.prefix_cache == "keep"

    def _draw(self, run: Run, step: int, waited: float) -> BufferedBatch:
        in_flight = self._recipe.cluster.weights_in_flight != "off"  # `publish` has the pause
        pause = {} if in_flight else {"time/publish_pause": self._workers.pause_seconds}
        settings = run.collection.at_step(step)
        collected = collect_batch(
            run.taskset, run.algorithm.keeps, run.rewards, self._workers, settings, run.lengths, check=self._check
        )
        metrics = {**collected.measured, "time/wait_for_weights": waited, **pause}
        place = DataPlace.of(run.taskset, run.lengths)
        groups, kept = tuple(collected.groups), tuple(collected.kept)
        return BufferedBatch(groups, kept, collected.counts, metrics, place, collected.reward_times)

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
        for sample in samples
        for version, trained in zip(versions_of(sample), sample.loss_mask, strict=True)
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

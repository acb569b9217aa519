"""`Workers`: what a run asks of those that hold its model, in this process or in many.

    train, publish, save (copy, then write), load     every run
    generate, session, calibrate, score               runs that sample

The step, the loop, evaluation and checkpoints call these methods, and they are the same for one worker and for many.
Arguments and results are records and paths: no model, no tensor of one, no engine and no trainer crosses this border.
State on disk is written and read by the workers themselves.

    rollouts      any worker samples any sibling (sampler.py)
    training      every worker runs its part of the micro-batches (assignment.py); they meet inside `Worker.train`
    publishing    into every worker's engine; the digests of all are compared
    state         each worker writes the rows that it owns, and reads them

Every verb is one call to each worker of a `Team`. roles.py has workers that only train or only generate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from octetrl.environments.scoring import Score
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.records import (
    Completion,
    EarlierAnswer,
    GenerationRequest,
    OnCompletions,
    OnProgress,
    PackedBatch,
    PolicyUpdate,
    Published,
    Task,
    worker_times,
)
from octetrl.rollout.backend import MeasuredSession, OnSession, not_asked
from octetrl.system.errors import RunFailed
from octetrl.telemetry.console import Console
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.peers import serve_store
from octetrl.trainer.without_update import Sums, added
from octetrl.workers.assignment import Costs, deal
from octetrl.workers.build import BuiltWorker, WorkerState
from octetrl.workers.clock import Clock
from octetrl.workers.reward_model_worker import RewardModelWorker
from octetrl.workers.status import size_in_words
from octetrl.workers.team import LocalTeam, Team, most_tokens, rollout_shown
from octetrl.workers.worker import Worker

TIMED = frozenset({"time/train", "time/calibrate", "time/publish", "time/gather"})  # on each worker


class WorkersDiffer(RunFailed):
    """A worker holds other weights than its peers."""


class Sampler(Protocol):
    """What samples completions: a `Worker` itself, or many of them (sampler.py)."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_progress: OnProgress | None = None,
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
        /,
    ) -> list[list[Completion]]: ...

    def session(
        self, on_progress: OnProgress | None = None, on_end: OnSession = not_asked, /
    ) -> AbstractContextManager[MeasuredSession]: ...


class Workers:
    """The workers of `team`, whose model is loaded here if it is not yet."""

    def __init__(
        self,
        team: Team,
        console: Console,
        sampler: Sampler | None = None,
        *,
        costs: Costs | None = None,
        size: int = 1,
        trains: bool = True,
    ) -> None:
        """sampler: None for workers that train a reward model. costs: of micro-batches, by which the workers of other
        processes get them. size: of each group of workers that share one model; workers of a group follow one
        another."""
        self._team, self._console, self._sampler = team, console, sampler
        self._costs, self._size, self._clock = costs, size, Clock()
        self._engine_team = team
        address: str | None = None
        if team.size > 1:
            self._store, address = serve_store(team.host)  # NCCL asks it for as long as the workers live
        states: list[WorkerState] = team.ask("load", "build", address)
        self.in_process = isinstance(team, LocalTeam)
        """Whether the only worker is in this process."""
        self.layout = states[0].layout
        """How `pack` packs for these workers. It follows from the recipe, not from how many they are."""
        self.policy_version = states[0].policy_version
        """Updates that the weights have had."""
        self.weights_are_whole = True
        """False while an update changes the weights: such weights must not be saved."""
        self.link_gb_per_second = min(state.link_gb_per_second for state in states)  # 0: no weights are exchanged
        if trains and not self.in_process:
            _say_what_was_read(console, states)

    @property
    def worker(self) -> Worker | RewardModelWorker | None:
        """The worker of this process, for what looks into its model; None if there is none."""
        return self._team.built.worker if isinstance(self._team, LocalTeam) else None

    # ------------------------------------------------------------ learning

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        """One update from `batch`. Raises NonFiniteError, with the weights as they were, for results that are not
        finite."""
        return self._update("train", self._parts(batch))

    def measure_held_out(self, batch: PackedBatch) -> Sums:
        """The summed loss, and of pairs the other sums, of a batch that is not learnt from."""
        parts: list[list[Sums]] = self._team.ask_each("evaluate", "measure_held_out", self._parts(batch))
        return added([one for part in parts[:: self._size] for one in part])

    def _parts(self, batch: PackedBatch) -> list[tuple[PackedBatch]]:
        """The batch's micro-batches of each worker; workers that share one model have the same."""
        if self._costs is None:
            return [(batch,)]
        parts = deal(batch, self._team.size // self._size, self._costs)
        return [(part,) for part in parts for _ in range(self._size)]

    def _update(self, verb: str, arguments: Sequence[tuple[Any, ...]]) -> PolicyUpdate:
        """One update by a verb that all workers call together."""
        self.weights_are_whole = False
        try:
            with self._console.phase("train"), self._clock("train") as took:
                updates: list[PolicyUpdate] = self._team.ask_each("train", verb, arguments)
        except BaseException as error:
            # not finite: before any worker's step; or after it, by a weight or the next minibatch
            if self.in_process or isinstance(error, NonFiniteError):
                states: list[WorkerState] = self._team.ask("state", "state")
                self.weights_are_whole = all(state.weights_are_whole for state in states)
                self.policy_version = states[0].policy_version  # the error may come after a whole update
            raise
        self.weights_are_whole, self.policy_version = True, updates[0].policy_version
        if self.in_process:
            return updates[0]
        return replace(updates[0], metrics=self._metrics([one.metrics for one in updates], took))

    def publish(self, policy_version: int) -> Published:
        """Puts the trained weights and KV scales where completions are sampled, and compares what is held there."""
        with self._console.phase("publish"), self._clock("publish") as took:
            published: list[Published] = self._team.ask("publish", "publish", policy_version)
        if self.in_process:
            return published[0]
        for part in range(self._size):  # workers with the same rows of the model
            self._check_equal([one.weights_digest for one in published[part :: self._size]], part)
        return replace(published[0], metrics=self._metrics([one.metrics for one in published], took))

    def _metrics(self, parts: Sequence[Mapping[str, float]], took: Mapping[str, float]) -> dict[str, float]:
        """The metrics of one verb, from those of each worker; `took`: the driver's times."""
        metrics = metrics_of_workers(parts)
        if received := metrics.get("publish/bytes", 0.0):
            slowest = max(part["time/gather"] for part in parts)
            metrics["publish/gb_per_second"] = received / 1e9 / slowest
            metrics["publish/link_gb_per_second"] = self.link_gb_per_second
        else:
            metrics.pop("publish/bytes", None)
        return {**metrics, **took}

    def _check_equal(self, digests: Sequence[str], part: int) -> None:
        """Raises WorkersDiffer naming the first worker whose weights are not those of most workers; if no weights are
        those of most, one worker for each of two digests."""
        (common, count), *others = Counter(digests).most_common(2)
        places = [self._team.place(digests.index(one) * self._size + part) for one in (common, *(d for d, _ in others))]
        if others and 2 * count <= len(digests):
            raise WorkersDiffer(
                f"publish: {places[0]} and {places[1]} hold different weights (digests {common[:12]} and"
                f" {others[0][0][:12]}); one of their machines may be faulty: try each without the other, and continue"
                " with --resume"
            )
        for place, digest in enumerate(digests):
            if digest != common:
                worker = self._team.place(place * self._size + part)
                raise WorkersDiffer(
                    f"publish: {worker} holds other weights than most workers (digest {digest[:12]},"
                    f" not {common[:12]}); its machine may be faulty: leave it out, and continue with --resume"
                )

    # ------------------------------------------------------------ saving and loading

    def prepare_saving(self) -> None:
        """Allocates the host memory that `copy_state` needs, before the first step; perhaps beside it."""
        self._team.ask("checkpoint", "prepare_saving")

    def copy_state(self) -> str | None:
        """Copies the state into host memory, for `write_state`. Returns None; or, where the host has no room, why."""
        refusals: list[str | None] = self._team.ask("checkpoint", "copy_state")
        return next((refusal for refusal in refusals if refusal is not None), None)

    def write_state(self, folder: Path, *, copied: bool) -> Sequence[WrittenFile]:
        """Writes the model in Hugging Face form, and the rest of the state, into a checkpoint that is being written.
        Returns the files, which are synced. With `copied` it writes what `copy_state` copied, and may run in another
        thread beside the next step. Without, it writes the live state."""
        written: list[list[WrittenFile]] = self._team.ask("write", "write_state", folder.absolute(), copied)
        return [file for files in written for file in files]

    def load(self, saved: Checkpoint, policy_version: int) -> None:
        """Puts a verified checkpoint back and publishes it. UserError if it is another model's."""
        self._team.ask("load", "load", saved, policy_version)
        self.policy_version = policy_version

    def close(self) -> None:
        """Ends the workers. A second call does nothing."""
        self._team.close()

    # ------------------------------------------------------------ sampling

    @property
    def needs_calibration(self) -> bool:
        """Whether a calibrated FP8 cache has no scales yet."""
        state: WorkerState = self._team.ask_one(0, "state", "state")
        return state.needs_calibration

    def calibrate(self, token_lists: Sequence[Sequence[int]]) -> Mapping[str, float]:
        """Makes KV scales from one forward over these sequences, and publishes them. Returns what it took."""
        with self._console.phase("calibrate"), self._clock("calibrate") as took:
            parts: list[Mapping[str, float]] = self._team.ask("calibrate", "calibrate", token_lists)
        return parts[0] if self.in_process else self._metrics(parts, took)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
    ) -> list[list[Completion]]:
        """`num_siblings` completions of each request, in the order of the requests. `on_completions` receives each when
        it ends, `on_end` the record of what was done."""
        assert self._sampler is not None, "workers that train a reward model sample nothing"
        with rollout_shown(self._console, most_tokens(requests)) as on_progress:
            return self._sampler.generate(requests, on_progress, on_completions, on_end)

    @contextmanager
    def session(self, on_end: OnSession = not_asked) -> Iterator[MeasuredSession]:
        """An open session: requests in, events out (rollout/backend.py). `on_end` receives its record."""
        assert self._sampler is not None, "workers that train a reward model sample nothing"
        with rollout_shown(self._console) as on_progress, self._sampler.session(on_progress, on_end) as session:
            yield session

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """The score of each (task, completion text) by `environment.reward_model`, in their order. Each worker scores a
        contiguous part."""
        size = self._engine_team.size
        bounds = [len(completions) * part // size for part in range(size + 1)]
        parts = [(list(completions[start:end]),) for start, end in pairwise(bounds)]
        return [score for part in self._engine_team.ask_each("score", "score", parts) for score in part]

    def remember(self, answers: Sequence[EarlierAnswer]) -> None:
        """Gives answers of earlier steps, oldest first, to engines that make drafts from them; other backends ignore
        them. Each worker gets all, because any worker may sample the next answer to the same prompt."""
        self._engine_team.ask("load", "remember", answers)

    def forget_prefixes(self) -> None:
        """The next request prefills its whole prompt, whatever was generated before."""
        self._engine_team.ask("rollout", "forget_prefixes")


def local_workers(built: BuiltWorker, console: Console) -> Workers:
    """The worker of this process as `Workers`: the embedded default, on a CPU or one GPU."""
    sampler = built.worker if isinstance(built.worker, Worker) else None
    return Workers(LocalTeam(built, console), console, sampler)


def _say_what_was_read(console: Console, states: Sequence[WorkerState]) -> None:
    read = max(state.loaded.read_bytes for state in states) / 1e9
    if read:  # not of random weights
        quantized = max(state.loaded.quantized_bytes for state in states) / 1e9
        seconds = max(state.loaded.seconds for state in states)
        console.note(
            f"each worker read at most {size_in_words(read)} of weights and quantised {size_in_words(quantized)},"
            f" in {seconds:.1f} s"
        )


def metrics_of_workers(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a verb that all workers ran: the largest peak of memory, the slower path of any worker, and of
    each phase the seconds of each (`worker_times`). Of what else they say, the first worker's counts."""
    metrics: dict[str, float] = {}
    for name in {name: None for part in parts for name in part}:
        values = [part.get(name, 0.0) for part in parts]
        if name in TIMED:
            metrics |= worker_times(name, values)
        elif name.endswith(("/fused", "/captured")):
            metrics[name] = min(values)
        elif name.startswith("memory/") or name in ("fp8/gluon_fallbacks", "publish/bytes"):
            metrics[name] = max(values)
        else:
            metrics[name] = parts[0][name]
    return metrics

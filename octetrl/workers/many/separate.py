"""`Workers` of a run whose workers only train or only generate (`cluster.trainer_gpus`, `cluster.engine_gpus`).

train, save, load      the trainers alone
generate, score        the others, with the weights that they received
publish, calibrate     the trainers; then their codes, scales and other weights are sent, and digests are compared
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from octetrl.engine.admission import Admission
from octetrl.environments.score import Score
from octetrl.records import Completion, GenerationRequest, OnCompletions, PackedBatch, PolicyUpdate, Published, Task
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.packing import PackingLayout
from octetrl.trainer.peers import serve_store
from octetrl.workers.many.session import ManySession
from octetrl.workers.many.team import PartOfTeam, Team
from octetrl.workers.many.workers import ManyWorkers, TeamContext, WorkersDiffer, memory_of, paths_of, times_of


class SeparateWorkers:
    """`Workers` on the workers of `team`, which have not loaded their model yet."""

    def __init__(
        self,
        team: Team,
        roles: tuple[int, int],
        context: TeamContext,
        admission: Admission,
        *,
        staged: bool = False,
        in_flight: bool = False,
    ) -> None:
        """roles: number of workers that train, and of those that generate; the first workers of `team` train. staged:
        the weights that `publish` sends wait beside the old ones until `adopt`, so that a session may be open.
        in_flight: they wait for no `adopt`; an open session continues with them."""
        self._spans, self._adopts_at_once = context.spans, in_flight or not staged
        self.pause_seconds = 0.0  # how long nothing could be generated when weights were last adopted
        self._published: Published | None = None  # and sent, but not adopted
        self._weights = threading.RLock()  # they are sent and adopted in different threads
        trainer_team = PartOfTeam(team, range(roles[0]))
        engine_team = PartOfTeam(team, range(roles[0], sum(roles)))
        self._team, self._trainer_team, self._engine_team = team, trainer_team, engine_team
        self._trainers = ManyWorkers(trainer_team, context, admission)
        self._engine_workers = ManyWorkers(engine_team, context, admission, trains=False)
        self._store, address = serve_store(team.host)  # NCCL asks it for as long as the workers live
        meetings = [
            trainer_team.begin(0, "meet_for_weights", address),
            *(engine_team.begin(worker, "meet_for_weights", address) for worker in range(engine_team.size)),
        ]
        trainer_team.collect("load", meetings[:1])
        engine_team.collect("load", meetings[1:])

    # ------------------------------------------------------------ the trainers

    @property
    def layout(self) -> PackingLayout:
        return self._trainers.layout

    @property
    def policy_version(self) -> int:
        return self._trainers.policy_version

    @property
    def weights_are_whole(self) -> bool:
        return self._trainers.weights_are_whole

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        return self._trainers.train(batch)

    def prepare_saving(self) -> None:
        self._trainers.prepare_saving()

    def copy_state(self) -> str | None:
        return self._trainers.copy_state()

    def write_state(self, folder: Path, *, copied: bool) -> Sequence[WrittenFile]:
        return self._trainers.write_state(folder, copied=copied)

    # ------------------------------------------------------------ new weights

    def publish(self, policy_version: int) -> Published:
        published = self._trainers.publish(policy_version)
        with self._spans("send_weights"), self._weights:
            num_bytes = self._send()
            self._published = published
            metrics = {**published.metrics, "publish/sent_gb": num_bytes / 1e9}
            if self._adopts_at_once:
                self.adopt()
                metrics["time/publish_pause"] = self.pause_seconds
        return replace(published, metrics=metrics)

    def load(self, saved: Checkpoint, policy_version: int) -> None:
        self._trainers.load(saved, policy_version)
        self.publish(policy_version)
        self.adopt()

    @property
    def needs_calibration(self) -> bool:
        return self._trainers.needs_calibration

    def calibrate(self, token_lists: Sequence[Sequence[int]]) -> None:
        self._trainers.calibrate(token_lists)
        self.publish(self.policy_version)
        self.adopt()

    def _send(self) -> int:
        """Sends what the trainers have published to the workers that generate. Returns bytes."""
        sending = self._trainer_team.begin(0, "send_weights")
        self._engine_team.ask("publish", "receive_weights")
        num_bytes: int = self._trainer_team.collect("publish", [sending])[0]
        return num_bytes

    def adopt(self) -> None:
        """The workers that generate do so with the weights last sent, also in an open session. Compares what they
        hold."""
        with self._weights:
            published, self._published = self._published, None
            if published is not None:
                self._adopt(published)

    def _adopt(self, published: Published) -> None:
        held: list[Published] = self._engine_team.ask("publish", "adopt_weights")
        self.pause_seconds = max(one.metrics["time/publish_pause"] for one in held)
        for worker, one in enumerate(held):
            if (one.policy_version, one.weights_digest) != (published.policy_version, published.weights_digest):
                raise WorkersDiffer(
                    f"publish: {self._engine_team.place(worker)} holds other weights than were sent to it (digest"
                    f" {one.weights_digest[:12]}, not {published.weights_digest[:12]}); its machine may be faulty:"
                    " leave it out, and continue with --resume"
                )

    # ------------------------------------------------------------ the workers that generate

    def generate(
        self, requests: Sequence[GenerationRequest], on_completions: OnCompletions | None = None
    ) -> list[list[Completion]]:
        return self._engine_workers.generate(requests, on_completions)

    @contextmanager
    def session(self) -> Iterator[ManySession]:
        with self._engine_workers.session() as session:
            yield session

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        return self._engine_workers.score(completions)

    def forget_prefixes(self) -> None:
        self._engine_workers.forget_prefixes()

    def rollout_metrics(self) -> Mapping[str, float]:
        return self._engine_workers.rollout_metrics()

    # ------------------------------------------------------------ all

    def memory_metrics(self) -> Mapping[str, float]:
        return memory_of(self._team)

    def path_metrics(self) -> Mapping[str, float]:
        return paths_of(self._team)

    def time_metrics(self) -> Mapping[str, float]:
        return times_of(self._team, self._trainers.link_gb_per_second)

    def close(self) -> None:
        self._team.close()

"""`Workers` of a run whose workers only train or only generate (`cluster.trainer_gpus`, `cluster.engine_gpus`).

train, save, load      the trainers alone
generate, score        the others, with the weights that they received
publish, calibrate     the trainers; then their codes, scales and other weights are sent, and digests are compared

With a second buffer in the workers that generate (`cluster.weight_buffer`), weights are sent while they generate.
Without, they are sent in a pause.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from octetrl.config.worker_memory import BufferChoice
from octetrl.records import Published, joined
from octetrl.telemetry.console import Console
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.peers import serve_store
from octetrl.workers.assignment import Costs
from octetrl.workers.team import Call, PartOfTeam, ProcessTeam
from octetrl.workers.workers import Sampler, Workers, WorkersDiffer


def not_waited() -> AbstractContextManager[dict[str, float]]:
    """The context that waits for nothing; its metrics are empty."""
    return nullcontext({})


class SeparateWorkers(Workers):
    """`Workers` on the workers of `team`, the first of which train, while the others generate."""

    def __init__(
        self,
        team: ProcessTeam,
        roles: tuple[int, int],
        console: Console,
        sampler: Callable[[ProcessTeam], Sampler],
        *,
        costs: Costs,
        is_ahead: bool = False,
        in_flight: bool = False,
    ) -> None:
        """roles: number of workers that train, and of those that generate. sampler: called with the team of the latter.

        is_ahead: a session may be open while `publish` sends weights. They wait in a second buffer for `adopt`; without
        one `publish` waits for the end of the batch. in_flight: an open session continues with them at once.
        """
        trainer_team = PartOfTeam(team, range(roles[0]))
        engine_team = PartOfTeam(team, range(roles[0], sum(roles)))
        super().__init__(trainer_team, console, sampler(engine_team), costs=costs)
        self._engines = Workers(engine_team, console, trains=False)  # loads their model; its store is asked on
        self._trainer_team, self._engine_team = trainer_team, engine_team
        self._is_ahead, self._in_flight = is_ahead, in_flight
        self.between_batches: Callable[[], AbstractContextManager[dict[str, float]]] = not_waited
        """A context in which no batch is generated, with the metrics of the wait; set by who generates ahead."""
        self._sent_bytes = 0  # of the weights last sent
        self._receive_seconds = 0.0  # that they took to arrive at the slowest worker
        self.pause_seconds = 0.0  # how long nothing could be generated when weights were last adopted
        self._published: Published | None = None  # and sent, but not adopted
        self._weights = threading.RLock()  # they are sent and adopted in different threads
        self._weight_store, address = serve_store(team.host)  # NCCL asks it for as long as the workers live
        meetings = [
            trainer_team.begin(0, "meet_for_weights", address),
            *(engine_team.begin(worker, "meet_for_weights", address) for worker in range(engine_team.size)),
        ]
        trainer_team.collect("load", meetings[:1])
        choices: list[BufferChoice] = engine_team.collect("load", meetings[1:])
        choice = min(choices, key=lambda one: one.doubles)  # one worker without room decides for all
        self.is_doubled = is_ahead and choice.doubles
        if is_ahead:
            how = "in a second buffer" if choice.doubles else "in place, in a pause"
            console.note(f"new weights arrive {how}: {choice.why}")
        if self.is_doubled:
            engine_team.ask("load", "double_weights")

    def publish(self, policy_version: int) -> Published:
        published = super().publish(policy_version)
        waits = self.between_batches if not (self.is_doubled or self._in_flight) else not_waited
        with waits() as waited, self._clock("send_weights") as took, self._weights:
            if self.is_doubled:
                sending = self._trainer_team.begin(0, "send_weights")
                self._receive_seconds = max(self._engine_team.ask("publish", "receive_weights"))
                self._collect_sent(sending)
            self._published = published
            if self._in_flight or not self.is_doubled:
                self.adopt()
        sent, seconds = self._sent_bytes / 1e9, self._receive_seconds
        metrics = {"publish/sent_gb": sent, "publish/sent_gb_per_second": sent / seconds}
        metrics["time/receive_weights"] = seconds
        if self._in_flight or not self._is_ahead:
            metrics["time/publish_pause"] = self.pause_seconds
        return replace(published, metrics=joined(published.metrics, metrics, took, waited))

    def load(self, saved: Checkpoint, policy_version: int) -> None:
        super().load(saved, policy_version)
        self.publish(policy_version)
        self.adopt()

    def calibrate(self, token_lists: Sequence[Sequence[int]]) -> Mapping[str, float]:
        took = super().calibrate(token_lists)
        self.publish(self.policy_version)
        self.adopt()
        return took

    def _collect_sent(self, sending: Call) -> None:
        self._sent_bytes = self._trainer_team.collect("publish", [sending])[0]

    def adopt(self) -> None:
        """The workers that generate do so with the weights last published, also in an open session. Without a second
        buffer these are sent now. Compares what they hold."""
        with self._weights:
            published, self._published = self._published, None
            if published is not None:
                self._adopt(published)

    def _adopt(self, published: Published) -> None:
        sending = None if self.is_doubled else self._trainer_team.begin(0, "send_weights")
        held: list[Published] = self._engine_team.ask("publish", "adopt_weights")
        if sending is not None:
            self._collect_sent(sending)
        self.pause_seconds = max(one.metrics["time/publish_pause"] for one in held)
        self._receive_seconds = max(one.metrics["time/receive_weights"] for one in held)
        for worker, one in enumerate(held):
            if (one.policy_version, one.weights_digest) != (published.policy_version, published.weights_digest):
                raise WorkersDiffer(
                    f"publish: {self._engine_team.place(worker)} holds other weights than were sent to it (digest"
                    f" {one.weights_digest[:12]}, not {published.weights_digest[:12]}); its machine may be faulty:"
                    " leave it out, and continue with --resume"
                )

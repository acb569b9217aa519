"""Workers that only train and workers that only generate make the run of as many workers that do both, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.models.weight_files import SINGLE
from octetrl.records import Published
from octetrl.workers import transfer
from tests.unit.workers.thread_team import assert_a_wrong_worker_is_named, run_on, steps_of, team_of

pytestmark = pytest.mark.usefixtures("rewards_here")

SENT = "publish/sent_gb"  # what only such a run has, beside its times


@pytest.mark.parametrize(
    ("changes", "trainers", "engines"),
    [
        ({"rollout.prompts_per_step": 4}, 2, 2),
        ({"precision": "fp8_rollout"}, 2, 1),
        ({"precision": "bf16"}, 1, 1),
        ({"model.lora.rank": 4, "precision": "fp8"}, 1, 2),
    ],
    ids=["fp8", "fp8 rollout", "bf16", "lora"],
)
def test_separate_workers_change_no_bit(
    changes: dict[str, Any], trainers: int, engines: int, model: Path, tmp_path: Path
) -> None:
    changes = changes | {"trainer.tokens_per_micro_batch": 64, "steps": 2, "checkpoint.every": 0}
    with run_on(trainers, model, tmp_path, **changes) as run:
        expected, lines = steps_of(run, 2)
    with run_on(trainers, model, tmp_path, engines=engines, **changes) as run:
        drawn, separate = steps_of(run, 2)
        team = team_of(run)
        assert drawn == expected
        assert [line.pop(SENT) > 0 for line in separate] == [True, True]
        assert separate == lines
        assert {worker for worker, verb in team.begun if verb == "submit"} <= set(range(trainers, trainers + engines))
        assert {worker for worker, verb in team.begun if verb == "train"} == set(range(trainers))
        if engines > 1:  # they load the model together
            read = max(worker._loaded.read_bytes for worker in team.workers[trainers:])
            assert read < 0.75 * (model / SINGLE).stat().st_size


def test_a_worker_that_holds_other_weights_than_were_sent_is_named(model: Path, tmp_path: Path) -> None:
    with run_on(1, model, tmp_path, engines=2, precision="bf16") as run:
        assert_a_wrong_worker_is_named(run)


@pytest.mark.parametrize("bucket_bytes", [1, 3000])
def test_a_tensor_as_large_as_a_bucket_travels_without_one(
    bucket_bytes: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publishing compares what has arrived."""
    monkeypatch.setattr(transfer, "BUCKET_BYTES", bucket_bytes)
    alone: list[bool] = []
    travel = transfer.Transfer._from_first

    def counted(self: transfer.Transfer, bytes_B: Tensor) -> None:
        alone.append(bytes_B.nbytes > bucket_bytes)
        travel(self, bytes_B)

    monkeypatch.setattr(transfer.Transfer, "_from_first", counted)
    with run_on(1, model, tmp_path, engines=1, precision="fp8_full") as run:
        held = [next(worker._policy.trainer_model.parameters()) for worker in team_of(run).workers]
        with torch.no_grad():
            held[0][:] += 1
        (sent,) = {run.workers.publish(0).metrics[SENT]}
        assert held[0].equal(held[1]) and sent > 0
    assert all(alone) if bucket_bytes == 1 else {True, False} == set(alone)


def let_it_take(worker: Any, seconds: float) -> None:
    """From now on the worker reports that weights took so long to arrive, and generation paused twice as long."""
    adopt, clock = type(worker).adopt_weights, {"time/publish_pause": 2 * seconds, "time/receive_weights": seconds}

    def adopt_weights() -> Published:
        published = adopt(worker)
        return replace(published, metrics={**published.metrics, **clock})

    worker.receive_weights = lambda: (type(worker).receive_weights(worker), seconds)[1]
    worker.adopt_weights = adopt_weights


@pytest.mark.parametrize("buffer", ["single", "double"])
def test_times_are_those_of_the_slowest_worker(buffer: str, model: Path, tmp_path: Path) -> None:
    ahead = int(buffer == "double")
    with run_on(1, model, tmp_path, engines=2, ahead=ahead, buffer=buffer, precision="bf16") as run:
        workers, team = run.workers, team_of(run)
        assert workers.is_doubled == (buffer == "double")
        for seconds in ((7.0, 3.0), (3.0, 7.0)):
            for worker, one in zip(team.workers[1:], seconds, strict=True):
                let_it_take(worker, one)
            metrics = workers.publish(0).metrics
            assert metrics["time/receive_weights"] == 7.0
            assert metrics["publish/sent_gb_per_second"] == metrics[SENT] / 7.0
            begun = len(team.begun)
            workers.adopt()
            assert workers.pause_seconds == 14.0
            workers.adopt()
            adopted = [worker for worker, verb in team.begun[begun:] if verb == "adopt_weights"]
            assert adopted == ([1, 2] if workers.is_doubled else []), "weights are adopted once"


def test_the_time_of_receiving_begins_when_the_sender_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def broadcast(tensors: list[Tensor]) -> int:
        is_header = len(tensors) == 1 and tensors[0].dtype == torch.int64
        clock[0] += 100.0 if is_header else 2.0  # it comes when the trainer has published
        if is_header:
            tensors[0].copy_(torch.tensor([5, transfer.NONE]))
        return 0

    monkeypatch.setattr(transfer, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(transfer, "weight_tensors", lambda worker: [torch.zeros(3)])
    worker: Any = SimpleNamespace(trainer=SimpleNamespace(policy_version=0))
    link: Any = SimpleNamespace(broadcast=broadcast)
    receiver = transfer.WeightReceiver(worker, link)
    assert receiver.adopt() == worker.trainer.policy_version == 5
    assert receiver.seconds == 2.0

"""Learning beside the tail draws what a run without it draws; for equal micro-batches its updates have equal bits."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.engine.session import Session
from octetrl.environments.reward_workers import RewardRound
from octetrl.records import MicroBatch, PackedBatch, RolloutGroup
from octetrl.rollout.samples import to_samples
from octetrl.run.loop import _calibrate_first
from octetrl.run.state import Run
from octetrl.run.step import produce
from octetrl.workers import sampler, tail
from octetrl.workers.hosted import StreamedUpdate
from tests.e2e.test_ahead_faults import run_with, struck
from tests.e2e.tiny_run import read_lines, recipe_tree
from tests.unit.workers.thread_team import RunTeam, assert_same_measures, run_on, steps_of, team_of

CHANGES: dict[str, Any] = {
    "rollout.prompts_per_step": 5,
    "rollout.max_new_tokens": 28,
    "rollout.stop": ["e", "a", "1"],  # answers of different lengths
    "engine.max_batch": 8,
    "trainer.tokens_per_micro_batch": 96,
    "trainer.optimizer.decay": "linear",  # so that equal metrics are those of equal steps
    "algorithm": {"name": "grpo", "token_weighting": "sequence", "drop_zero_variance": False},
}
PAUSE = 0.015
ONLY_WITH = {"rollout/moved_answers", "train/beside_tail_share"}


@pytest.fixture(autouse=True)
def pause(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """There is always a tail. The seconds before each forward, so that rewards arrive before the last answer has
    ended; 0 for a run that waits for all."""
    monkeypatch.setattr(tail, "TAIL_SHARE", 1.5)
    seconds = [PAUSE]
    advance, nobody_waits = Session._advance, threading.Event()
    nobody_waits.set()

    def slowly(self: Session) -> Any:
        time.sleep(seconds[0])
        nobody_waits.wait(60.0)
        return advance(self)

    def until_done(self: RewardRound) -> None:
        nobody_waits.clear()
        try:
            while not self.is_done:
                self._advance(waits=True)
        finally:
            nobody_waits.set()

    monkeypatch.setattr(Session, "_advance", slowly)
    monkeypatch.setattr(RewardRound, "advance", until_done)
    monkeypatch.setattr(sampler, "LINGER_SECONDS", 0.0)
    return seconds


def start_rewards(run: Run) -> None:
    """Starts the reward processes, which takes longer than a step."""
    place = run.taskset.state()
    task = run.taskset.next_batch(1)[0]
    run.taskset.restore(place)
    run.rewards.score([(task, "1")] * 4)  # type: ignore[union-attr]


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[MicroBatch]]:
    """The micro-batches of each worker, by the id of its trainer, in the order of their backward."""
    found: dict[int, list[MicroBatch]] = defaultdict(list)
    add = StreamedUpdate.add

    def noted(self: StreamedUpdate, part: PackedBatch) -> None:
        found[id(self._worker)] += part.minibatches[0]
        add(self, part)

    monkeypatch.setattr(StreamedUpdate, "add", noted)
    return found


def weights_of(run: Run) -> list[dict[str, Tensor]]:
    """Of each worker: weights, moments and KV scales."""
    found = []
    for hosted in team_of(run).workers:
        worker = hosted._policy
        state = worker.trainer.state()
        parts = {**state.weights, **state.optimizer}
        parts |= {"scales": worker.kv_scales.scale_LS} if worker.kv_scales is not None else {}
        found.append({name: one.clone() for name, one in parts.items()})
    return found


@pytest.mark.parametrize(("count", "precision"), [(2, "fp8_full"), (3, "bf16")])
def test_a_streamed_step_has_the_bits_of_one_that_waits(
    count: int, precision: str, model: Path, tmp_path: Path, backwards: dict[int, list[MicroBatch]], pause: list[float]
) -> None:
    changes = {**CHANGES, "precision": precision, "steps": 1}
    with run_on(count, model, tmp_path, beside_tail=True, **changes) as run:
        start_rewards(run)
        _, (line,) = steps_of(run, 1)
        streamed = weights_of(run)
        parts = [tuple(backwards[id(hosted._policy)]) for hosted in team_of(run).workers]
        verbs = [verb for _, verb in team_of(run).begun]
    assert line["mismatch/max_abs_diff"] == 0.0
    assert line["rollout/moved_answers"] > 0 and line["train/beside_tail_share"] > 0
    assert verbs.count("withdraw") == count - 1 and all(parts)
    pause[0] = 0.0
    with run_on(count, model, tmp_path, **changes) as run:
        _calibrate_first(run)
        samples = to_samples(produce(run, 1).kept, run.algorithm)
        denominator = float(len(samples))
        whole = [(PackedBatch((part,), (denominator,), 0),) for part in parts]
        update = run.workers._update("train", whole)
        waited = weights_of(run)
    for name, value in update.metrics.items():
        if name in line:
            assert line[name] == value, name
    for mine, other in zip(streamed, waited, strict=True):
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("refills", [0, 1])
def test_a_step_draws_the_same_and_measures_the_same(
    refills: int, model: Path, tmp_path: Path, pause: list[float]
) -> None:
    """Without equal micro-batches, and with a denominator that is not known before: up to rounding. Refills open
    further sessions in the step, and some groups are not kept."""
    algorithm = {**CHANGES["algorithm"], "token_weighting": "token", "kl_coefficient": 0.1, "max_refills": refills}
    algorithm["drop_zero_variance"] = refills > 0
    changes = {**CHANGES, "algorithm": algorithm, "precision": "bf16", "steps": 1}

    def keeps(group: RolloutGroup) -> bool:
        return not refills or sum(map(len, (one.text for one in group.rollouts))) % 2 > 0

    pause[0] = 0.0
    with run_on(2, model, tmp_path, **changes) as run:
        run = replace(run, algorithm=replace(run.algorithm, keeps=keeps))
        expected, lines = steps_of(run, 1)
    pause[0] = PAUSE
    with run_on(2, model, tmp_path, beside_tail=True, **changes) as run:
        start_rewards(run)
        run = replace(run, algorithm=replace(run.algorithm, keeps=keeps))
        drawn, streamed = steps_of(run, 1)
    assert drawn == expected
    assert all(line["rollout/refills"] == refills for line in lines)
    for line, mine in zip(lines, streamed, strict=True):
        assert mine["train/beside_tail_share"] > 0
        mine = {name: value for name, value in mine.items() if name not in ONLY_WITH}
        packing = {"train/micro_batches", "train/packing_efficiency", "rollout/batch_occupancy"}
        assert_same_measures(*({n: v for n, v in one.items() if n not in packing} for one in (mine, line)))


def test_a_step_whose_worker_dies_is_drawn_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: list[float]
) -> None:
    """The run draws what one draws that nobody kills, with the tail or without. The learning rate is 0."""
    steps = {"steps": 2, "checkpoint.every": 1, "cluster.cpus": 2, "cluster.device": "auto", "precision": "bf16"}
    changes = {**CHANGES, **steps, "trainer.optimizer.lr": 0.0, "rollout.prompts_per_step": 3}
    pause[0] = 0.0
    run_with(RunTeam, recipe_tree(model, tmp_path / "whole", changes), monkeypatch)
    pause[0] = PAUSE
    killed = {"rollout.learn_beside_tail": True, "cluster.max_restarts": 1}
    team = struck((1, "finish_update", 1))  # in the second step, when all has been trained on
    run_with(team, recipe_tree(model, tmp_path / "killed", changes | killed), monkeypatch)
    assert next(team.strikes, None) is None  # it struck
    for name in ("step_000001.jsonl", "step_000002.jsonl"):
        mine, other = (tmp_path / folder / "rollouts" / name for folder in ("killed", "whole"))
        assert mine.read_bytes() == other.read_bytes()
    for line in read_lines(tmp_path / "killed" / "metrics.jsonl"):
        assert line["mismatch/max_abs_diff"] == 0.0 and "train/beside_tail_share" in line

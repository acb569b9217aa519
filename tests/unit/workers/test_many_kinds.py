"""Reward models and mixtures of experts on several workers, against the same updates by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.table import build_algorithm
from octetrl.config.schema import LoraConfig, ModelConfig, OptimizerConfig, Recipe, RouterConfig, TrainerConfig
from octetrl.fp8.policy import precision_policy
from octetrl.models.peft_adapters import begin_adapters
from octetrl.models.row_shards import RowShards
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import PackedBatch, Sample
from octetrl.trainer import checkpoint
from octetrl.trainer.packing import pack
from octetrl.trainer.peers import ALONE, Peers
from octetrl.workers.reward_model_worker import RewardModelWorker
from octetrl.workers.worker import Worker
from tests.objectives import objective
from tests.parity.short_run import worker_of
from tests.parity.sides import PRECISIONS
from tests.saved_checkpoint import save_checkpoint
from tests.team import run_team
from tests.unit.trainer.test_critic import pairs
from tests.unit.trainer.tiny_trainer import random_samples
from tests.unit.workers.test_checkpoint_state import MOE, SPEC

STEPS = 3


class Run(NamedTuple):
    metrics: list[dict[str, float]]
    digests: list[str]
    gradients: dict[str, Tensor]  # owned rows, of the first step
    state: dict[str, Tensor]  # copies of the owned rows of weights and moments


def part_of(samples: Sequence[Sample], worker: Worker | RewardModelWorker, peers: Peers) -> PackedBatch:
    whole = pack(samples, worker.layout, "token")
    rank, count = peers.share.rank, peers.share.count
    return replace(whole, minibatches=tuple(minibatch[rank::count] for minibatch in whole.minibatches))


def run_of(worker: Worker | RewardModelWorker, batches: Sequence[Sequence[Sample]], peers: Peers) -> Run:
    trainer = worker.trainer if isinstance(worker, Worker) else worker.trainer.scalar_trainer
    metrics, digests, gradients = [], [], dict[str, Tensor]()
    for samples in batches:
        update = worker.train(part_of(samples, worker, peers))
        gradients = gradients or {slot.name: slot.gradient.clone() for slot in trainer.optimizer.slots}
        digests.append(worker.publish(update.policy_version).weights_digest)
        metrics.append(dict(update.metrics))
    state = trainer.state()
    held = {f"weight {name}": one.clone() for name, one in state.weights.items()}
    return Run(metrics, digests, gradients, held | {name: one.clone() for name, one in state.optimizer.items()})


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for part in parts for name in part)
    own = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: rows[0] if rows[0].dim() == 0 else torch.cat(rows) for name, rows in own.items()}


def check(alone: Run, runs: Sequence[Run], *, exact_metrics: Sequence[str] = ()) -> None:
    """One update within the order of float32 sums; weights equal on all workers. Later losses are only near: single
    weights are rounded to other codes, and which ones depends on the processor."""
    assert all(run.digests == runs[0].digests for run in runs)
    together = joined([run.gradients for run in runs])
    assert together.keys() == alone.gradients.keys()
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(together[name], gradient, rtol=2e-5, atol=2e-6 * float(gradient.abs().max()))
    for run in runs:
        for mine, theirs in zip(run.metrics, alone.metrics, strict=True):
            assert mine.keys() - {"publish/bytes", "time/gather"} == theirs.keys()
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
        for name in ("loss", *exact_metrics):
            assert run.metrics[0][name] == pytest.approx(alone.metrics[0][name], rel=1e-6)


# ---------------------------------------------------------------- mixtures


def mixture(peers: Peers, precision: str) -> Worker:
    recipe = Recipe(
        model=ModelConfig(preset="tiny", init="random", context_length=256),
        fp8=PRECISIONS[precision],
        algorithm=objective(),
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(lr=1e-3),
            tokens_per_micro_batch=64,
            router=RouterConfig(balance_loss=0.1, z_loss=0.01, bias_rate=0.05),
        ),
        steps=9,
    )
    return worker_of(recipe, MOE, "cpu", peers)


def biases(worker: Worker) -> Tensor:
    named = worker.trainer_model.named_parameters()
    return torch.cat([bias.detach() for name, bias in named if name.endswith("correction_bias")])


@pytest.mark.parametrize(("precision", "gradients"), [("bf16", "sharded"), ("fp8", "local")])
def test_a_mixture(precision: str, gradients: Any) -> None:
    batches = [random_samples(6, seed, policy_version=None) for seed in range(2)]

    def work(peers: Peers) -> tuple[Run, Tensor]:
        worker = mixture(peers, precision)
        return run_of(worker, batches, peers), biases(worker)

    alone, expected = work(ALONE)
    team = run_team(3, work, gradients=gradients)
    check(alone, [run for run, _ in team], exact_metrics=["router/load_max_over_mean", "router/entropy"])
    assert expected.abs().max() > 0
    assert all(torch.equal(bias, expected) for _, bias in team)


# ---------------------------------------------------------------- reward models


def reward_model(peers: Peers, kind: str) -> RewardModelWorker:
    lora = LoraConfig(rank=4) if kind == "lora" else None
    recipe = Recipe(
        model=ModelConfig(preset="tiny", init="random", context_length=256, lora=lora),
        algorithm=objective(name="reward_model"),
        trainer=TrainerConfig(optimizer=OptimizerConfig(lr=1e-3), tokens_per_micro_batch=64),
        steps=STEPS,
    )
    fp8 = PRECISIONS["fp8" if kind == "fp8" else "bf16"]
    model = ScalarDecoder(SPEC, precision_policy(SPEC, fp8), lora=lora)
    model.random_init(3)
    if lora is not None:
        begin_adapters(model, 3)
        model.train_adapters_alone()
    return RewardModelWorker(recipe, model, build_algorithm(recipe.algorithm), peers=peers)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "lora"])
def test_a_reward_model_and_its_checkpoint(kind: str, tmp_path: Path) -> None:
    batches = [pairs(6, seed) for seed in range(STEPS)]

    def work(peers: Peers) -> tuple[RewardModelWorker, Run]:
        worker = reward_model(peers, kind)
        return worker, run_of(worker, batches, peers)

    _, alone = work(ALONE)
    team = run_team(2, work)
    runs = [run for _, run in team]
    check(alone, runs, exact_metrics=["train/pairs"])
    assert len(set(runs[0].digests)) == STEPS

    def write(place: Path) -> list[Any]:
        return [file for worker, _ in team for file in worker.write_state(place, copied=False)]

    path = save_checkpoint(tmp_path, STEPS, {}, write_more=write)
    assert RowShards.find(path) is not None

    def loaded(peers: Peers) -> dict[str, Tensor]:
        worker = reward_model(peers, kind)
        worker.load(checkpoint.load(path), STEPS)
        assert worker.policy_version == STEPS
        return run_of(worker, [], peers).state

    saved = joined([run.state for run in runs])
    for found in (run_team(3, loaded), run_team(2, loaded), [loaded(ALONE)]):
        whole = joined(found)
        assert whole.keys() == saved.keys()
        assert all(torch.equal(whole[name], saved[name]) for name in saved)

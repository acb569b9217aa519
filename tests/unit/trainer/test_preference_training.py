"""Preference pairs and teachers in the trainer: the policy goes where it is pulled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from octetrl.config.objective_settings import AlgorithmConfig
from octetrl.config.schema import Fp8Config, OptimizerConfig
from octetrl.records import Sample
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.trainer.trainer import Trainer
from tests.objectives import objective
from tests.unit.trainer.tiny_trainer import BF16, pairs, random_samples, tiny_decoder, tiny_trainer

FP8 = Fp8Config(train=True)


def trainer_of(
    algorithm: AlgorithmConfig,
    *,
    fp8: Fp8Config = BF16,
    dtype: torch.dtype = torch.float32,
    other: int = 0,
    **config: Any,
) -> Trainer:
    """`other`: the seed of the reference's weights; 0: the policy's own."""
    return tiny_trainer(
        tiny_decoder(fp8, dtype),
        algorithm,
        reference=tiny_decoder(fp8, dtype, seed=other),
        optimizer=OptimizerConfig(lr=2e-3, max_grad_norm=1e9),
        **config,
    )


def steps(trainer: Trainer, samples: list[Sample], layout: PackingLayout, count: int = 1) -> list[dict[str, float]]:
    batch = pack(samples, layout, trainer.algorithm.token_weighting)
    return [dict(trainer.train(batch, KVReplay(), None).metrics) for _ in range(count)]


@pytest.mark.parametrize("fp8", [BF16, FP8, Fp8Config(rollout=True, train=True, kv_cache="dynamic")])
def test_the_reference_has_the_policys_precision(fp8: Fp8Config) -> None:
    """Before the first update policy and reference are one model, so every log-ratio is 0, to the bit."""
    trainer = trainer_of(objective(name="dpo"), fp8=fp8, dtype=torch.bfloat16)
    batch = pack(pairs(random_samples(6)), PackingLayout(64), "sequence")
    metrics = trainer.train(batch, KVReplay(fp8.kv_cache), None).metrics
    assert metrics["preference/margin"] == 0.0 and metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("fp8", [BF16, FP8])
def test_dpo_tells_the_better_answer_from_the_worse(fp8: Fp8Config) -> None:
    trainer = trainer_of(objective(name="dpo"), fp8=fp8, dtype=torch.bfloat16)
    lines = steps(trainer, pairs(random_samples(8)), PackingLayout(1000), count=6)
    assert lines[0]["preference/accuracy"] == 0.0 and lines[-1]["preference/accuracy"] == 1.0
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[-1]["preference/margin"] > 0.1


@pytest.mark.parametrize(("distillation", "fp8"), [("reverse_kl", FP8), ("forward_kl", BF16)])
def test_a_policy_comes_closer_to_its_teacher(distillation: Any, fp8: Fp8Config) -> None:
    algorithm = objective(name="distill", teacher="t", distillation=distillation, teacher_top_k=6)
    trainer = trainer_of(algorithm, fp8=fp8, dtype=torch.bfloat16, other=1)
    lines = steps(trainer, random_samples(6), PackingLayout(64), count=8)
    assert 0 < lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["distill/policy_mass"] > lines[0]["distill/policy_mass"]


def test_sampled_tokens_that_the_teacher_likes_become_likelier() -> None:
    trainer = trainer_of(objective(name="distill", teacher="t"), other=1)
    samples = random_samples(6)
    batch = pack(samples, PackingLayout(1000), "token")
    ((micro_batch,),) = batch.minibatches
    teacher = trainer.reference.model
    assert teacher is not None
    with torch.no_grad():
        before_N, _ = trainer.forward.logprobs(micro_batch, KVReplay())
        wanted_N, _ = trainer.reference_forward.logprobs(micro_batch, KVReplay())
    on_policy = replace(micro_batch, generator_logprobs_N=before_N)
    trainer.train(replace(batch, minibatches=((on_policy,),)), KVReplay(), None)
    with torch.no_grad():
        after_N, _ = trainer.forward.logprobs(micro_batch, KVReplay())
    pull_N, moved_N = wanted_N - before_N, after_N - before_N
    assert float(torch.corrcoef(torch.stack([pull_N, moved_N]))[0, 1]) > 0.3


def test_a_teacher_that_is_the_policy_teaches_nothing() -> None:
    for distillation in ("reverse_kl", "forward_kl"):
        algorithm = objective(name="distill", teacher="t", distillation=distillation, teacher_top_k=6)
        (metrics,) = steps(trainer_of(algorithm), random_samples(4), PackingLayout(64))
        assert abs(metrics["loss"]) < 1e-6 and metrics["grad_norm"] < 1e-4

"""Objectives in the trainer: packing changes nothing, the batch's own quantities, and numbers that are not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.gae import gae_advantages
from octetrl.algorithms.sequences import sequence_mean, sequence_sum, sum_to_go
from octetrl.algorithms.table import build_algorithm
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.objective_settings import AlgorithmConfig
from octetrl.config.schema import OptimizerConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.records import Sample
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.trainer.prepared import PreparedMicroBatch, token_rewards
from octetrl.trainer.trainer import Trainer
from tests.objectives import objective
from tests.unit.trainer.tiny_trainer import BF16, pairs, random_samples, tiny_decoder, tiny_trainer

ALL_CORRECTIONS = ("token_mask", "sequence_mask", "geometric_mask", "veto", "self_normalize")
WIDE = {"geometric_mask_range": (0.8, 1.2), "sequence_mask_range": (0.05, 20.0)}


def drawn(samples: list[Sample], seed: int = 0, spread: float = 0.2) -> list[Sample]:
    """With the log-probs of a fresh model, less some noise, as the engine's."""
    trainer = tiny_trainer(tiny_decoder(dtype=torch.float32))
    batch = pack(samples, PackingLayout(1000), "token")
    logprobs = trainer.train(batch, KVReplay(), None).logprobs
    assert logprobs is not None
    (micro_batch,) = batch.minibatches[0]
    draw = torch.Generator().manual_seed(seed)
    noisy_N = logprobs.trainer_N + spread * torch.randn(micro_batch.sample_N.numel(), generator=draw)
    return [
        replace(sample, generator_logprobs=spread_out(sample, noisy_N[micro_batch.sample_N == number]))
        for number, sample in enumerate(samples)
    ]


def spread_out(sample: Sample, trained: Tensor) -> tuple[float, ...]:
    values = iter(trained.tolist())
    return tuple(next(values) if mask else 0.0 for mask in sample.loss_mask)


def run(algorithm: AlgorithmConfig, samples: list[Sample], layout: PackingLayout, **config: object) -> Trainer:
    needs_reference = build_algorithm(algorithm).needs_reference
    reference = tiny_decoder(dtype=torch.float32, seed=1) if needs_reference else None
    trainer = tiny_trainer(
        tiny_decoder(dtype=torch.float32),
        algorithm,
        reference=reference,
        optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=1e9),
        **config,
    )
    batch = pack(samples, layout, trainer.algorithm.token_weighting)
    trainer.metrics = trainer.train(batch, KVReplay(), None).metrics
    return trainer


BEFORE_BASELINE = {"kl_in": "reward_before_baseline", "masked_tokens": "left_out", "veto_by": "ratio"}
CHOICES: list[tuple[str, dict[str, object]]] = [
    ("grpo", {"token_weighting": "token"}),
    ("grpo", {"token_weighting": "sequence"}),
    ("grpo", BEFORE_BASELINE),
    *((name, {}) for name in ("dapo", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "rloo")),
    *((name, {}) for name in ("reinforce_pp", "reinforce_pp_baseline")),
    ("rloo", {"rloo_ratio": "sequence", **BEFORE_BASELINE}),
    ("dpo", {}),
    ("ipo", {}),
    *(("distill", {"teacher": "t", "distillation": way, "teacher_top_k": 6})
      for way in ("sampled", "reverse_kl", "forward_kl")),
]  # fmt: skip
EQUAL = ("loss", "grad_norm", "kl", "entropy", "correction/clip_fraction", "correction/mean_weight",
         "preference/margin", "preference/accuracy", "preference/chosen_logprob")  # fmt: skip


@pytest.mark.parametrize(("name", "choice"), CHOICES)
def test_neither_loss_nor_gradient_depends_on_packing(name: str, choice: dict[str, object]) -> None:
    """Several epochs, where the objective has ratios; a teacher's log-probs in chunks of several sizes."""
    samples = random_samples(9)
    if name in ("dpo", "ipo", "distill") or "token_weighting" in choice:
        algorithm, epochs = objective(name=name, **choice), 1
        samples = pairs([*samples, *random_samples(1, 1)]) if name in ("dpo", "ipo") else samples
    else:
        tis = "sequence_tis" if name.startswith("gspo") else "tis"
        common = {"kl_coefficient": 0.05, "entropy_coefficient": 0.01, "corrections": (tis, *ALL_CORRECTIONS), **WIDE}
        algorithm, epochs = objective(name=name, **(common | choice)), 2
        samples = [replace(one, group=i % 3) for i, one in enumerate(drawn(samples, spread=0.5))]
    results = []
    for budget, padded, chunk in ((16, True, 3), (40, False, 7), (1000, False, 1024)):
        layout = PackingLayout(budget, padded_attention=padded)
        trainer = run(algorithm, samples, layout, epochs=epochs, logprob_chunk=chunk)
        weights = {key: weight.detach() for key, weight in trainer.model.named_parameters()}
        gradients = {slot.name: slot.gradient for slot in trainer.optimizer.slots}
        count = len(pack(samples, layout, trainer.algorithm.token_weighting).minibatches[0])
        results.append((trainer.metrics, weights, gradients, count))
    assert len({count for *_, count in results}) == (2 if name in ("dpo", "ipo") else 3)
    counted = results[0][0]
    assert epochs == 1 or 0 < counted["correction/clip_fraction"] < 1
    assert epochs == 1 or 0 < counted["correction/effective_sample_size"] < 1
    for metrics, weights, gradients, _ in results[1:]:
        for key in counted.keys() & set(EQUAL):
            assert metrics[key] == pytest.approx(counted[key], rel=1e-4, abs=1e-5), key
        for key, expected in results[0][1].items():
            torch.testing.assert_close(weights[key], expected, rtol=1e-4, atol=1e-4, msg=key)
        if "token_weighting" in choice:
            assert metrics["loss"] == pytest.approx(counted["loss"], abs=1e-6)
            for key, expected in results[0][2].items():
                torch.testing.assert_close(gradients[key], expected, rtol=1e-5, atol=1e-6, msg=key)


def test_self_normalised_weights_have_mean_one() -> None:
    """A loss of -w * A with A = 1 is then -1, whatever the engine's log-probs were off by."""
    samples = [replace(sample, advantage=1.0) for sample in drawn(random_samples(6), spread=0.5)]
    for minibatches in (1, 2):
        layout = PackingLayout(40, minibatches=minibatches)
        plain = run(objective(), samples, layout).metrics
        normalized = run(objective(corrections=("tis", "self_normalize")), samples, layout).metrics
        assert plain["loss"] == pytest.approx(-plain["correction/mean_weight"], abs=0.02)
        assert plain["loss"] != pytest.approx(-1.0, abs=1e-3)
        assert normalized["loss"] == pytest.approx(-1.0, abs=1e-5 if minibatches == 1 else 0.02)
    masked = objective(corrections=("geometric_mask", "self_normalize"), geometric_mask_range=(1.0, 1.0))
    assert run(masked, samples, PackingLayout(40)).metrics["loss"] == 0.0, "nothing left to normalise"


def test_the_batch_is_handed_to_shape_in_order() -> None:
    samples = random_samples(5)
    trainer = tiny_trainer()
    batch = pack(samples, PackingLayout(30, minibatches=2), "token")
    prepared = [PreparedMicroBatch(one, first_N=one.generator_logprobs_N, reference_N=one.weights_N)
                for minibatch in batch.minibatches for one in minibatch]  # fmt: skip
    rewards = token_rewards(prepared)
    order = [int(one.micro_batch.sample_N[i]) for one in prepared for i in range(one.micro_batch.sample_N.numel())]
    assert rewards.num_sequences == 5 == len(set(rewards.sequence_N.tolist()))
    assert rewards.outcome_N.tolist() == pytest.approx([samples[i].advantage for i in order])
    assert rewards.is_last_N.sum() == 5 and rewards.is_last_N[-1]
    changes = rewards.sequence_N[1:] != rewards.sequence_N[:-1]
    assert torch.equal(rewards.is_last_N[:-1], changes)
    assert rewards.kl_N is not None and rewards.values_N is None
    assert trainer.reference.model is None


def test_a_sum_of_each_sample_and_of_what_follows() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    sequence_N = torch.tensor([0, 0, 0, 2, 3, 3])
    assert sequence_sum(values, sequence_N, 4).tolist() == [6.0, 0.0, 4.0, 11.0]
    assert sequence_mean(values, sequence_N, 4).tolist() == [2.0, 0.0, 4.0, 5.5]
    is_last_N = torch.tensor([False, False, True, True, False, True])
    assert sum_to_go(values, is_last_N).tolist() == [6.0, 5.0, 3.0, 4.0, 11.0, 6.0]
    assert sum_to_go(values, is_last_N, 0.5).tolist() == [2.75, 3.5, 3.0, 4.0, 8.0, 6.0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_stays_in_its_sample(bad: float) -> None:
    is_last_N = torch.tensor([False, False, True, True, False, False, True, False, True])
    values_N = torch.arange(1.0, 10.0)
    values_N[5] = bad  # the second of the third sample's three
    finite_N = [True, True, True, True, False, False, True, True, True]
    assert sum_to_go(values_N, is_last_N).isfinite().tolist() == finite_N
    assert gae_advantages(values_N, torch.zeros(9), is_last_N).isfinite().tolist() == finite_N
    advantages_N = gae_advantages(torch.zeros(9), values_N, is_last_N)
    assert advantages_N.isfinite().tolist() == finite_N  # a value: of the token, and before it


# --- numbers that are not finite --------------------------------------------------------------------------------


def broken(field: str) -> tuple[list[Sample], str]:
    """Samples of which one has a number that is not finite, and what is said of it."""
    samples = random_samples(4)
    last = len(samples[2].token_ids) - 1
    if field == "advantage":
        samples[2] = replace(samples[2], advantage=math.nan)
        return samples, f"the advantage of sample 2 of the batch at position {samples[2].loss_mask.index(True)} is nan"
    values = (*(samples[2].generator_logprobs or ())[:-1], -math.inf)
    samples[2] = replace(samples[2], generator_logprobs=values)
    return samples, f"the engine's log-prob of sample 2 of the batch at position {last} is -inf"


@pytest.mark.parametrize("field", ["advantage", "engine's log-prob"])
def test_a_number_that_is_not_finite_is_named_though_a_mask_would_swallow_it(field: str) -> None:
    samples, told = broken(field)
    with pytest.raises(NonFiniteError, match=told):
        run(objective(corrections=("tis", "token_mask")), samples, PackingLayout(1000))


def test_a_logprob_that_is_not_finite_is_named() -> None:
    def silenced(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output.index_fill(0, torch.tensor([len(output) - 2]), math.nan)

    trainer = tiny_trainer()
    trainer.model.norm.register_forward_hook(silenced)
    samples = random_samples(1)
    last = len(samples[0].token_ids) - 1
    with pytest.raises(NonFiniteError, match=f"the log-prob of sample 0 of the batch at position {last} is nan"):
        trainer.train(pack(samples, trainer.layout, "token"), KVReplay(), None)


# ---------------------------------------------------------------- preference pairs and teachers


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

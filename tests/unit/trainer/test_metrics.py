"""Every metric of every objective against its definition, in float64, over ragged batches and all token weightings.

The reference sees what each update's loss was given, sample by sample, and knows nothing of weights, denominators and
packing: a metric is the mean over all trained tokens (or pairs) of the call, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octetrl.algorithms.bradley_terry import bradley_terry_loss
from octetrl.algorithms.table import build_algorithm
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.algorithms.value_loss import value_loss
from octetrl.config.algorithm import OBJECTIVES
from octetrl.config.objective_settings import AlgorithmConfig, KlSettings
from octetrl.config.schema import CriticConfig, OptimizerConfig, TrainerConfig
from octetrl.records import Sample
from octetrl.trainer.critic import Critic
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.trainer.reward_trainer import RewardTrainer
from octetrl.trainer.trainer import Trainer
from tests.objectives import objective
from tests.unit.trainer.test_critic import tiny_scalar_model
from tests.unit.trainer.test_objectives_training import ALL_CORRECTIONS, WIDE, drawn
from tests.unit.trainer.tiny_trainer import random_samples, supervised, tiny_decoder, tiny_trainer

Array = np.ndarray[Any, np.dtype[np.float64]]
NAMES = tuple(OBJECTIVES)
PAIRED = ("dpo", "ipo", "reward_model")
WITHOUT_POLICY_LOSS = ("sft", "rft", *PAIRED)
BOUND = {"tis": "tis_cap", "sequence_tis": "sequence_tis_cap"}
CONFIG = TrainerConfig(optimizer=OptimizerConfig(lr=5e-3, max_grad_norm=1e9), tokens_per_micro_batch=20, minibatches=2)


@dataclass
class Answer:
    """What one update's loss was given of one sample."""

    logprobs: Array
    entropy: Array
    advantages: Array
    generator: Array | None
    base: Array | None
    reference: Array | None
    teacher_top: Array | None
    top: Array | None
    chosen: bool


def answers_of(inputs: LossInputs) -> list[Answer]:
    def parts(values: Tensor | None) -> list[Any]:
        if values is None:
            return [None] * inputs.num_sequences
        rows = values.detach().double().numpy()
        return [rows[inputs.sequence_N.numpy() == number] for number in range(inputs.num_sequences)]

    base_N = inputs.proximal_logprobs_N
    if base_N is None:
        base_N = inputs.logprobs_N if inputs.on_policy else inputs.generator_logprobs_N
    columns = (
        inputs.logprobs_N, inputs.entropy_N, inputs.advantages_N, inputs.generator_logprobs_N, base_N,
        inputs.reference_logprobs_N, inputs.teacher_top_logprobs_NK1, inputs.top_logprobs_NK1,
    )  # fmt: skip
    chosen = [bool(part[0]) if part is not None else True for part in parts(inputs.chosen_N)]
    return [Answer(*row) for row in zip(*map(parts, columns), chosen, strict=True)]


# --- the definitions ----------------------------------------------------------------------------------------------


def kl_of(x: Array, estimator: str) -> Array:
    return {"k1": x, "k2": x * x / 2, "k3": np.exp(-x) - 1 + x}[estimator]


def clipped_share(answer: Answer, config: AlgorithmConfig) -> Array:
    """What the objective's bound takes away of each token's gradient."""
    assert answer.base is not None
    ratio, advantages = np.exp(answer.logprobs - answer.base), answer.advantages
    if config.name == "sapo":
        tau = np.where(advantages > 0, config.sapo_tau_positive, config.sapo_tau_negative)
        gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
        return 1 - 4 * gate * (1 - gate)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.name == "cispo":
        return (ratio < low) | (ratio > high)
    if config.name.startswith("gspo"):
        ratio = np.full_like(ratio, np.exp(np.mean(answer.logprobs - answer.base)))
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    if config.name == "dual_clip":
        clipped |= (advantages < 0) & (ratio > config.dual_clip)
    return clipped


def corrections_of(answer: Answer, config: AlgorithmConfig) -> dict[str, Array]:
    assert answer.base is not None and answer.generator is not None
    log_k = answer.base - answer.generator
    one = np.ones_like(log_k)
    seen = {"token": np.exp(log_k), "sequence": np.exp(log_k.sum()) * one, "geometric": np.exp(log_k.mean()) * one}
    weight, touched, found = one, one < 0, {}
    for name in config.corrections:
        if name == "self_normalize":
            continue
        if name == "veto":
            here = one * (np.exp(answer.base).min() < config.veto_floor) > 0
            weight = weight * ~here
        elif name in BOUND:
            ratio, cap = seen["sequence" if name == "sequence_tis" else "token"], getattr(config, BOUND[name])
            here, weight = ratio > cap, weight * np.minimum(ratio, cap)
        else:
            ratio, (low, high) = seen[name.removesuffix("_mask")], getattr(config, f"{name}_range")
            here = (ratio < low) | (ratio > high)
            weight = weight * ~here
        touched, found[f"correction/{name}_fraction"] = touched | here, here
    found |= {"correction/clip_fraction": touched, "correction/mean_weight": weight}
    return found | {"correction/mean_square_weight": weight**2}


def policy_metrics(answer: Answer, config: AlgorithmConfig) -> dict[str, Array]:
    assert answer.base is not None
    found = corrections_of(answer, config) | {"ratio/clip_fraction": clipped_share(answer, config)}
    found["ratio/limited_fraction"] = np.abs(answer.logprobs - answer.base) > 20
    if isinstance(config, KlSettings) and config.kl_coefficient and config.kl_in == "loss":
        assert answer.reference is not None
        found["kl"] = kl_of(answer.logprobs - answer.reference, config.kl_estimator)
    return found


def distillation_metrics(answer: Answer) -> dict[str, Array]:
    assert answer.reference is not None and answer.teacher_top is not None and answer.top is not None
    return {
        "distill/log_ratio": answer.logprobs - answer.reference,
        "distill/teacher_mass": np.exp(answer.teacher_top[:, :-1]).sum(1),
        "distill/policy_mass": np.exp(answer.top[:, :-1]).sum(1),
    }


def pair_metrics(answers: list[Answer], config: AlgorithmConfig) -> dict[str, Array]:
    better, worse = (np.array([[a.logprobs.sum(), (a.logprobs - a.reference).sum()] for a in answers
                               if a.chosen is side]) for side in (True, False))  # fmt: skip
    margin, beta = better[:, 1] - worse[:, 1], config.preference_beta
    return {
        "preference/accuracy": margin > 0, "preference/margin": beta * margin,
        "preference/chosen_reward": beta * better[:, 1], "preference/rejected_reward": beta * worse[:, 1],
        "preference/chosen_logprob": better[:, 0], "preference/rejected_logprob": worse[:, 0],
    }  # fmt: skip


def expected_metrics(given: list[LossInputs], config: AlgorithmConfig) -> dict[str, float]:
    items: dict[str, list[Array]] = {}
    for inputs in given:
        answers = answers_of(inputs)
        rows = [{"entropy": answer.entropy} for answer in answers]
        if config.name in PAIRED:
            rows.append(pair_metrics(answers, config))
        elif config.name == "distill" and config.distillation != "sampled":
            rows += [distillation_metrics(answer) for answer in answers]
        elif config.name not in WITHOUT_POLICY_LOSS:
            rows += [policy_metrics(answer, config) for answer in answers]
        for row in rows:
            for name, values in row.items():
                items.setdefault(name, []).append(np.asarray(values, dtype=np.float64))
    found = {name: float(np.concatenate(values).mean()) for name, values in items.items()}
    if found.get("correction/mean_square_weight"):
        share = found["correction/mean_weight"] ** 2 / found["correction/mean_square_weight"]
        found["correction/effective_sample_size"] = share
    return found


# --- what the trainers report -------------------------------------------------------------------------------------


def recorded(loss: Callable[..., TokenLoss], given: list[Any]) -> Callable[..., TokenLoss]:
    def recording(*args: Any, **kwargs: Any) -> TokenLoss:
        given.append((args, kwargs))
        return loss(*args, **kwargs)

    return recording


def paired(samples: list[Sample]) -> list[Sample]:
    return [replace(s, pair=n // 2, chosen=n % 2 == 0) for n, s in enumerate(supervised(samples))]


def batch_of(name: str, stale: bool = False) -> list[Sample]:
    if name in PAIRED:
        return paired(random_samples(10, longest=14))
    samples = random_samples(7, longest=14, policy_version=-1 if stale else 0)
    return supervised(samples) if name in ("sft", "rft") else drawn(samples, spread=0.5)


def algorithm_of(name: str, **config: Any) -> AlgorithmConfig:
    tis = "sequence_tis" if name.startswith("gspo") else "tis"
    narrow = {"clip_low": 0.01, "clip_high": 0.02, "sequence_tis_cap": 1.1, "tis_cap": 1.1}
    given = {"corrections": (tis, *ALL_CORRECTIONS)} | WIDE | {"kl_coefficient": 0.05} | narrow | config
    return objective(name, **{key: value for key, value in given.items() if key in OBJECTIVES[name].model_fields})


def trained(config: AlgorithmConfig, samples: list[Sample], trainer: TrainerConfig = CONFIG) -> tuple[
    dict[str, float], list[LossInputs], Trainer
]:  # fmt: skip
    """One call's metrics, and what its losses were given."""
    given: list[Any] = []
    algorithm = build_algorithm(config)
    model = Trainer(
        tiny_decoder(dtype=torch.float32),
        config=trainer,
        algorithm=replace(algorithm, loss=recorded(algorithm.loss, given)),
        temperature=1.0,
        total_steps=10,
        reference=tiny_decoder(dtype=torch.float32, seed=1) if algorithm.needs_reference else None,
        critic=Critic(tiny_scalar_model(dtype=torch.float32), CriticConfig(value_clip=0.01), trainer, total_steps=10)
        if algorithm.needs_values
        else None,
    )
    batch = pack(samples, model.layout, algorithm.token_weighting)
    assert min(map(len, batch.minibatches)) > 1, "several micro-batches each"
    metrics = dict(model.train(batch, KVReplay(), None).metrics)
    return metrics, [args[0] for args, _ in given], model


WEIGHTINGS = ("token", "sequence", "constant")


@pytest.mark.parametrize(
    ("name", "weighting"),
    [
        *(("grpo", weighting) for weighting in WEIGHTINGS),
        *(
            (name, "sequence" if name in PAIRED else WEIGHTINGS[number % 3])
            for number, name in enumerate(NAMES)
            if name not in ("grpo", "reward_model")
        ),
    ],
)
def test_metrics_are_means_over_tokens_or_pairs(name: str, weighting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[Any] = []
    monkeypatch.setattr("octetrl.trainer.critic.value_loss", recorded(value_loss, values))
    config = algorithm_of(name, token_weighting=weighting, constant_length=50)
    metrics, given, _ = trained(config, batch_of(name))
    assert len({inputs.logprobs_N.numel() for inputs in given}) > 1, "ragged"
    expected = expected_metrics(given, config)
    charges = isinstance(config, KlSettings) and config.kl_in == "reward"
    if charges or name == "distill":  # k1 of the log-probs before the first update
        before = [answer.base - answer.reference for inputs in given for answer in answers_of(inputs)]
        expected["kl"] = float(np.concatenate(before).mean())
    if name == "ppo":
        expected |= expected_values([kwargs | {"values_N": args[0]} for args, kwargs in values])
    assert_equal(metrics, expected)


def expected_values(given: list[Mapping[str, Any]]) -> dict[str, float]:
    value, old, returns = (
        torch.cat([one[name].detach() for one in given]).double().numpy()
        for name in ("values_N", "old_values_N", "returns_N")
    )
    near = np.clip(value, old - given[0]["value_clip"], old + given[0]["value_clip"])
    return {
        "value/mean": float(value.mean()),
        "value/return_mean": float(returns.mean()),
        "value/clip_fraction": float(((near - returns) ** 2 > (value - returns) ** 2).mean()),
        "value/explained_variance": float(1 - np.var(returns - old) / np.var(returns)),
    }


def assert_equal(metrics: Mapping[str, float], expected: Mapping[str, float]) -> None:
    of_updates = {"loss", "grad_norm", "lr", "value/loss", "value/grad_norm", "value/lr"}
    assert {name for name in metrics if not name.startswith(("train/", "time/"))} - of_updates == set(expected)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("kind", ["sampled", "reverse_kl", "forward_kl"])
def test_metrics_of_one_update_and_of_stale_samples(kind: Any) -> None:
    once = CONFIG.model_copy(update={"minibatches": 1})
    config = algorithm_of("distill", distillation=kind, token_weighting="constant")
    metrics, given, _ = trained(config, batch_of("distill"), once)
    expected = expected_metrics(given, config)
    if kind == "sampled":
        expected["kl"] = float(torch.cat([-inputs.advantages_N for inputs in given]).double().mean())
    assert_equal(metrics, expected)
    config = algorithm_of("rloo", ratio_base="generator", corrections=()) if kind == "sampled" else algorithm_of("gspo")
    metrics, given, _ = trained(config, batch_of("rloo", stale=True), once)
    assert_equal(metrics, expected_metrics(given, config))


def test_metrics_of_a_reward_model() -> None:
    given: list[Any] = []
    trainer = RewardTrainer(
        tiny_scalar_model(dtype=torch.float32), CONFIG, recorded(partial(bradley_terry_loss, center=0.1), given),
        total_steps=10,
    )  # fmt: skip
    batch = pack(batch_of("reward_model"), PackingLayout(32, minibatches=2), "token")
    metrics = trainer.train(batch).metrics
    chosen, rejected = (torch.cat([args[side] for args, _ in given]).detach().double().numpy() for side in (0, 1))
    margin = chosen - rejected
    assert len(margin) == 5 and len(given) > 2
    expected = {"accuracy": (margin > 0).mean(), "margin": margin.mean()}
    expected |= {"chosen_reward": chosen.mean(), "rejected_reward": rejected.mean()}
    assert_equal(metrics, {f"preference/{name}": float(value) for name, value in expected.items()})


@pytest.mark.parametrize(("kl_in", "weighting"), [("loss", "token"), ("loss", "constant"), ("reward", "sequence")])
def test_the_kl_coefficient_rises_above_the_target_and_falls_below_it(kl_in: Any, weighting: Any) -> None:
    samples = random_samples(4, longest=12)
    config = partial(objective, kl_coefficient=0.1, kl_in=kl_in, token_weighting=weighting, kl_estimator="k3")

    def scale_after(target: float) -> tuple[float, float]:
        reference = tiny_decoder(seed=1)
        trainer = tiny_trainer(algorithm=config(kl_target=target), reference=reference)
        metrics = trainer.train(pack(samples, trainer.layout, trainer.algorithm.token_weighting), KVReplay(), None)
        return metrics.metrics["kl"], trainer.reference.kl_scale

    kl, _ = scale_after(1.0)
    assert kl > 0.005, "the two models differ"
    assert scale_after(kl / 1.5)[1] == 1.02 and scale_after(kl * 1.5)[1] == 0.98

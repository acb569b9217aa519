"""A two-layer model, a trainer over it and samples to train on, small enough for a unit test."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from octetrl.algorithms.table import build_algorithm
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.objective_settings import AlgorithmConfig
from octetrl.config.schema import OptimizerConfig, TrainerConfig
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.records import Sample
from octetrl.trainer.trainer import Trainer
from tests.objectives import objective
from tests.tiny_spec import TINY_SPEC

SPEC = replace(
    TINY_SPEC, hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=1, vocab_size=40, max_positions=64
)
BF16 = Fp8Config()
FP8 = Fp8Config(rollout=True, train=True, kv_cache="dynamic")


def tiny_decoder(fp8: Fp8Config = BF16, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Decoder:
    model = Decoder(SPEC, precision_policy(SPEC, fp8), "train", dtype=dtype)
    model.random_init(seed)
    return model


def tiny_trainer(
    model: Decoder | None = None,
    algorithm: AlgorithmConfig | None = None,
    *,
    optimizer: OptimizerConfig | None = None,
    reference: Decoder | None = None,
    collect_kv_amax: bool = False,
    total_steps: int = 10,
    **config: object,
) -> Trainer:
    optimizer = optimizer or OptimizerConfig(lr=1e-2, max_grad_norm=1e9)
    return Trainer(
        model or tiny_decoder(),
        config=TrainerConfig(optimizer=optimizer, **{"tokens_per_micro_batch": 64} | config),
        algorithm=build_algorithm(algorithm or objective()),
        temperature=1.0,
        total_steps=total_steps,
        reference=reference,
        collect_kv_amax=collect_kv_amax,
        seed=5,
    )


def random_samples(count: int, seed: int = 0, *, longest: int = 24, policy_version: int | None = 0) -> list[Sample]:
    """Prompts of 2 to 4 tokens and answers up to `longest`; generator log-probs near those of a fresh model."""
    draw = random.Random(seed)
    samples = []
    for _ in range(count):
        prompt, length = draw.randint(2, 4), draw.randint(6, longest)
        mask = tuple(position >= prompt for position in range(length))
        logprobs = tuple(draw.uniform(-4.2, -3.2) if trained else 0.0 for trained in mask)
        tokens = tuple(draw.randrange(8) for _ in range(length))
        samples.append(Sample(tokens, mask, logprobs, draw.uniform(-2, 2), policy_version))
    return samples


def supervised(samples: list[Sample]) -> list[Sample]:
    return [Sample(sample.token_ids, sample.loss_mask, None, 1.0, None) for sample in samples]


def pairs(samples: list[Sample]) -> list[Sample]:
    """Answers of different lengths to one prompt; the better begins with token 1, the worse with token 2."""
    found = []
    for number, sample in enumerate(supervised(samples)):
        prompt = sample.loss_mask.index(True)
        tokens = (*sample.token_ids[:prompt], 1 + number % 2, *sample.token_ids[prompt + 1 :])
        found.append(replace(sample, token_ids=tokens, pair=number // 2, chosen=number % 2 == 0))
    return found

"""A short GRPO run by the product's worker: draw, train, publish, some steps over; and all that it left behind."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from octetrl.algorithms.table import build_algorithm
from octetrl.config.objective_settings import AlgorithmConfig
from octetrl.config.schema import (
    EngineConfig,
    LoraConfig,
    MismatchConfig,
    ModelConfig,
    OptimizerConfig,
    Recipe,
    RolloutConfig,
    SpeculationConfig,
    TrainerConfig,
)
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.records import GenerationRequest, Sample, SamplingParams
from octetrl.shapes.spec import ModelSpec
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.telemetry.mismatch import MismatchGate
from octetrl.trainer.packing import pack
from octetrl.trainer.peers import ALONE, Peers
from octetrl.workers.worker import Worker
from tests.objectives import objective
from tests.parity.sides import ONE_TENSOR, PRECISIONS, NoText, draw_weights, random_tokens, samples_of
from tests.team import share_of


@dataclass(slots=True)
class ShortRun:
    """What a run of some steps gave, to be compared with another's."""

    tokens: list[list[int]]
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    initial: dict[str, Tensor]  # what was to be trained, before the first step
    digests: list[str] = field(default_factory=list)  # of what the engine held after each step
    logprobs: list[tuple[float, ...]] = field(default_factory=list)  # of each answer, by the engine

    def times_left_out(self) -> list[dict[str, float]]:
        """The metrics without what the clock says, and without what each worker of a team has of its own."""
        own = ("time/", "per_second", "memory/", "publish/bytes")
        return [{name: x for name, x in step.items() if not any(part in name for part in own)} for step in self.metrics]


def short_run(
    spec: ModelSpec,
    precision: str,
    device: str,
    steps: int,
    *,
    answers: int = 40,
    lora: LoraConfig | None = None,
    algorithm: AlgorithmConfig | None = None,
    releases: bool = False,
    peers: Peers = ALONE,
    speculation: SpeculationConfig | None = None,
    **trainer: Any,
) -> ShortRun:
    """Prompts and rewards follow from the step. `releases`: the cache is freed for training.
    `mismatch.fail_on_difference` ends the run where parity is broken. Each of several workers draws all answers and
    trains on its part of the micro-batches."""
    recipe = Recipe(
        model=ModelConfig(preset="tiny", init="random", context_length=spec.max_positions, lora=lora),
        fp8=(PRECISIONS | ONE_TENSOR)[precision],
        algorithm=algorithm or objective(),
        rollout=RolloutConfig(temperature=0.9),
        engine=EngineConfig(
            kv_cache_tokens=1 << 14,
            max_batch=32,
            release_for_training=releases,
            speculation=speculation or SpeculationConfig(),
        ),
        trainer=TrainerConfig(optimizer=OptimizerConfig(lr=1e-3), **trainer),
        mismatch=MismatchConfig(fail_on_difference=True),
        steps=steps,
    )
    worker = worker_of(recipe, spec, device, peers)
    model = worker.trainer_model
    run, draw, gate = ShortRun([], [], {}, _held(model, trained=True)), random.Random(2), MismatchGate(recipe.mismatch)
    for step in range(1, steps + 1):
        asked = _asked(draw, spec, step, answers)
        if worker.needs_calibration:
            worker.calibrate([request.prompt_token_ids for request in asked])
        drawn = worker.generate(asked)
        samples = [rewarded(sample) for sample in samples_of(asked, drawn)]
        batch = pack(samples, worker.layout, "token")
        update = worker.train(share_of(batch, peers))
        run.digests.append(worker.publish(update.policy_version).weights_digest)
        run.tokens += [list(chain.from_iterable(answer.token_ids for answer in siblings)) for siblings in drawn]
        run.logprobs += [answer.logprobs for answer in chain.from_iterable(drawn)]
        run.metrics.append(dict(update.metrics))
        gate.check(step, update.metrics)
    run.weights |= _held(model)
    return run


def _held(model: Decoder, *, trained: bool = False) -> dict[str, Tensor]:
    """Copies of weights and FP8 codes, of all or of the trained ones."""
    held: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if weight.untyped_storage().nbytes() and (weight.requires_grad or not trained):
            held[name] = weight  # one of several workers has only some rows of an FP8 weight
    for name, linear in model.float8_linears():
        if linear.weight is not None and (linear.weight.requires_grad or not trained):
            held[f"{name}.codes"] = linear.codes.view(torch.uint8)
    return {name: tensor.detach().cpu().clone() for name, tensor in held.items()}


def worker_of(recipe: Recipe, spec: ModelSpec, device: str, peers: Peers = ALONE) -> Worker:
    """The worker of a run, with random weights of this shape."""
    return Worker(
        recipe,
        spec=spec.cut(TensorCut(peers.group.rank, peers.group.size)),
        policy=precision_policy(spec, recipe.fp8),
        tokenizer=NoText(),
        algorithm=build_algorithm(recipe.algorithm),
        load_weights=lambda model, _: draw_weights(model, 1),
        device=torch.device(device),
        peers=peers,
    )


def _asked(draw: random.Random, spec: ModelSpec, step: int, answers: int) -> list[GenerationRequest]:
    sampling = SamplingParams(answers, temperature=0.9, ignore_eos=True)
    return [
        GenerationRequest(f"{step}/{n}", random_tokens(draw, spec, draw.randint(1, 60)), sampling, 4, seed=step * 8 + n)
        for n in range(4)
    ]


def rewarded(sample: Sample) -> Sample:
    """An advantage that follows from the tokens, and is not zero."""
    return Sample(
        sample.token_ids,
        sample.loss_mask,
        sample.generator_logprobs,
        advantage=1.0 if sum(sample.token_ids) % 2 else -1.0,
        policy_version=sample.policy_version,
        precision_digest=sample.precision_digest,
    )


def assert_same(one: ShortRun, other: ShortRun) -> None:
    assert one.tokens == other.tokens
    assert one.times_left_out() == other.times_left_out()
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name


def assert_learned(run: ShortRun) -> None:
    """Every trained matrix has changed. A norm's steps may be smaller than BF16 shows."""
    same = [name for name, one in run.initial.items() if one.dim() >= 2 and torch.equal(one, run.weights[name])]
    assert run.initial and not same, same


def assert_equal_in_every_step(run: ShortRun) -> None:
    for number, metrics in enumerate(run.metrics, 1):
        found = {name: metrics[f"mismatch/{name}"] for name in ("unequal_tokens", "max_abs_diff", "equal_fraction")}
        assert found == {"unequal_tokens": 0.0, "max_abs_diff": 0.0, "equal_fraction": 1.0}, f"step {number}: {found}"

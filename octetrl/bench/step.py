"""Measures the whole GRPO step under several precisions: produce, learn and publish, by the worker of a run.

A turn builds one precision's worker alone on the device: trainer, engine, and the weights they share. It runs a short
untimed step, then `steps` timed ones. Prompts are random tokens, answers end at their drawn length, and rewards are
random numbers, so every group has advantages. Turns alternate, A B B A. A row has the median over the steps of all
rounds.

    produce    generation of all answers, and the samples made of them
    learn      packing, forward and backward, the update, KV scales (calibration)
    publish    new FP8 codes of the weights, then the engine's check of what it holds

`Worker.train` quantises the weights, because the trainer's own forward needs the codes. Its time counts as publishing,
because the engine reads the same codes. The GB/s of publishing are bytes of codes and scales over that time.

With `learn_share` below 1 the step learns only from that share of the groups, and the time of the rest is extrapolated.
Each token left out is assumed to cost as much as a token in the steady micro-batches (clock.py). Work that happens once
per step is counted once. With too few such micro-batches, the time without the update is scaled by the number of
tokens, and the update is timed separately after the last step. The time of such a step is an estimate, and its row says
so.

The cost of calibration is measured on some micro-batches of the last step, with alternating modes. `off` is a forward
and backward that does not look at K and V. `fused` is one that does. `exact` is `off` and one more forward. Shares are
of the whole step, by the tokens of all its micro-batches.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from octetrl.algorithms.table import Algorithm, build_algorithm
from octetrl.bench.clock import MicroBatchClock, Pace
from octetrl.bench.memory import estimate, refuse_what_does_not_fit
from octetrl.bench.model import BenchModel, give_memory_back
from octetrl.bench.turns import take_in_turn
from octetrl.bench.worker import bench_worker
from octetrl.bench.workload import Workload
from octetrl.config.algorithm import GrpoConfig
from octetrl.config.load import PRECISIONS
from octetrl.config.schema import (
    EngineConfig,
    Fp8Config,
    LoraConfig,
    ModelConfig,
    Recipe,
    RolloutConfig,
    TrainerConfig,
)
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.records import (
    Completion,
    GenerationRequest,
    PackedBatch,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Sample,
    Task,
    Turn,
)
from octetrl.rollout.backend import SessionRecord
from octetrl.rollout.samples import to_samples
from octetrl.telemetry.metrics import MISMATCH
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import pack
from octetrl.trainer.without_update import accumulate_gradients, observe_kv
from octetrl.workers.worker import Worker, own_engine

DIFFERENCE = "mismatch/max_abs_diff"
CALIBRATION_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class StepBench:
    """What is measured, and on what."""

    model: BenchModel
    precisions: tuple[str, ...]
    workload: Workload  # siblings of a group stand side by side
    group_size: int
    trainer: TrainerConfig
    device: torch.device
    rounds: int = 1
    steps: int = 1
    warmup_tokens: int = 16
    learn_share: float = 1.0
    max_batch: int = 256
    kv_fraction: float = 0.85
    calibration: tuple[str, ...] = ()  # modes to compare, of precisions with a calibrated cache
    calibration_micro_batches: int = 2
    seed: int = 0
    learn_beside_tail: bool = False  # on several workers (beside_tail.py)
    lora: LoraConfig | None = None  # only adapters are trained; their A and B are random


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Seconds and counts of one step, on one worker or on several."""

    produce: float
    learn: float  # extrapolated to all groups if some were left out
    publish: float
    calibrate: float  # part of learn, not that of the fused kind
    mismatch: float
    max_abs_diff: float  # of log-probs, engine to trainer
    compared_tokens: int
    micro_batches: int  # of all groups
    preemptions: float
    capture: float | None = None  # of CUDA graphs, part of produce; None on a CPU

    @property
    def total(self) -> float:
        return self.produce + self.learn + self.publish


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes(PhaseTimes):
    """Of the embedded worker."""

    requantize: float  # part of publish
    produce_peak: float | None  # GB, the KV cache included; None on a CPU
    learn_peak: float | None  # and of publishing, without the cache
    kv_capacity_tokens: int
    pace: Pace | None = None  # of learning; None where its micro-batches were too few


@dataclass(frozen=True, slots=True)
class StepTurn:
    """One measurement of a precision."""

    precision: str
    steps: tuple[StepTimes, ...]
    calibration: dict[str, list[float]]  # mode -> seconds of the measured micro-batches, one a round
    calibration_tokens: int
    published_bytes: int
    optimizer_seconds: float
    startup_seconds: float  # nothing -> the end of the untimed step


def measure(bench: StepBench, on_turn: Callable[[int, StepTurn], None] | None = None) -> list[StepTurn]:
    """Measure all turns and return them in order. `on_turn(round, turn)` is called after each."""
    return take_in_turn(bench.precisions, bench.rounds, lambda _, precision: take_turn(bench, precision), on_turn)


def take_turn(bench: StepBench, precision: str) -> StepTurn:
    """Build, measure and free one worker."""
    began = time.perf_counter()
    arm = StepArm(bench, build_bench_worker(bench, precision))
    arm.warm_up()
    up = arm.now()
    steps = tuple(arm.step(number) for number in range(bench.steps))
    optimizer_seconds = arm.update_seconds()
    calibration, calibration_tokens = arm.calibration_seconds()
    turn = StepTurn(
        precision=precision,
        steps=tuple(arm.for_all(step, optimizer_seconds) for step in steps),
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        published_bytes=code_bytes(arm.worker.engine_model),
        optimizer_seconds=optimizer_seconds,
        startup_seconds=up - began,
    )
    arm.worker.engine.sleep()
    del arm
    give_memory_back(bench.device)
    return turn


def build_bench_worker(bench: StepBench, precision: str) -> Worker:
    """Build the worker as a run does. The weights of a preset are created on the device."""
    return bench_worker(bench.model, step_recipe(bench, precision), bench.device)


def step_recipe(bench: StepBench, precision: str) -> Recipe:
    """The recipe of a run with this workload."""
    longest = bench.workload.longest
    siblings = len(bench.workload.siblings)
    context = max(16, longest.prompt + longest.answer)
    return Recipe(
        model=ModelConfig(path="random", init="random", context_length=context, lora=bench.lora),
        fp8=Fp8Config(**PRECISIONS[precision]),
        rollout=RolloutConfig(
            prompts_per_step=siblings // bench.group_size,
            group_size=bench.group_size,
            max_prompt_tokens=longest.prompt,
            max_new_tokens=max(answer for _, answer in bench.workload.siblings),
        ),
        engine=EngineConfig(kv_memory_fraction=bench.kv_fraction, max_batch=min(bench.max_batch, siblings)),
        trainer=bench.trainer,
        algorithm=GrpoConfig(),
        seed=bench.seed,
        steps=bench.steps + 1,
    )


def estimate_bytes(bench: StepBench, precision: str) -> int:
    """The estimate of `octetrl check` for training: trainer, weights and codes, with the KV cache freed."""
    recipe, spec, on_gpu = step_recipe(bench, precision), bench.model.spec, bench.device.type == "cuda"
    found = estimate(recipe, spec, precision_policy(spec, recipe.fp8), on_gpu=on_gpu, engine=True)
    return found.training_bytes


def check_memory(bench: StepBench) -> None:
    """Raise UserError if a precision's estimate is more than the device's memory."""
    needed = ((precision, estimate_bytes(bench, precision)) for precision in bench.precisions)
    refuse_what_does_not_fit(bench.device, needed, bench.trainer, is_preset=bench.model.folder is None)


def code_bytes(engine_model: Decoder) -> int:
    """Bytes of codes and scales that a publish renews; 0 if nothing is FP8."""
    return sum(linear.codes.numel() + 4 * linear.scale.numel() for _, linear in engine_model.float8_linears())


class StepArm:
    """One worker and the steps that it runs."""

    def __init__(self, bench: StepBench, worker: Worker) -> None:
        self.bench, self.worker = bench, worker
        self.algorithm: Algorithm = build_algorithm(GrpoConfig())
        self._batch: PackedBatch | None = None  # of the last step
        self._learnt_tokens = self._all_tokens = 0
        self._produced: Mapping[str, float] = {}  # what the last rollout took
        if worker.needs_calibration:
            worker.calibrate(bench.workload.prompts)

    def now(self) -> float:
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize(self.bench.device)
        return time.perf_counter()

    def warm_up(self) -> None:
        """Run a step of short answers and learn from as many as fill one micro-batch, then again with one token less.
        A kernel compiles once for multiples of 16 tokens and once for other numbers."""
        if not self.bench.warmup_tokens:
            return
        samples = self._produce(self.bench.workload.stairs(self.bench.warmup_tokens), number=-1)
        room = self.bench.trainer.tokens_per_micro_batch
        few: list[Sample] = []
        for sample in samples:
            room -= len(sample.token_ids)
            if few and room < 0:
                break
            few.append(sample)
        for last in (few[-1], shorter(few[-1])):
            batch = pack([*few[:-1], last], self.worker.layout, self.algorithm.token_weighting)
            self.worker.publish(self.worker.train(batch).policy_version)

    def step(self, number: int) -> StepTimes:
        worker = self.worker
        worker.forget_prefixes()
        began = self.now()
        samples = self._produce(self.bench.workload.requests, number)
        produced = self.now()
        generation = own_engine(worker).metrics
        assert generation is not None, "the engine has just generated"
        groups = max(1, round(self.bench.learn_share * len(samples) / self.bench.group_size))
        some = samples[: groups * self.bench.group_size]
        clock = MicroBatchClock(self.bench.device)
        with clock.marked(worker.trainer_model):
            self._release_cache()
            self._batch = pack(some, worker.layout, self.algorithm.token_weighting)
            update = worker.train(self._batch)
        learnt = self.now()
        worker.publish(update.policy_version)
        ended = self.now()
        requantize = update.metrics["time/requantize"]
        self._learnt_tokens, self._all_tokens = _tokens(some), _tokens(samples)
        return StepTimes(
            produce=produced - began,
            learn=learnt - produced - requantize,
            publish=ended - learnt + requantize,
            requantize=requantize,
            calibrate=update.metrics.get("time/calibrate", 0.0),
            mismatch=update.metrics[MISMATCH],
            max_abs_diff=update.metrics[DIFFERENCE],
            compared_tokens=sum(sum(sample.loss_mask) for sample in some),
            micro_batches=round(len(self._batch.minibatches[0]) * self._all_tokens / self._learnt_tokens),
            produce_peak=self._produced.get("memory/peak_gb"),
            learn_peak=update.metrics.get("memory/peak_gb"),
            preemptions=generation.preemptions,
            capture=generation.session_capture_seconds,
            kv_capacity_tokens=generation.kv_capacity_tokens,
            pace=clock.pace([one.token_ids_T.numel() for one in self._batch.minibatches[0]]),
        )

    def _release_cache(self) -> None:
        """Free the cache before `Worker.train` would, so that the peak of learning is its own."""
        if self.bench.device.type == "cuda" and self.worker.recipe.engine.release_for_training:
            self.worker.engine.sleep()

    def for_all(self, step: StepTimes, optimizer_seconds: float) -> StepTimes:
        """The step with its learning time extrapolated to all groups."""
        more = self._all_tokens / self._learnt_tokens
        if more == 1.0:
            return step
        if step.pace is not None:
            learn = step.learn + step.pace.steady * (self._all_tokens - self._learnt_tokens)
            return replace(step, learn=learn, calibrate=step.calibrate * more)
        fixed = min(optimizer_seconds, step.learn)
        return replace(step, learn=fixed + (step.learn - fixed) * more, calibrate=step.calibrate * more)

    def update_seconds(self) -> float:
        """Time clipping and AdamW alone, with the last step's gradients. This changes the weights, at the turn's
        end."""
        optimizer = self.worker.trainer.optimizer
        began = self.now()
        optimizer.clip_gradients()
        optimizer.step(self.bench.trainer.optimizer.lr)
        optimizer.zero_grad()
        seconds = self.now() - began
        self.worker.trainer.model.requantize()
        return seconds

    def calibration_seconds(self) -> tuple[dict[str, list[float]], int]:
        """Seconds of each mode on the first micro-batches of the last step, and their tokens."""
        worker, modes = self.worker, self.bench.calibration
        if worker.policy.kv_mode != "calibrated" or not modes:
            return {}, 0
        assert self._batch is not None and worker.kv_scales is not None, "calibration is measured after a step"
        scales = worker.kv_scales
        replay = KVReplay(worker.policy.kv_mode, scales.scale_LS)
        part = self._batch.minibatches[0][: self.bench.calibration_micro_batches]
        batch = replace(self._batch, minibatches=(part,), loss_denominators=self._batch.loss_denominators[:1])
        seconds: dict[str, list[float]] = {mode: [] for mode in modes}
        for number in range(CALIBRATION_ROUNDS + 1):
            for mode in modes:
                began = self.now()
                accumulate_gradients(worker.trainer, batch, replay, collect_kv_amax=mode == "fused")
                if mode == "exact":
                    observe_kv(worker.trainer, batch)
                if number:  # the first is a warm-up: the engine's memory has just been freed
                    seconds[mode].append(self.now() - began)
        return seconds, sum(one.token_ids_T.numel() for one in part)

    def _produce(self, requests: Sequence[GenerationRequest], number: int) -> list[Sample]:
        records: list[SessionRecord] = []
        completions = self.worker.generate(requests, on_end=records.append)
        self._produced = records[0].took
        rng = random.Random(f"{self.bench.seed} {number}")
        groups = rollout_groups(requests, completions, self.bench.group_size, rng)
        return to_samples(groups, self.algorithm)


def rollout_groups(
    requests: Sequence[GenerationRequest],
    completions: Sequence[Sequence[Completion]],
    group_size: int,
    rng: random.Random,
) -> list[RolloutGroup]:
    """Groups of siblings with random rewards. A request may hold a whole group or one sibling."""
    pairs = [
        (request.prompt_token_ids, completion)
        for request, siblings in zip(requests, completions, strict=True)
        for completion in siblings
    ]
    groups = []
    for first in range(0, len(pairs), group_size):
        task = Task(f"bench {first // group_size}", "")
        rollouts = [
            Rollout(task, (Turn(prompt, completion),), RolloutStatus.SCORED, rng.random())
            for prompt, completion in pairs[first : first + group_size]
        ]
        groups.append(RolloutGroup(task, tuple(rollouts)))
    return groups


def shorter(sample: Sample) -> Sample:
    """The sample without its last token."""
    assert sample.generator_logprobs is not None, "an engine drew it"
    return replace(
        sample,
        token_ids=sample.token_ids[:-1],
        loss_mask=sample.loss_mask[:-1],
        generator_logprobs=sample.generator_logprobs[:-1],
    )


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.token_ids) for sample in samples)

"""Measures training speed: forward and backward of packed micro-batches under several precisions, by the real trainer.

A turn builds one arm's trainer alone on the device, runs one untimed
step and then `steps` timed ones. It times three parts separately: the gradient of all micro-batches, the optimizer's
update, and the new FP8 codes of the weights. Turns alternate, A B B A, so a device that slows down affects both. A row
has the median over all steps.

Every micro-batch is full: sequences of drawn lengths, the last one cut. The last `trained_share` of a sequence's tokens
are trained on, with GRPO's loss and random advantages. Weights are random, or those of the given folder. A precision
with a calibrated cache replays it and observes K and V, as in a run.

Model FLOPs do not depend on the precision, and recomputation does not count:

    6 * weights of a token * tokens  +  6 * V * E * trained tokens  +  3.5 * L * 4 * Q * sum of S (S + 1) / 2

That is one forward and two GEMMs of the same size in the backward. A token of a mixture counts its chosen experts and
the router. Attention has two GEMMs in the forward and five in the backward. Latent attention counts as attention over
keys and values of every head: the absorbed form's further products are not counted, as they save memory, not work. The
rate is compared with 790 TFLOP/s, which a large BF16 GEMM reaches on an H200.

S tokens of a sequence, V vocabulary, E hidden size, L layers, Q heads * head size.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from octetrl.algorithms.table import build_algorithm
from octetrl.bench.hardware import BF16_FLOPS
from octetrl.bench.memory import checkpointed_layers, estimate, refuse_what_does_not_fit
from octetrl.bench.mix import Mix, Work, draw_work
from octetrl.bench.model import BenchModel, fill_weights, give_memory_back
from octetrl.bench.parts import Trace, kernels_of_parts, part_rows, read_trace
from octetrl.bench.turns import Row, compared, take_in_turn
from octetrl.config.algorithm import GrpoConfig
from octetrl.config.load import PRECISIONS
from octetrl.config.model_work import pair_products, token_weights
from octetrl.config.schema import Fp8Config, ModelConfig, Recipe, TrainerConfig
from octetrl.fp8.backends import choose_backend
from octetrl.fp8.kv_scales import kv_scales_from_amax
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.kernels.parts import part
from octetrl.models.decoder import Decoder
from octetrl.records import PackedBatch
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.trainer import Trainer
from octetrl.trainer.without_update import accumulate_gradients, observe_kv

PROFILED_STEPS = 2


@dataclass(frozen=True, slots=True)
class TrainBench:
    """What is measured, and on what."""

    model: BenchModel
    precisions: tuple[str, ...]
    mix: Mix
    trainer: TrainerConfig
    device: torch.device
    micro_batches: int = 2
    trained_share: float = 0.875
    rounds: int = 1
    steps: int = 3
    optimizer: bool = True
    profile: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.micro_batches}x{self.trainer.tokens_per_micro_batch} of {self.mix}"


@dataclass(frozen=True, slots=True)
class StepTime:
    gradient: float  # seconds
    optimizer: float | None  # None: measured without one
    requantize: float


@dataclass(frozen=True, slots=True)
class TrainTurn:
    """One measurement of a precision."""

    precision: str
    steps: tuple[StepTime, ...]
    work: Work
    loss: float
    startup_seconds: float  # nothing -> the first step's end
    estimate_bytes: int
    peak_bytes: int | None  # None on a CPU
    trace: Trace | None = None


def measure(bench: TrainBench, on_turn: Callable[[int, TrainTurn], None] | None = None) -> list[TrainTurn]:
    """Measure all turns and return them in order. If the bench profiles, it profiles the last round."""

    def take(number: int, precision: str) -> TrainTurn:
        return take_turn(bench, precision, profiled=bench.profile and number == bench.rounds)

    return take_in_turn(bench.precisions, bench.rounds, take, on_turn)


def take_turn(bench: TrainBench, precision: str, *, profiled: bool = False) -> TrainTurn:
    """Build, measure and free one trainer."""
    began = time.perf_counter()
    trainer = build_trainer(bench, precision)
    work = draw_work(bench.mix, bench.micro_batches, bench.trained_share, trainer.layout, bench.model.spec, bench.seed)
    arm = _Arm(trainer, work.batch, _replay(trainer, work.batch), bench.optimizer)
    arm.step()  # compiles, allocates
    up = _now(bench.device)
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    steps = tuple(arm.step() for _ in range(bench.steps))
    peak = torch.cuda.max_memory_allocated(bench.device) if on_gpu else None
    loss = float(arm.loss)
    assert math.isfinite(loss), f"{precision}: the loss is {loss}"
    turn = TrainTurn(
        precision=precision,
        steps=steps,
        work=work,
        loss=loss,
        startup_seconds=up - began,
        estimate_bytes=estimate_bytes(bench, trainer.model.policy),
        peak_bytes=peak,
        trace=record(arm.step, PROFILED_STEPS) if profiled else None,
    )
    del arm, trainer
    give_memory_back(bench.device)
    return turn


def build_trainer(bench: TrainBench, precision: str) -> Trainer:
    """Build the trainer of one precision with its weights."""
    spec = bench.model.spec
    policy = precision_policy(spec, Fp8Config(**PRECISIONS[precision]))
    backend = choose_backend(bench.device, None) if policy.uses_fp8("train") else "emulated"
    model = Decoder(spec, policy, "train", dtype=torch.bfloat16, device=bench.device, backend=backend)
    fill_weights(model, bench.model, bench.seed)
    model.requantize()
    trainer = Trainer(
        model,
        config=bench.trainer,
        algorithm=build_algorithm(GrpoConfig()),
        temperature=1.0,
        total_steps=1,
        reference=None,
        collect_kv_amax=policy.kv_mode == "calibrated",
        seed=bench.seed,
        trains=bench.optimizer,
    )
    return trainer


def _replay(trainer: Trainer, batch: PackedBatch) -> KVReplay:
    policy = trainer.model.policy
    if policy.kv_mode != "calibrated":
        return KVReplay(policy.kv_mode)
    amax_LS = observe_kv(trainer, batch)
    scales = kv_scales_from_amax(amax_LS, trainer.model.spec, policy_version=0)
    return KVReplay(policy.kv_mode, scales.scale_LS)


class _Arm:
    """One trainer and the batch that it trains on."""

    def __init__(self, trainer: Trainer, batch: PackedBatch, kv: KVReplay, optimizer: bool) -> None:
        self.trainer, self.batch, self.kv, self.optimizer = trainer, batch, kv, optimizer
        self.loss = torch.zeros(())
        self._observes = trainer.model.policy.kv_mode == "calibrated"

    def step(self) -> StepTime:
        trainer, device = self.trainer, self.trainer.device
        if not self.optimizer:
            trainer.model.zero_grad(set_to_none=True)
        began = _now(device)
        self.loss, _ = accumulate_gradients(trainer, self.batch, self.kv, collect_kv_amax=self._observes)
        learnt = _now(device)
        if self.optimizer:
            with part("optimizer"):
                trainer.optimizer.clip_gradients()
                trainer.optimizer.step(trainer.config.optimizer.lr)
                trainer.optimizer.zero_grad()
        updated = _now(device)
        with part("requantize"):
            trainer.model.requantize()
        ended = _now(device)
        return StepTime(learnt - began, updated - learnt if self.optimizer else None, ended - updated)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def record(step: Callable[[], object], steps: int) -> Trace:
    """Record the kernels of some steps and the code that launched them."""
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")  # see profile.py
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text())["traceEvents"])


def estimate_bytes(bench: TrainBench, policy: PrecisionPolicy) -> int:
    """The estimate of `octetrl check` for the trainer, without the KV cache and codes that only an engine reads."""
    recipe = Recipe(model=ModelConfig(path="random", init="random"), trainer=bench.trainer)
    found = estimate(recipe, bench.model.spec, policy, on_gpu=bench.device.type == "cuda", engine=False)
    left_out = {"KV cache"} if bench.optimizer else {"KV cache", "optimizer", "gradients"}
    own = replace(found, parts=tuple(part for part in found.parts if part.name not in left_out))
    gradients = 0 if bench.optimizer else 2 * bench.model.spec.num_parameters  # in BF16
    return own.training_bytes + gradients


def check_memory(bench: TrainBench) -> None:
    """Raise UserError if a precision's estimate is more than the device's memory."""
    policies = ((name, precision_policy(bench.model.spec, Fp8Config(**PRECISIONS[name]))) for name in bench.precisions)
    needed = ((name, estimate_bytes(bench, policy)) for name, policy in policies)
    further = ("leave the update out with --no-optimizer",) if bench.optimizer else ()
    is_preset = bench.model.folder is None
    refuse_what_does_not_fit(
        bench.device, needed, bench.trainer, updates=bench.optimizer, further=further, is_preset=is_preset
    )


# ---------------------------------------------------------------- from turns to rows


def model_flops(spec: ModelSpec, lengths: Sequence[int], trained_tokens: int) -> int:
    """FLOPs of one forward and backward, by the formula of the module's docstring."""
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    attention = 2 * pair_products(spec).needed * pairs
    return 6 * token_weights(spec) * sum(lengths) + 6 * spec.vocab_size * spec.hidden_size * trained_tokens + attention


def rows_of(bench: TrainBench, turns: Sequence[TrainTurn]) -> list[Row]:
    """A row for each precision: medians over the steps of all rounds, and the largest peak of memory."""
    by_arm: dict[str, list[TrainTurn]] = {}
    for turn in turns:
        by_arm.setdefault(turn.precision, []).append(turn)
    rows = {arm: _row(bench, rounds) for arm, rounds in by_arm.items()}
    for arm, found in compared({arm: float(row["train/tokens_per_second"]) for arm, row in rows.items()}).items():
        rows[arm] |= {f"train/{name}": value for name, value in found.items()}
    return list(rows.values())


def _row(bench: TrainBench, rounds: Sequence[TrainTurn]) -> Row:
    work = rounds[0].work
    steps = [step for turn in rounds for step in turn.steps]
    seconds = [step.gradient for step in steps]
    flops = model_flops(bench.model.spec, work.lengths, work.trained_tokens) / statistics.median(seconds)
    row: Row = {
        "precision": rounds[0].precision,
        "workload": bench.name,
        "rounds": len(rounds),
        "steps": len(steps),
        "train/tokens": work.tokens,
        "train/trained_tokens": work.trained_tokens,
        "train/sequences": len(work.lengths),
        "train/layers": bench.model.spec.num_layers,
        "train/checkpointing": bench.trainer.activation_checkpointing,
        "train/checkpointed_layers": checkpointed_layers(bench.trainer, bench.model.spec),
        "train/weight_codes": bench.trainer.weight_codes,
        "train/tokens_per_second": work.tokens / statistics.median(seconds),
        "train/tokens_per_second_min": work.tokens / max(seconds),
        "train/tokens_per_second_max": work.tokens / min(seconds),
        "train/gradient_ms": statistics.median(seconds) * 1e3,
        "train/tflops": flops / 1e12,
        "train/loss": rounds[0].loss,
        "time/startup": rounds[0].startup_seconds,
        "memory/estimate_gb": rounds[0].estimate_bytes / 1e9,
    }
    if bench.optimizer:
        row["train/optimizer_states"] = bench.trainer.optimizer.states
        row["train/master"] = bench.trainer.optimizer.master
        row["train/gradient_sums"] = bench.trainer.gradients
    return row | dict(_further(rounds, steps, flops))


def _further(rounds: Sequence[TrainTurn], steps: Sequence[StepTime], flops: float) -> Iterator[tuple[str, float]]:
    """Values that a CPU or a turn without an optimizer does not have, and the time to quantise the weights."""
    updates = [step.optimizer for step in steps if step.optimizer is not None]
    if updates:
        yield "train/optimizer_ms", statistics.median(updates) * 1e3
        whole = statistics.median(step.gradient + (step.optimizer or 0.0) + step.requantize for step in steps)
        yield "train/whole_tokens_per_second", rounds[0].work.tokens / whole
    yield "train/requantize_ms", statistics.median(step.requantize for step in steps) * 1e3
    if rounds[0].peak_bytes is not None:
        yield "train/ceiling_share", flops / BF16_FLOPS
        yield "memory/peak_gb", max(turn.peak_bytes or 0 for turn in rounds) / 1e9


def profile_rows(turns: Sequence[TrainTurn]) -> tuple[list[Row], list[Row]]:
    """Time by part, and the kernels of each part, for the turns that were profiled."""
    parts: list[Row] = []
    kernels: list[Row] = []
    for turn in turns:
        if turn.trace is None:
            continue
        walls = [step.gradient + (step.optimizer or 0.0) + step.requantize for step in turn.steps]
        head: Row = {"precision": turn.precision}
        parts += [head | row for row in part_rows(turn.trace, PROFILED_STEPS, statistics.median(walls))]
        kernels += [head | row for row in kernels_of_parts(turn.trace, PROFILED_STEPS)]
    return parts, kernels

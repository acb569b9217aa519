"""Measures generation speed: one workload under several precisions, one engine after the other, in one process.

A turn measures one precision. It builds the engine alone on the device, so every precision has the same memory for its
cache. It requests a first token twice and warms up on the workload's own prompts. Then it times one `generate` of the
whole workload, with prefill, scheduling, sampling and log-probs. Turns alternate, A B C C B A, so a device that slows
down affects all of them. A row has the median over rounds.

The start-up time is that of the first round. It starts when CUDA is initialised and the device is empty, and ends with
the first token. It includes building the model, creating or reading its weights, quantising, calibrating, allocating
the cache, compiling kernels or loading them from Triton's cache, and capturing a graph. Kernels that earlier turns
compiled stay in the process; the row counts those on the disk before and after.

The engine holds only what rollouts need: FP8 weights without the BF16 weights they come from. The weights of a preset
are created on the device and are the same for every precision. A preset has no tokenizer, so its tokens have no text.

The memory-bandwidth model (bandwidth_model.py) says how long a decode step reads its weights and the live keys and
values, with a prompt counted for each sibling that reads it. `rollout/floor_share` is the model's time for all decode
steps over the wall time of the whole call. 4.3 TB/s is what most kernels reach on an H200. It is a model, not a lower
bound: the L2 cache serves some reads of a shared prompt, so the share can exceed 100%.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from octetrl.algorithms.table import build_algorithm
from octetrl.bench.bandwidth_model import modelled_seconds, weight_bytes
from octetrl.bench.model import BenchModel, fill_weights, give_memory_back, tokenizer_of
from octetrl.bench.turns import Row, compared, take_in_turn
from octetrl.bench.workload import Workload, calibration_prompts
from octetrl.config.algorithm import GrpoConfig
from octetrl.config.load import PRECISIONS
from octetrl.config.schema import EngineConfig, Fp8Config, TrainerConfig
from octetrl.config.speculation import SpeculationConfig
from octetrl.engine.engine import Engine
from octetrl.engine.kv_cache import cache_format
from octetrl.engine.metrics import EngineMetrics
from octetrl.fp8.backends import choose_backend
from octetrl.fp8.kv_scales import KVScales, kv_scales_from_amax
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.models.decoder import Decoder
from octetrl.records import GenerationRequest
from octetrl.shapes.spec import PREFILL_CHUNK
from octetrl.trainer.trainer import Trainer
from octetrl.trainer.without_update import observe_kv


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured, and on what."""

    model: BenchModel
    precisions: tuple[str, ...]
    workloads: tuple[Workload, ...]
    device: torch.device
    rounds: int = 1
    warmup_tokens: int = 16
    max_batch: int = 256
    kv_fraction: float = 0.8
    seed: int = 0
    kv_cache_tokens: int | None = None  # instead of `kv_fraction` of the free memory
    prefill_chunk: int | None = None  # the model's
    speculation: SpeculationConfig | None = None  # drafts take the places of `max_batch` that completions leave

    def rows_of(self, workload: Workload) -> int:
        """Sequences decoded together: at most the number of completions, so that the occupancy has a meaning."""
        return min(self.max_batch, len(workload.siblings))


@dataclass(frozen=True, slots=True)
class Arm:
    """The engine of one precision."""

    engine: Engine
    policy: PrecisionPolicy
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of a precision and a workload."""

    precision: str
    workload: Workload
    metrics: EngineMetrics
    startup_seconds: float  # no model yet, but CUDA is up -> first token
    first_token_seconds: float  # the same request again
    weight_bytes: float  # that a decode step reads
    kv_bytes_per_token: float
    max_batch: int
    peak_bytes: int | None  # None on a CPU
    weights: Literal["drawn", "files"] = "drawn"
    cached_kernels: tuple[int, int] = (0, 0)  # in Triton's cache, before and after
    prefill_chunk: int = PREFILL_CHUNK


def measure(bench: Bench, on_turn: Callable[[int, Turn], None] | None = None) -> list[Turn]:
    """Measure all turns and return them in order. `on_turn(round, turn)` is called after each."""

    def take(_: int, arm: tuple[Workload, str]) -> Turn:
        workload, precision = arm
        return take_turn(bench, precision, workload)

    return take_in_turn(product(bench.workloads, bench.precisions), bench.rounds, take, on_turn)


def take_turn(bench: Bench, precision: str, workload: Workload) -> Turn:
    """Build, measure and free one engine."""
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(bench.device)  # CUDA is up from here on
        torch.cuda.reset_peak_memory_stats(bench.device)
    kernels_before = cached_kernels()
    began = time.perf_counter()
    arm = build_arm(bench, precision, workload)
    engine = arm.engine
    first = (first_token(workload.requests[0]),)
    engine.generate(first)
    up = time.perf_counter()
    engine.generate(first)
    again = time.perf_counter()
    warm_up(arm, workload, bench.warmup_tokens)
    engine.forget_prefixes()  # the prompts are prefilled in the time that counts
    engine.generate(workload.requests)
    assert engine.metrics is not None, "generate sets the metrics"
    rows = engine.metrics.batch_occupancy * bench.rows_of(workload)
    turn = Turn(
        precision=precision,
        workload=workload,
        metrics=engine.metrics,
        startup_seconds=up - began,
        first_token_seconds=again - up,
        weight_bytes=weight_bytes(bench.model.spec, arm.policy, rows),
        kv_bytes_per_token=arm.kv_bytes_per_token,
        max_batch=bench.rows_of(workload),
        peak_bytes=torch.cuda.max_memory_allocated(bench.device) if on_gpu else None,
        weights="drawn" if bench.model.folder is None else "files",
        cached_kernels=(kernels_before, cached_kernels()),
        prefill_chunk=bench.prefill_chunk or bench.model.spec.prefill_chunk,
    )
    engine.sleep()
    del arm, engine
    give_memory_back(bench.device)
    return turn


def warm_up(arm: Arm, workload: Workload, tokens: int) -> None:
    """Generate short answers to the workload's prompts, so that every kernel is compiled before the timing.

    Where the timed answers end one after another, these do so too, and the graph of every size of batch is captured.
    """
    if tokens:
        arm.engine.generate(workload.short(tokens))


def cached_kernels() -> int:
    """The number of compiled kernels in Triton's cache on the disk."""
    usual = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton/cache")
    return sum(1 for _ in Path(os.environ.get("TRITON_CACHE_DIR") or usual).glob("*/*.cubin"))


def build_arm(bench: Bench, precision: str, workload: Workload) -> Arm:
    """Build the engine of one precision with its weights and, if its cache is calibrated, KV scales."""
    spec, device = bench.model.spec, bench.device
    policy = precision_policy(spec, Fp8Config(**PRECISIONS[precision]))
    backend = choose_backend(device, None) if policy.uses_fp8("rollout") else "emulated"
    model = Decoder(spec, policy, "rollout", dtype=torch.bfloat16, device=device, backend=backend, fp8_weights=False)
    fill_weights(model, bench.model, bench.seed)
    model.requantize()
    for _, linear in model.float8_linears():
        linear.drop_weight()
    config = EngineConfig(
        kv_cache_tokens=bench.kv_cache_tokens,
        kv_memory_fraction=bench.kv_fraction,
        max_batch=bench.rows_of(workload) if bench.speculation is None else bench.max_batch,
        prefill_chunk=bench.prefill_chunk,
        speculation=bench.speculation or SpeculationConfig(),
    )
    longest = workload.longest
    engine = Engine(
        model,
        spec=spec,
        policy=policy,
        tokenizer=tokenizer_of(bench.model),
        config=config,
        context_length=longest.prompt + longest.answer,
        dtype=torch.bfloat16,
        device=device,
    )
    if policy.kv_mode == "calibrated":
        engine.set_kv_scales(_kv_scales(model, workload, engine.policy_version))
    page = cache_format(spec, policy, torch.bfloat16, config.page_size)
    give_memory_back(device)  # what quantising and calibrating took is the cache's
    return Arm(engine, policy, page.bytes_per_page / config.page_size)


def _kv_scales(model: Decoder, workload: Workload, policy_version: int) -> KVScales:
    """KV scales from some of the workload's prompts, as before a run's first rollout."""
    algorithm = build_algorithm(GrpoConfig())
    trainer = Trainer(
        model, config=TrainerConfig(), algorithm=algorithm, temperature=1.0, total_steps=1, reference=None, trains=False
    )
    amax_LS = observe_kv(trainer, calibration_prompts(workload))
    assert amax_LS is not None, "KV calibration: no forward has observed K and V"
    return kv_scales_from_amax(amax_LS, model.spec, policy_version=policy_version)


def first_token(request: GenerationRequest) -> GenerationRequest:
    sampling = type(request.sampling)(max_new_tokens=1, ignore_eos=True)
    return GenerationRequest("first token", request.prompt_token_ids, sampling, seed=request.seed)


# ---------------------------------------------------------------- from turns to rows


def rows_of(turns: Sequence[Turn]) -> list[Row]:
    """A row for each workload and precision: medians over its rounds; of peaks and counts the largest."""
    workloads: dict[str, dict[str, list[Turn]]] = {}
    for turn in turns:
        workloads.setdefault(turn.workload.name, {}).setdefault(turn.precision, []).append(turn)
    rows: list[Row] = []
    for by_arm in workloads.values():
        of_arm = {arm: _row(rounds) for arm, rounds in by_arm.items()}
        speeds = {arm: float(row["rollout/tokens_per_second"]) for arm, row in of_arm.items()}
        for arm, found in compared(speeds).items():
            of_arm[arm] |= {f"rollout/{name}": value for name, value in found.items()}
        rows += of_arm.values()
    return rows


def _row(rounds: Sequence[Turn]) -> Row:
    first, metrics = rounds[0], [turn.metrics for turn in rounds]
    lengths = [answer for _, answer in first.workload.siblings]
    speeds = [one.tokens_per_second for one in metrics]
    row: Row = {
        "precision": first.precision,
        "workload": first.workload.name,
        "weights": first.weights,
        "rounds": len(rounds),
        "rollout/tokens_per_second": statistics.median(speeds),
        "rollout/tokens_per_second_min": min(speeds),
        "rollout/tokens_per_second_max": max(speeds),
        "time/rollout": statistics.median(one.seconds for one in metrics),
        "time/startup": first.startup_seconds,
        "rollout/cached_kernels_before": first.cached_kernels[0],
        "rollout/cached_kernels_after": first.cached_kernels[1],
        "time/first_token": statistics.median(turn.first_token_seconds for turn in rounds),
        "rollout/generated_tokens": metrics[0].generated_tokens,
        "rollout/prefilled_tokens": metrics[0].prefilled_tokens,
        "rollout/mean_length": statistics.fmean(lengths),
        "rollout/max_length": max(lengths),
        "rollout/kv_capacity_tokens": min(one.kv_capacity_tokens for one in metrics),
        "rollout/max_batch": first.max_batch,
        "rollout/prefill_chunk": first.prefill_chunk,
        "rollout/batch_occupancy": statistics.median(one.batch_occupancy for one in metrics),
        "rollout/preemptions": max(one.preemptions for one in metrics),
    }
    if first.peak_bytes is not None:
        row["memory/peak_gb"] = max(turn.peak_bytes or 0 for turn in rounds) / 1e9
    return row | dict(_step_times(metrics)) | dict(_bandwidth_model(rounds))


def _step_times(metrics: Sequence[EngineMetrics]) -> Iterator[tuple[str, float]]:
    """Percentiles of the time of a step over all rounds, the share of the long tail, and the part of the time that
    captured graphs."""
    seconds = [second for one in metrics for second in one.step_seconds]
    if seconds:
        yield "rollout/step_ms_p50", float(np.percentile(seconds, 50)) * 1e3
        yield "rollout/step_ms_p99", float(np.percentile(seconds, 99)) * 1e3
    yield "rollout/tail_share", statistics.median(one.tail_share for one in metrics)
    captures = [one.session_capture_seconds for one in metrics if one.session_capture_seconds is not None]
    if captures:
        yield "time/capture", statistics.median(captures)


def _bandwidth_model(rounds: Sequence[Turn]) -> Iterator[tuple[str, float]]:
    """The memory-bandwidth model's parts. On a GPU also its speed, and its share of the time."""
    turn = rounds[0]
    yield "rollout/weight_gb_per_step", turn.weight_bytes / 1e9
    yield "rollout/kv_bytes_per_token", turn.kv_bytes_per_token
    steps = [decode_steps(one.metrics, one.max_batch) for one in rounds]
    live = statistics.median(turn.workload.live_token_steps / count for count in steps)
    yield "rollout/live_kv_tokens", live
    if turn.peak_bytes is None:
        return
    modelled = modelled_seconds(turn.weight_bytes, live * turn.kv_bytes_per_token)
    yield "rollout/floor_step_ms", modelled * 1e3
    rows_of_a_step = [one.metrics.generated_tokens / count for one, count in zip(rounds, steps, strict=True)]
    yield "rollout/floor_tokens_per_second", statistics.median(rows_of_a_step) / modelled
    shares = (modelled * count / one.metrics.seconds for one, count in zip(rounds, steps, strict=True))
    yield "rollout/floor_share", statistics.median(shares)


def decode_steps(metrics: EngineMetrics, max_batch: int) -> int:
    """The number of decode forwards, from their occupancy. The engine's count of steps includes prefills."""
    return max(1, round(metrics.generated_tokens / (metrics.batch_occupancy * max_batch)))

"""Turns measurements into rows: a row for each workload and arm, with the names of a run's metrics and some of its own.

A time is the mean over the timed steps of all rounds: a step that waits less makes the next one wait more. Differences
of log-probs and memory are the largest. A step has three parts, which add up to `time/step`:

    learn      forward, backward, update and KV scales, without the new FP8 codes
    publish    new FP8 codes of the weights, then the engine's check of what it holds
    produce    the rest: generation, the samples made of it, and packing

`bench train` divides learning: `train/gradient_ms` is all but the optimizer's update and the new codes. Model FLOPs do
not depend on the precision, and recomputation does not count:

    6 * weights of a token * tokens  +  6 * V * E * trained tokens  +  3.5 * L * 4 * Q * sum of S (S + 1) / 2

That is one forward and two GEMMs of the same size in the backward. A token of a mixture counts its chosen experts and
the router. Attention has two GEMMs in the forward and five in the backward. Latent attention counts as attention over
keys and values of every head. The rate is compared with 790 TFLOP/s, which a large BF16 GEMM reaches on an H200.

`bench rollout` compares the rate with a memory-bandwidth model of decoding, `rollout/floor_*`:

    time of a step = (bytes of weights + live tokens * bytes that a token caches) / 4.3 TB/s

Weights are those of linears, with scales and biases, of a router, of latent attention's `kv_a` and `kv_b`, and of
lm_head; each is read once. Of a mixture, only experts that have a row are read. A step with B rows reads an expert with
probability 1 - (1 - q)^B, where q is the share of all tokens that it has, and B is the mean number of rows of a step.
It is no lower bound: the L2 cache serves some reads of a shared prompt. The rates are measured, not from a data sheet.

S tokens of a sequence, V vocabulary, E hidden size, L layers, Q heads * head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median

import numpy as np
import torch

from octetrl.bench.arms import Arm
from octetrl.bench.measure import Turn
from octetrl.config.memory import estimate_memory
from octetrl.config.schema import TrainerConfig
from octetrl.config.worker_memory import of_trainer, on_each_worker
from octetrl.engine.kv_cache import cache_format
from octetrl.engine.metrics import EngineMetrics
from octetrl.fp8.format import BLOCK
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.shapes.blocks import PLACES, LinearLayout, MatrixLayout, StackedLinearLayout
from octetrl.shapes.model_cuts import largest_cut
from octetrl.shapes.spec import ModelSpec, pair_products, token_weights

MEMORY_BYTES_PER_SECOND = 4.3e12  # most kernels; a few reach 4.54e12 (docs/results.md)
BF16_FLOPS = 790e12  # per second, of a large GEMM
VALUE = 2  # bytes of BF16
Row = dict[str, str | int | float]
Key = tuple[str, tuple[str, ...]]  # workload, overrides
LARGEST = ("max_abs_diff", "peak_gb", "token_mult_prob_error")  # ends of names
DIFFERENCE, ON_POLICY = "mismatch/max_abs_diff", "mismatch/age_0/max_abs_diff"
PHASES = {"rollout": ("rollout",), "train": ("train",), "step": ("step", "produce", "learn")}  # compared


def rows_of(turns: Sequence[Turn]) -> list[Row]:
    """The rows of all turns, which are of one verb, each compared with those of other arms."""
    by_arm: dict[Key, list[Turn]] = {}
    for turn in turns:
        by_arm.setdefault((turn.arm.workload.name, turn.arm.words), []).append(turn)
    rows = {key: _row(rounds) for key, rounds in by_arm.items()}
    compare(rows, PHASES[turns[0].arm.verb])
    return list(rows.values())


def _row(rounds: Sequence[Turn]) -> Row:
    arm = rounds[0].arm
    lines = [line for turn in rounds for line in turn.timed]
    row: Row = {
        "precision": str(arm.recipe.precision),
        "workload": arm.workload.name,
        "arm": arm.name,
        "weights": "drawn" if arm.recipe.model.init == "random" else "files",
        "rounds": len(rounds),
        "steps": len(lines),
        "time/startup": rounds[0].startup_seconds,
        **_means(lines),
    }
    if rounds[0].digest:
        row["rollout/digest"] = rounds[0].digest
    return row | _workers(arm, rounds[0]) | FURTHER[arm.verb](arm, rounds, row)


def _means(lines: Sequence[Mapping[str, float]]) -> Row:
    """Each metric's mean, or its largest value. A step without a time had none of it."""
    row: Row = {}
    for name in dict.fromkeys(name for line in lines for name in line):
        found = [line.get(name, 0.0) for line in lines]
        if name.startswith("mismatch/age_"):  # of the tokens of some steps; `_on_policy` has all
            continue
        if name.startswith("time/") or all(name in line for line in lines):
            row[name] = max(found) if name.endswith(LARGEST) else fmean(found)
    return row


def _workers(arm: Arm, turn: Turn) -> Row:
    cluster = arm.recipe.cluster
    on_gpu = cluster.num_gpus > 0 if cluster.uses_ray else torch.cuda.is_available() and cluster.device != "cpu"
    row: Row = {
        "cluster/kind": "ray" if cluster.uses_ray else "embedded",
        "cluster/workers": cluster.num_workers,
        "cluster/device": "cuda" if on_gpu else "cpu",
        "cluster/gradients": cluster.gradients,
        "cluster/tensor_parallel": cluster.tensor_parallel,
    }
    if cluster.roles is not None:
        row |= {
            "cluster/trainers": cluster.roles[0],
            "cluster/engines": cluster.roles[1],
            "cluster/max_staleness": cluster.max_staleness,
            "cluster/weights_in_flight": cluster.weights_in_flight,
            "cluster/weight_buffer": turn.weight_buffer,
        }
    return row


# ---------------------------------------------------------------- step


def _step(arm: Arm, rounds: Sequence[Turn], means: Row) -> Row:
    work, trained = arm.workload, float(means["time/train"])
    if not arm.recipe.cluster.uses_ray:  # the driver's time of several workers has their calibration
        trained += float(means.get("time/calibrate", 0.0))
    total = fmean(seconds for turn in rounds for seconds in turn.seconds)
    requantize = float(means["time/requantize"])
    publish = float(means["time/publish"]) + requantize
    learn = trained - requantize
    produce = total - learn - publish
    row: Row = {
        **_trainer("step", arm.recipe.trainer, arm.spec),
        "step/micro_batches": means["train/micro_batches"],
        "memory/estimate_gb": estimated_bytes(arm) / 1e9,
        "time/step": total,
        "step/tokens_per_second": work.tokens / total,
        "step/tokens_per_second_per_worker": work.tokens / total / arm.recipe.cluster.num_workers,
        "step/samples_per_second": len(work.siblings) / total,
        "step/publish_ms": publish * 1e3,
        "step/requantize_ms": requantize * 1e3,
    }
    if not arm.recipe.cluster.max_staleness:  # ahead, the phases of a step overlap
        phases = {"produce": produce, "learn": learn, "publish": publish}
        row |= {f"time/{name}": seconds for name, seconds in phases.items()}
        row |= {f"step/{name}_share": seconds / total for name, seconds in phases.items()}
        row["step/generated_tokens_per_second"] = row["produce/tokens_per_second"] = work.generated_tokens / produce
        row["learn/tokens_per_second"] = work.tokens / learn
    if arm.recipe.model.lora is not None:
        row |= {"step/lora_rank": arm.recipe.model.lora.rank, "step/lora_experts": arm.recipe.model.lora.experts}
    for name in ("wait_for_batch", "wait_for_weights"):
        if f"time/{name}" in means:
            row[f"step/{name}_share"] = float(means[f"time/{name}"]) / total
    row |= _published(rounds[0], means, publish)
    stale = arm.recipe.cluster.max_staleness > 0
    return row | (_on_policy(line for turn in rounds for line in turn.lines) if stale else {})


def _published(turn: Turn, means: Row, publish_seconds: float) -> Row:
    """Bytes of publishing and their speed: of codes by the embedded worker, of what several workers exchange."""
    size = turn.published_bytes or float(means.get("publish/bytes", 0.0))
    if not size:
        return {}
    row: Row = {"step/publish_gb": size / 1e9, "step/publish_gb_per_second": size / 1e9 / publish_seconds}
    seconds = [float(value) for name, value in means.items() if name.startswith("time/gather/worker_")]
    gather = max(seconds, default=0.0)
    if gather:
        row |= {"publish/gather_ms": gather * 1e3, "publish/gather_gb_per_second": size / 1e9 / gather}
    return row


def _on_policy(lines: Iterable[Mapping[str, float]]) -> Row:
    """The largest difference of log-probs that the trainer's own weights sampled, over all steps, the untimed ones
    included, and the number of these tokens. Whole batches of the timed steps may be stale."""
    largest: list[float] = []
    tokens = 0.0
    for line in lines:
        if ON_POLICY in line:
            largest.append(line[ON_POLICY])
            tokens += line["mismatch/age_0/tokens"]
        elif line.get("rollout/on_policy_share", 1.0) == 1.0 and DIFFERENCE in line:
            largest.append(line[DIFFERENCE])
            tokens += line["mismatch/tokens"]
    return {ON_POLICY: max(largest), "mismatch/age_0/tokens": tokens} if largest else {}


# ---------------------------------------------------------------- train


def _train(arm: Arm, rounds: Sequence[Turn], means: Row) -> Row:
    spec, siblings = arm.spec, arm.workload.siblings
    lines = [line for turn in rounds for line in turn.timed]
    update = median(line.get("time/optimizer", 0.0) for line in lines)
    requantize = median(line["time/requantize"] for line in lines)
    seconds = [line["time/train"] - line.get("time/optimizer", 0.0) - line["time/requantize"] for line in lines]
    whole, gradient, tokens = median(line["time/train"] for line in lines), median(seconds), arm.workload.tokens
    flops = model_flops(spec, [sum(lengths) for lengths in siblings], arm.workload.generated_tokens)
    row: Row = {
        **_trainer("train", arm.recipe.trainer, spec),
        "train/tokens": tokens,
        "train/trained_tokens": arm.workload.generated_tokens,
        "train/sequences": len(siblings),
        "train/loss": rounds[0].timed[0]["loss"],
        "train/tokens_per_second": tokens / gradient,
        "train/tokens_per_second_min": tokens / max(seconds),
        "train/tokens_per_second_max": tokens / min(seconds),
        "train/tokens_per_second_per_worker": tokens / gradient / arm.recipe.cluster.num_workers,
        "train/whole_tokens_per_second": tokens / whole,
        "train/gradient_ms": gradient * 1e3,
        "train/optimizer_ms": update * 1e3,
        "train/requantize_ms": requantize * 1e3,
        "train/tflops": flops / gradient / 1e12,
        "train/tflops_per_worker": flops / gradient / arm.recipe.cluster.num_workers / 1e12,
        "time/train": whole,
        "memory/estimate_gb": estimated_bytes(arm) / 1e9,
    }
    return row | ({"train/ceiling_share": flops / gradient / BF16_FLOPS} if "memory/peak_gb" in means else {})


def model_flops(spec: ModelSpec, lengths: Sequence[int], trained_tokens: int) -> int:
    """FLOPs of one forward and backward, by the formula of the module's docstring."""
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    attention = 2 * pair_products(spec).needed * pairs
    return 6 * token_weights(spec) * sum(lengths) + 6 * spec.vocab_size * spec.hidden_size * trained_tokens + attention


def _trainer(verb: str, trainer: TrainerConfig, spec: ModelSpec) -> Row:
    layers = spec.num_layers if trainer.checkpointed_layers is None else trainer.checkpointed_layers
    return {
        f"{verb}/layers": spec.num_layers,
        f"{verb}/checkpointing": trainer.activation_checkpointing,
        f"{verb}/checkpointed_layers": 0 if trainer.activation_checkpointing == "none" else layers,
        f"{verb}/weight_codes": trainer.weight_codes,
        f"{verb}/optimizer_states": trainer.optimizer.states,
        f"{verb}/master": trainer.optimizer.master,
        f"{verb}/gradient_sums": trainer.gradients,
    }


def estimated_bytes(arm: Arm) -> int:
    """The estimate of `octetrl check` for training, with the KV cache freed, of each worker that trains."""
    cluster, precisions = arm.recipe.cluster, arm.policy.precisions()
    part = arm.spec.cut(largest_cut(arm.spec, cluster.tensor_parallel))
    on_gpu = cluster.num_gpus > 0 if cluster.uses_ray else torch.cuda.is_available() and cluster.device != "cpu"
    whole = estimate_memory(arm.recipe, part, precisions, on_gpu=on_gpu, device_bytes=None)
    if cluster.roles is not None:
        return of_trainer(arm.recipe, whole).training_bytes
    return on_each_worker(arm.recipe, whole, None).training_bytes


# ---------------------------------------------------------------- rollout


def _rollout(arm: Arm, rounds: Sequence[Turn], means: Row) -> Row:
    """All figures of our engine; of another one what its run says."""
    lengths = [answer for _, answer in arm.workload.siblings]
    row: Row = {
        "rollout/backend": arm.recipe.engine.backend,
        "rollout/mean_length": fmean(lengths),
        "rollout/max_length": max(lengths),
        "rollout/max_batch": arm.recipe.engine.max_batch,
        "rollout/prefill_chunk": arm.recipe.engine.prefill_chunk or arm.spec.prefill_chunk,
    }
    sessions = [session for turn in rounds for session in turn.sessions if isinstance(session, EngineMetrics)]
    if not sessions:
        seconds = float(means["time/rollout"])
        return row | {"rollout/tokens_per_second": arm.workload.generated_tokens / seconds}
    speeds = [session.tokens_per_second for session in sessions]
    row |= {
        "rollout/tokens_per_second": median(speeds),
        "rollout/tokens_per_second_min": min(speeds),
        "rollout/tokens_per_second_max": max(speeds),
        "rollout/tokens_per_second_per_worker": median(speeds) / arm.recipe.cluster.num_workers,
        "time/rollout": median(session.seconds for session in sessions),
        "rollout/generated_tokens": sessions[0].generated_tokens,
        "rollout/prefilled_tokens": sessions[0].prefilled_tokens,
        "rollout/kv_capacity_tokens": min(session.kv_capacity_tokens for session in sessions),
        "rollout/batch_occupancy": median(session.batch_occupancy for session in sessions),
        "rollout/preemptions": max(session.preemptions for session in sessions),
        "rollout/tail_share": median(session.tail_share for session in sessions),
        "rollout/idle_share": median(session.idle_share for session in sessions),
    }
    steps = [second for session in sessions for second in session.step_seconds]
    if steps:
        row["rollout/step_ms_p50"] = float(np.percentile(steps, 50)) * 1e3
        row["rollout/step_ms_p99"] = float(np.percentile(steps, 99)) * 1e3
    embedded = not arm.recipe.cluster.uses_ray
    return row | (dict(_bandwidth_model(arm, sessions, on_gpu="memory/peak_gb" in means)) if embedded else {})


def _bandwidth_model(arm: Arm, sessions: Sequence[EngineMetrics], *, on_gpu: bool) -> Iterator[tuple[str, float]]:
    """The memory-bandwidth model's parts. On a GPU also its speed, and its share of the time."""
    places = arm.recipe.engine.max_batch
    weights = weight_bytes(arm.spec, arm.policy, median(session.batch_occupancy for session in sessions) * places)
    dtype: torch.dtype = getattr(torch, arm.recipe.model.dtype)
    page = cache_format(arm.spec, arm.policy, dtype, arm.recipe.engine.page_size)
    bytes_per_token = page.bytes_per_page / arm.recipe.engine.page_size
    steps = [decode_steps(session, places) for session in sessions]
    live = median(arm.workload.live_token_steps / count for count in steps)
    yield "rollout/weight_gb_per_step", weights / 1e9
    yield "rollout/kv_bytes_per_token", bytes_per_token
    yield "rollout/live_kv_tokens", live
    if on_gpu:
        modelled = modelled_seconds(weights, live * bytes_per_token)
        rows_of_a_step = [one.generated_tokens / count for one, count in zip(sessions, steps, strict=True)]
        yield "rollout/floor_step_ms", modelled * 1e3
        yield "rollout/floor_tokens_per_second", median(rows_of_a_step) / modelled
        shares = (modelled * count / one.seconds for one, count in zip(sessions, steps, strict=True))
        yield "rollout/floor_share", median(shares)


def weight_bytes(spec: ModelSpec, policy: PrecisionPolicy, rows: float) -> float:
    """Bytes of weights that a decode step with `rows` sequences reads."""
    total = float(VALUE * spec.vocab_rows * spec.hidden_size)
    formats = {linear.name: linear.rollout for linear in policy.linears}
    for layer in range(spec.num_layers):
        for place, block in zip(PLACES, spec.blocks_of(layer), strict=True):
            for tensor in block.tensors(spec):
                if isinstance(tensor, LinearLayout):
                    is_fp8 = formats[f"layers.{layer}.{place.name}.{tensor.name}"] == "fp8"
                    total += _matrix_bytes(tensor, is_fp8) * _matrices_read(tensor, rows)
                elif isinstance(tensor, MatrixLayout):
                    total += VALUE * tensor.num_parameters
    return total


def modelled_seconds(num_weight_bytes: float, cached_bytes: float) -> float:
    """The model's time for one decode step."""
    return (num_weight_bytes + cached_bytes) / MEMORY_BYTES_PER_SECOND


def _matrix_bytes(linear: LinearLayout, is_fp8: bool) -> int:
    """Bytes of one matrix, which a stacked linear has `count` times."""
    rows, columns = linear.out_features, linear.in_features
    scales = 4 * -(-rows // BLOCK) * -(-columns // BLOCK)
    of_bias = VALUE * rows if linear.bias else 0
    return (rows * columns + scales if is_fp8 else VALUE * rows * columns) + of_bias


def _matrices_read(linear: LinearLayout, rows: float) -> float:
    if not isinstance(linear, StackedLinearLayout):
        return 1.0
    return linear.count * (1.0 - (1.0 - linear.per_token / linear.count) ** rows)


def decode_steps(metrics: EngineMetrics, max_batch: int) -> int:
    """The number of decode forwards, from their occupancy. The engine's count of steps includes prefills."""
    return max(1, round(metrics.generated_tokens / (metrics.batch_occupancy * max_batch)))


FURTHER: Mapping[str, Callable[[Arm, Sequence[Turn], Row], Row]] = {"rollout": _rollout, "train": _train, "step": _step}

# ---------------------------------------------------------------- arms beside one another

CLUSTER = ("cluster.", "rollout.learn_beside_tail=")  # begins of overrides that change where a run works, not what


def compare(rows: Mapping[Key, Row], phases: Sequence[str]) -> None:
    """Add `speedup_over_bf16` of each phase, beside the arm with the same other overrides; `efficiency` of each worker
    and `over_embedded`, beside one worker on Ray and the embedded one; `speedup_over_both`, of roles beside workers
    that do both."""
    for (workload, words), row in rows.items():
        plain = rows.get((workload, tuple(_in_bf16(word) for word in words)))
        if plain is not None and plain["precision"] == "bf16":
            for phase in phases:
                ratio = _times_faster(row, plain, phase)
                name = f"step/{phase}" if phases[0] == "step" else f"{phase}/"
                row |= {} if ratio is None else {f"{name}_speedup_over_bf16".replace("/_", "/"): ratio}
        same = [
            other
            for (name, own), other in rows.items()
            if name == workload and _elsewhere(own) == _elsewhere(words) and "cluster/trainers" not in other
        ]
        _compare_workers(row, same, phases)


def _in_bf16(word: str) -> str:
    return "precision=bf16" if word.startswith("precision=") else word


def _compare_workers(row: Row, same: Sequence[Row], phases: Sequence[str]) -> None:
    """`same`: rows of workers that do both, which differ from this one only in where they run."""
    one = next((other for other in same if other["cluster/workers"] == 1 and other["cluster/kind"] == "ray"), None)
    embedded = next((other for other in same if other["cluster/kind"] == "embedded"), None)
    base = one or embedded
    if "cluster/trainers" in row:
        both = next((other for other in same if other["cluster/workers"] == row["cluster/workers"]), None)
        row |= {} if both is None else {"step/speedup_over_both": float(both["time/step"]) / float(row["time/step"])}
    elif row["cluster/kind"] == "ray" and base is not None:
        speedups = {phase: _times_faster(row, base, phase) for phase in phases}
        row |= {
            f"{phase}/efficiency": speedup / int(row["cluster/workers"])
            for phase, speedup in speedups.items()
            if speedup is not None
        }
        if row is one and embedded is not None:
            row[f"{phases[0]}/over_embedded"] = 1 / (_times_faster(row, embedded, phases[0]) or 1.0) - 1


def _elsewhere(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if not word.startswith(CLUSTER))


def _times_faster(row: Row, base: Row, phase: str) -> float | None:
    """None: a step ahead has no time of the phase."""
    name = f"time/{phase}"
    return float(base[name]) / float(row[name]) if name in row and name in base else None


# ---------------------------------------------------------------- warnings

MOST_CAPTURE, NOISE = 0.02, 0.02  # shares of a step
MOST_EFFICIENCY, MOST_OVER_EMBEDDED = 1.25, 1.0  # larger ones are noise


def warnings(rows: Sequence[Row]) -> Iterator[str]:
    """What makes times unfair, or answers unequal that must be equal."""
    digests: dict[object, Row] = {}
    for row in rows:
        name = f"{row['precision']} {row['arm']}".strip()
        step, capture = float(row.get("time/step", 0.0)), float(row.get("time/capture", 0.0))
        if step and capture / step > MOST_CAPTURE:
            yield f"{name}: {capture / step:.0%} of its timed steps captured CUDA graphs; give more --steps"
        generated = float(row.get("time/rollout", 0.0))
        if "cluster/trainers" in row and step < generated * (1 - NOISE):
            yield (
                f"{name}: a step of {step:.2f} s cannot be shorter than the {generated:.2f} s of its own generation;"
                " batches that were generated before had shortened it; give more --steps or longer answers"
            )
        shares = [float(value) for key, value in row.items() if key.endswith("/efficiency")]
        beyond = [float(value) for key, value in row.items() if key.endswith("/over_embedded")]
        if max(shares, default=0.0) > MOST_EFFICIENCY or max(beyond, default=0.0) > MOST_OVER_EMBEDDED:
            yield f"{name}: such times compare nothing; give longer steps and more --rounds"
        same = (row["precision"], row["workload"], _elsewhere(str(row["arm"]).split()))
        first = digests.setdefault(same, row)
        if row.get("rollout/digest") != first.get("rollout/digest"):
            yield f"{name}: it sampled other tokens or log-probs than {first['precision']} {first['arm']}"

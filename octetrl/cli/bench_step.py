"""`octetrl bench step`: the whole GRPO step under several precisions, by phase."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from octetrl.bench.workload import (
    DIGITS,
    LengthRange,
    Shape,
    Workload,
    check_positions,
    check_size,
    lognormal_lengths,
    uniform_lengths,
)
from octetrl.cli.arguments import Address, Cpus, Device, Gpus
from octetrl.cli.bench_cluster import (
    CAPTURES,
    BesideTail,
    Gradients,
    TensorParallel,
    Workers,
    cluster_of,
    device_name,
    measure_cluster,
    result_name,
)
from octetrl.cli.bench_options import (
    CODES,
    MASTER,
    MOST_STEPS,
    STATES,
    SUMS,
    Checkpointing,
    GradientSums,
    KVFraction,
    Layers,
    LogprobChunk,
    Master,
    MaxBatch,
    Model,
    Name,
    Offload,
    Out,
    PrecisionList,
    Rounds,
    Seed,
    Sigma,
    States,
    WeightCodes,
    check_checkpointing,
    choices,
    device_of,
    legend_of,
    make_folder,
    model_of,
    most_of,
    precisions_of,
    refuse_empty,
    result_suffix,
    results_folder,
    shown,
)
from octetrl.cli.bench_roles import MaxStaleness, Roles, WeightsInFlight, arms_of, measure_roles
from octetrl.cli.bench_table import print_table
from octetrl.cli.bench_train import Tokens, trainer_config
from octetrl.config.cluster import ClusterConfig
from octetrl.config.limits import MOST_COMPLETIONS
from octetrl.config.schema import LoraConfig, RolloutConfig
from octetrl.config.validate_experts import expert_problems
from octetrl.config.validate_training_memory import training_memory_problems
from octetrl.system.errors import UserError
from octetrl.telemetry.metrics import MISMATCH

if TYPE_CHECKING:
    from octetrl.bench.model import BenchModel
    from octetrl.bench.step import StepBench, StepTurn

ON_GPU, ON_CPU = (64, 8, 512, "2048-4096", 16_384), (2, 2, 8, "4-12", 64)  # prompts, group, prompt, answers, tokens
MEAN_OF = {ON_GPU: 2048, ON_CPU: 8}  # tokens of an answer, of log-normal lengths
MODES = "fused,off,exact"  # of calibration
MOST_RANK = 1024  # of a recipe's adapters
COLUMNS = {  # key of a row: heading, format
    "time/step": ("step\ns", ",.2f"),
    "step/step_speedup_over_bf16": ("to\nbf16", ".2f"),
    "step/tokens_per_second": ("tokens/s", ",.0f"),
    "time/produce": ("produce\ns", ",.2f"),
    "time/capture": ("capture\ns", ",.2f"),
    "step/produce_share": ("of the\nstep", ".1%"),
    "step/produce_speedup_over_bf16": ("to\nbf16", ".2f"),
    "rollout/preemptions": ("pre-\nempted", ",d"),
    "time/learn": ("learn\ns", ",.2f"),
    "step/learn_share": ("of the\nstep", ".1%"),
    "step/learn_speedup_over_bf16": ("to\nbf16", ".2f"),
    "step/publish_ms": ("publish\nms", ",.1f"),
    "step/publish_share": ("of the\nstep", ".2%"),
    "step/publish_gb_per_second": ("GB/s", ",.0f"),
    MISMATCH: ("mismatch", ".4f"),
    "mismatch/max_abs_diff": ("largest\ndifference", ".2e"),
    "mismatch/tokens": ("of\ntokens", ",.0f"),
    "memory/learn_peak_gb": ("peak\nGB", ".1f"),
    "memory/estimate_gb": ("estimate\nGB", ".1f"),
}
CALIBRATION_COLUMNS = {
    "calibration/ms": ("ms", ",.1f"),
    "calibration/min_ms": ("min", ",.1f"),
    "calibration/max_ms": ("max", ",.1f"),
    "calibration/added_ms": ("over\noff", ",.1f"),
    "calibration/step_share": ("of the\nstep", ".2%"),
}
LEGEND = (  # key of a column, or nothing, and what it means
    ("", "produce: generation, and samples with random rewards. learn: forward, backward, update, KV scales."),
    ("time/capture", "capture: CUDA graphs of new batch sizes, a part of produce."),
    ("", "publish: new FP8 codes and the engine's check of them."),
    ("step/publish_gb_per_second", "GB/s: of codes."),
    (
        "",
        "tokens/s: prompts and answers over the whole step. mismatch: mean exp|engine - trainer| of log-probs, 1 if"
        " they are equal; then the largest difference and the number of tokens.",
    ),
    ("memory/learn_peak_gb", "peak: memory of learn and publish, the KV cache freed."),
    ("memory/estimate_gb", "estimate: memory of learn and publish by `octetrl check`."),
)

Prompts = Annotated[
    int | None,
    typer.Option(
        min=1, max=most_of(RolloutConfig, "prompts_per_step"), help="Prompts of a step. Default: 64; on a CPU 2."
    ),
]
Group = Annotated[
    int | None,
    typer.Option(min=2, max=MOST_COMPLETIONS, help="Siblings of a prompt. Default: 8; on a CPU 2."),
]
PromptTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt. Default: 512; on a CPU 8.")]
AnswerTokens = Annotated[
    str | None,
    typer.Option(
        metavar="N|N-M",
        help="Tokens of an answer, drawn uniformly; of log-normal lengths the mean N. Default: 2048-4096, or 2048; on a"
        " CPU 4-12, or 8.",
    ),
]
Lengths = Annotated[Literal["uniform", "lognormal"], typer.Option(help="Lengths of the answers.")]
Steps = Annotated[
    int, typer.Option(min=1, max=MOST_STEPS, help="Timed steps per round, after short ones that are not timed.")
]
Warmup = Annotated[int, typer.Option(min=0, help="Tokens of the shortest answer in the untimed step; 0: no such step.")]
LearnShare = Annotated[
    float,
    typer.Option(min=0.001, max=1.0, help="Learn from this share of the groups and extrapolate the time of all."),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar=f"{MODES}|none",
        help="Sources of the KV cache's scales to compare: fused: training's forward; exact: a forward of its own;"
        " off: no new scales. none: compare nothing. Default: all, on one worker.",
    ),
]
Lora = Annotated[
    str | None,
    typer.Option(
        metavar="RANK[:experts]",
        help="Train only adapters of this rank; :experts: on each expert of a mixture as well.",
    ),
]
CalibrationBatches = Annotated[int, typer.Option(min=1, help="Number of micro-batches for measuring calibration.")]


def step(
    model: Model = None,
    precision: PrecisionList = "bf16,fp8_rollout,fp8,fp8_full",
    prompts: Prompts = None,
    group: Group = None,
    prompt_tokens: PromptTokens = None,
    answer_tokens: AnswerTokens = None,
    lengths: Lengths = "uniform",
    sigma: Sigma = None,
    tokens: Tokens = None,
    steps: Steps = 1,
    rounds: Rounds = 1,
    warmup: Warmup = 16,
    learn_share: LearnShare = 1.0,
    calibration: Calibration = None,
    calibration_micro_batches: CalibrationBatches = 2,
    checkpointing: Checkpointing = "layer",
    weight_codes: WeightCodes = CODES,
    logprob_chunk: LogprobChunk = 1024,
    optimizer_states: States = STATES,
    master: Master = MASTER,
    offload: Offload = False,
    sums: GradientSums = SUMS,
    max_batch: MaxBatch = 256,
    kv_fraction: KVFraction = 0.85,
    lora: Lora = None,
    layers: Layers = None,
    out: Out = None,
    name: Name = None,
    device: Device = "auto",
    seed: Seed = 0,
    gpus: Gpus = None,
    cpus: Cpus = None,
    address: Address = None,
    workers: Workers = None,
    gradients: Gradients = "local",
    tensor_parallel: TensorParallel = 1,
    learn_beside_tail: BesideTail = False,
    roles: Roles = None,
    max_staleness: MaxStaleness = None,
    weights_in_flight: WeightsInFlight = None,
) -> None:
    """Measure a whole GRPO step under several precisions: produce, learn, publish, and the cost of calibration."""
    alone = _embedded_alone(learn_share, calibration, lora)
    cluster = cluster_of(gpus, cpus, address, gradients, workers, tensor_parallel, refused=alone)
    of_roles = (roles, max_staleness, weights_in_flight)
    arms = arms_of(*of_roles, cluster=cluster, workers=workers, beside_tail=learn_beside_tail)
    precisions, folder = precisions_of(precision), results_folder(out)
    config = trainer_config(checkpointing, weight_codes, logprob_chunk, optimizer_states, master, offload, sums)
    from octetrl.bench.step import StepBench

    chosen = device_of(device_name(cluster, device), cluster)
    on_gpu = chosen.type == "cuda"
    usual = ON_GPU if on_gpu else ON_CPU
    found = model_of(model, layers, on_gpu=on_gpu)
    plan = StepBench(
        model=found,
        precisions=precisions,
        workload=_workload(found, usual, (prompts, group, prompt_tokens), answer_tokens, (lengths, sigma), seed),
        group_size=group or usual[1],
        trainer=config.model_copy(update={"tokens_per_micro_batch": tokens or usual[4]}),
        device=chosen,
        rounds=rounds,
        steps=steps,
        warmup_tokens=warmup,
        learn_share=learn_share,
        max_batch=max_batch,
        kv_fraction=kv_fraction,
        calibration=_modes_of(calibration),
        calibration_micro_batches=calibration_micro_batches,
        seed=seed,
        learn_beside_tail=learn_beside_tail,
        lora=_lora_of(lora),
    )
    suffix = result_suffix(name)
    if arms is not None and cluster is not None:
        words = f"{found.name}_{result_name(cluster)}_roles_{roles}".replace("+", "_")
        return measure_roles(plan, cluster, arms, folder, f"{words}{suffix}")
    _measure(plan, folder, suffix, cluster, workers)


def _embedded_alone(learn_share: float, calibration: str | None, lora: str | None) -> dict[str, bool]:
    compares = calibration not in (None, "none")
    return {"--learn-share": learn_share < 1.0, "--calibration": compares, "--lora": lora is not None}


def _lora_of(text: str | None) -> LoraConfig | None:
    if text is None:
        return None
    rank, colon, experts = text.partition(":")
    is_number = rank.isascii() and rank.isdecimal() and len(rank) <= DIGITS
    if not is_number or not 1 <= int(rank) <= MOST_RANK or (colon and experts != "experts"):
        raise UserError(f"--lora: '{text[:20]}' is no rank; give 1 to {MOST_RANK:,}, or for example 16:experts")
    return LoraConfig(rank=int(rank), experts=bool(colon))


def _check_lora(plan: StepBench) -> None:
    """Raise UserError if a run would refuse these adapters."""
    from octetrl.bench.step import step_recipe

    for precision in plan.precisions if plan.lora is not None else ():
        recipe = step_recipe(plan, precision)
        for problem in (*training_memory_problems(recipe), *expert_problems(recipe, plan.model.spec)):
            if any(field.startswith("model.lora") for field in problem.fields):
                raise UserError(f"--lora: {problem.text}")


def _modes_of(calibration: str | None) -> tuple[str, ...]:
    if calibration is not None:
        refuse_empty("--calibration", calibration, f"some of {MODES}, or none")
    return () if calibration == "none" else choices("--calibration", calibration or MODES, MODES.split(","))


def _sigma(lengths: str, sigma: float | None) -> float | None:
    """Sigma of log-normal lengths; None: uniform ones."""
    if lengths == "lognormal":
        return 0.7 if sigma is None else sigma
    if sigma is not None:
        raise UserError(f"--sigma: {sigma} spreads log-normal lengths; add --lengths lognormal, or leave it out")
    return None


def _workload(
    model: BenchModel,
    usual: tuple[int, int, int, str, int],
    shape: tuple[int | None, int | None, int | None],
    answer_tokens: str | None,
    spread: tuple[str, float | None],
    seed: int,
) -> Workload:
    """The workload. `shape`: prompts, siblings, tokens of a prompt. `spread`: `--lengths` and `--sigma`.
    Raises UserError if a prompt and its answer are longer than the model's context."""
    sigma = _sigma(*spread)
    prompts, group, prompt = (given or default for given, default in zip(shape, usual[:3], strict=True))
    answers = LengthRange.parse(usual[3] if answer_tokens is None else answer_tokens, "--answer-tokens")
    if sigma is not None:
        if answer_tokens is None:
            answers = LengthRange(MEAN_OF[usual], MEAN_OF[usual])
        elif answers.shortest != answers.longest:
            raise UserError(f"--answer-tokens: '{answers}' is a span; log-normal lengths have one mean, such as 2048")
    longest = Shape(prompts * group, prompt, answers.longest)
    positions, vocab_size = model.spec.max_positions, model.spec.vocab_size
    check_positions(longest, positions, model.name, "shorten --prompt-tokens or --answer-tokens")
    check_size(longest.requests, prompts * prompt, "lower --prompts, --group or --prompt-tokens")
    if sigma is None:
        return uniform_lengths(prompts, group, prompt, answers, vocab_size, seed)
    return lognormal_lengths(longest, group, vocab_size, seed, sigma=sigma, max_positions=positions)


def _measure(plan: StepBench, folder: Path, suffix: str, cluster: ClusterConfig | None, workers: str | None) -> None:
    model = plan.model.name
    if cluster is None and plan.learn_beside_tail:
        raise UserError("--learn-beside-tail: it is for workers on Ray; add --gpus N or --cpus N, or leave it out")
    if cluster is not None:
        return measure_cluster(plan, cluster, workers, folder, f"{model}_{result_name(cluster)}{suffix}")
    from octetrl.bench.fair_times import capture_warnings
    from octetrl.bench.step import check_memory, measure
    from octetrl.bench.step_rows import calibration_rows, rows_of
    from octetrl.telemetry.bench_record import write_result

    check_checkpointing(plan.trainer, plan.model)
    _check_lora(plan)
    check_memory(plan)
    make_folder(folder)  # now, so that minutes of measuring are not lost
    turns = measure(plan, _say)
    rows = rows_of(plan, turns)
    learnt = (
        "" if plan.learn_share == 1.0 else f", learning time extrapolated from {plan.learn_share:.0%} of the groups"
    )
    title = f"step, {plan.model.name} on {plan.device.type}, {plan.workload.name}{learnt}"
    columns, names = shown(COLUMNS, rows), ("precision",)
    print_table(title, names, columns, rows, legend_of(LEGEND, columns))
    costs = calibration_rows(plan, turns)
    if costs:
        title = f"calibration, forward and backward of {costs[0]['calibration/tokens']:,} tokens"
        print_table(title, ("precision", "calibration"), CALIBRATION_COLUMNS, costs)
    for line in capture_warnings(rows, names, CAPTURES):
        typer.echo(line, err=True)
    path = write_result("step", f"{model}{suffix}", rows, folder, calibration=costs)
    typer.echo(f"wrote {path}")


def _say(number: int, turn: StepTurn) -> None:
    for step in turn.steps:
        phases = f"produce {step.produce:.2f} s, learn {step.learn:.2f} s, publish {step.publish * 1e3:.1f} ms"
        difference = f"largest difference {step.max_abs_diff:.2e} over {step.compared_tokens:,} tokens"
        arm = f"round {number}  {turn.precision}"
        typer.echo(f"{arm}: {phases}, {difference}, up in {turn.startup_seconds:.1f} s")
        if step.pace is not None:
            before, settling, steady = step.pace.before, step.pace.settling, step.pace.steady
            once = f"{before:.2f} s before its first micro-batch, {settling:.2f} s to find its pace"
            typer.echo(f"         of learning {once}, then {steady * 1e6:.1f} us a token")

"""`octetrl bench train`: speed of forward, backward and update under several precisions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octetrl.bench.workload import DIGITS, LengthRange
from octetrl.cli.arguments import Address, Cpus, Device, Gpus
from octetrl.cli.bench_cluster import Gradients, TensorParallel, Workers, cluster_of, device_name, result_name
from octetrl.cli.bench_on_workers import measure_train, micro_batches_of
from octetrl.cli.bench_options import (
    CODES,
    MASTER,
    MOST_STEPS,
    STATES,
    SUMS,
    Checkpointing,
    GradientSums,
    Layers,
    LogprobChunk,
    Master,
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
    choice_of,
    device_of,
    make_folder,
    model_of,
    most_of,
    precisions_of,
    result_suffix,
    results_folder,
)
from octetrl.cli.bench_table import print_table
from octetrl.config.schema import OptimizerConfig, TrainerConfig
from octetrl.system.errors import UserError

if TYPE_CHECKING:
    from octetrl.bench.train import TrainBench, TrainTurn
    from octetrl.bench.turns import Row

MOST_MICRO_BATCHES = 10_000  # of a step: all of them are drawn into memory before the first is trained on
ON_GPU, ON_CPU = (16_384, "4096", 2048), (64, "16", 16)  # tokens of a micro-batch, lengths, mean length
COLUMNS = {  # key of a row: heading, format
    "train/tokens_per_second": ("tokens/s", ",.0f"),
    "train/speedup_over_bf16": ("to\nbf16", ".2f"),
    "train/gradient_ms": ("fwd+bwd\nms", ",.1f"),
    "train/whole_tokens_per_second": ("tokens/s\nwhole", ",.0f"),
    "train/tflops": ("TFLOP/s", ".1f"),
    "train/ceiling_share": ("of\n790", ".1%"),
    "train/optimizer_ms": ("optimizer\nms", ",.1f"),
    "train/requantize_ms": ("requantise\nms", ".2f"),
    "memory/peak_gb": ("peak\nGB", ".1f"),
    "memory/estimate_gb": ("estimate\nGB", ".1f"),
    "train/loss": ("loss", ".4f"),
    "time/startup": ("start\ns", ".1f"),
}
PART_COLUMNS = {
    "ms_per_step": ("ms", ",.2f"),
    "share": ("share", ".1%"),
    "kernels_per_step": ("kernels", ",.0f"),
}
LEGEND = (
    "tokens/s: of forward and backward, of the median step; whole: with update and quantisation."
    " TFLOP/s: the model's own, 6 x weights of linears x tokens (of a mixture, the"
    " chosen experts'), lm_head for trained tokens, causal attention 3.5 x its forward; recomputation is not counted."
    " of 790: share of the TFLOP/s of a large BF16 GEMM on an H200. estimate: the trainer's parts by `octetrl check`."
    " start: time to the first step."
)

Tokens = Annotated[
    int | None,
    typer.Option(
        min=16,
        max=most_of(TrainerConfig, "tokens_per_micro_batch"),
        help="Tokens of a micro-batch. Default: 16384; on a CPU 64.",
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        metavar="N|N-M|lognormal",
        help="Of the sequences in a micro-batch: one length, drawn uniformly, or drawn lognormally."
        " Default: 4096; on a CPU 16.",
    ),
]
Mean = Annotated[int | None, typer.Option(min=2, help="lognormal: the mean length. Default: 2048; on a CPU 16.")]
Steps = Annotated[int, typer.Option(min=1, max=MOST_STEPS, help="Timed steps per round, after one that is not timed.")]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_MICRO_BATCHES,
        help="Micro-batches of a step. Default: 2; with --gpus or --cpus 4 for each worker.",
    ),
]
WithOptimizer = Annotated[
    bool,
    typer.Option("--optimizer/--no-optimizer", help="Without: no update, and gradients stay as BF16 sums."),
]
TrainedShare = Annotated[
    float, typer.Option(min=0.001, max=1.0, help="Share of a sequence's tokens that are trained on.")
]
Profile = Annotated[
    bool | None,
    typer.Option("--profile/--no-profile", help="Show the time by part, on a GPU. Default: if there is one."),
]


def train(
    model: Model = None,
    precision: PrecisionList = "bf16,fp8",
    tokens: Tokens = None,
    lengths: Lengths = None,
    mean: Mean = None,
    sigma: Sigma = None,
    trained_share: TrainedShare = 0.875,
    micro_batches: MicroBatches = None,
    steps: Steps = 3,
    rounds: Rounds = 2,
    checkpointing: Checkpointing = "layer",
    weight_codes: WeightCodes = CODES,
    logprob_chunk: LogprobChunk = 1024,
    optimizer: WithOptimizer = True,
    optimizer_states: States = STATES,
    master: Master = MASTER,
    offload: Offload = False,
    gradient_sums: GradientSums = SUMS,
    layers: Layers = None,
    profile: Profile = None,
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
) -> None:
    """Measure training speed under several precisions: forward, backward, update, and the time by part."""
    alone = {"--profile": bool(profile), "--no-optimizer": not optimizer}
    cluster = cluster_of(gpus, cpus, address, gradients, workers, tensor_parallel, refused=alone)
    precisions, folder = precisions_of(precision), results_folder(out)
    config = trainer_config(
        checkpointing, weight_codes, logprob_chunk, optimizer_states, master, offload, gradient_sums, updates=optimizer
    )
    from octetrl.bench.mix import Mix
    from octetrl.bench.train import TrainBench

    chosen = device_of(device_name(cluster, device), cluster)
    on_gpu = chosen.type == "cuda"
    found = model_of(model, layers, on_gpu=on_gpu)
    usual_tokens, usual_length, usual_mean = ON_GPU if on_gpu else ON_CPU
    config = config.model_copy(update={"tokens_per_micro_batch": tokens or usual_tokens})
    span = _span_of(usual_length if lengths is None else lengths, mean, sigma)
    mix = Mix(span, mean or usual_mean, 0.7 if sigma is None else sigma)
    _check_lengths(mix, config.tokens_per_micro_batch, found.spec.max_positions, found.name)
    plan = TrainBench(
        model=found,
        precisions=precisions,
        mix=mix,
        trainer=config,
        device=chosen,
        micro_batches=micro_batches_of(micro_batches, cluster),
        trained_share=trained_share,
        rounds=rounds,
        steps=steps,
        optimizer=optimizer,
        profile=_profiles(profile, on_gpu=on_gpu),
        seed=seed,
    )
    suffix = result_suffix(name)
    if cluster is not None:
        return measure_train(plan, cluster, workers, folder, f"{found.name}_{result_name(cluster)}{suffix}")
    _measure(plan, folder, found.name + suffix)


def _measure(plan: TrainBench, folder: Path, name: str) -> None:
    from octetrl.bench.train import check_memory, measure, profile_rows, rows_of
    from octetrl.telemetry.bench_record import write_result

    check_checkpointing(plan.trainer, plan.model)
    check_memory(plan)
    make_folder(folder)  # now, so that minutes of measuring are not lost
    turns = measure(plan, _say)
    rows = rows_of(plan, turns)
    title = f"train, {plan.model.name} on {plan.device.type}, {plan.name}"
    print_table(title, ("precision",), COLUMNS, rows, LEGEND)
    parts, kernels = profile_rows(turns)
    _print_parts(plan, parts)
    path = write_result("train", name, rows, folder, parts=parts, kernels=kernels)
    typer.echo(f"wrote {path}")


def _profiles(given: bool | None, *, on_gpu: bool) -> bool:
    if given and not on_gpu:
        raise UserError("--profile: it times kernels on a GPU, and this would run on a CPU; leave it out")
    return on_gpu if given is None else given


def _span_of(lengths: str, mean: int | None, sigma: float | None) -> LengthRange | None:
    """The span of `--lengths`; None where lengths are drawn lognormally."""
    if lengths != "lognormal" and (mean, sigma) != (None, None):
        option = "--mean" if mean is not None else "--sigma"
        raise UserError(f"{option}: lengths are not drawn lognormally; add --lengths lognormal, or leave it out")
    return None if lengths == "lognormal" else LengthRange.parse(lengths, "--lengths")


def trainer_config(
    checkpointing: str,
    weight_codes: str,
    logprob_chunk: int,
    states: str,
    master: str,
    offload: bool,
    sums: str = SUMS,
    *,
    updates: bool = True,
) -> TrainerConfig:
    """The recipe's section `trainer`, from the options. `updates`: whether there is an optimizer."""
    if offload and not updates:
        raise UserError("--offload: with --no-optimizer there is nothing to keep in the host's memory; leave one out")
    if sums != SUMS and not updates:
        raise UserError("--gradient-sums: with --no-optimizer gradients are not summed this way; leave one out")

    def given(section: type[Any], field: str, option: str, value: str) -> Any:
        return choice_of(option, value, section.model_fields[field].annotation.__args__)

    optimizer = OptimizerConfig(
        states=given(OptimizerConfig, "states", "--optimizer-states", states),
        master=given(OptimizerConfig, "master", "--master", master),
        offload=offload,
    )
    name, colon, layers = checkpointing.partition(":")
    keeps = given(TrainerConfig, "activation_checkpointing", "--checkpointing", name)
    if colon and not (layers.isascii() and layers.isdecimal() and len(layers) <= DIGITS):
        raise UserError(
            f"--checkpointing: '{layers[:20]}' is not a number of layers; give one, as in layer:8, or leave it out"
        )
    if colon and keeps == "none":
        raise UserError(f"--checkpointing: 'none:{layers}' checkpoints nothing, in no layer; give none, or layer:8")
    return TrainerConfig(
        optimizer=optimizer,
        activation_checkpointing=keeps,
        checkpointed_layers=int(layers) if colon else None,
        weight_codes=given(TrainerConfig, "weight_codes", "--weight-codes", weight_codes),
        gradients=given(TrainerConfig, "gradients", "--gradient-sums", sums),
        logprob_chunk=logprob_chunk,
    )


def _check_lengths(mix: Any, tokens: int, positions: int, model: str) -> None:
    """Raise UserError if a drawn sequence could be longer than the model's context or the micro-batch."""
    longest = mix.mean if mix.span is None else mix.span.longest
    if mix.span is not None and mix.span.shortest < 2:
        raise UserError("--lengths: a sequence of one token has nothing to learn from; give at least 2")
    if longest > tokens:
        raise UserError(f"--lengths: {longest} tokens do not fit a micro-batch of {tokens}; raise --tokens")
    if longest > positions:
        raise UserError(
            f"--lengths: {longest} tokens were requested, but {model} has {positions} positions; give fewer"
        )


def _say(number: int, turn: TrainTurn) -> None:
    seconds = sum(step.gradient for step in turn.steps)
    speed = f"{turn.work.tokens * len(turn.steps) / seconds:,.0f} tokens/s on average"
    arm = f"round {number}  {turn.precision}"
    typer.echo(f"{arm}: {speed}, up in {turn.startup_seconds:.1f} s")


def _print_parts(plan: TrainBench, parts: Sequence[Row]) -> None:
    for precision in plan.precisions:
        rows = [row for row in parts if row["precision"] == precision]
        if rows:
            print_table(f"one step by part, {precision}, {plan.name}", ("part",), PART_COLUMNS, rows)

"""`octetrl bench step --gpus N` (or `--cpus N`): the step on one and more workers, and the embedded one beside them.

The options of workers, for all benches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from octetrl.cli.arguments import in_options
from octetrl.cli.bench_options import (
    check_checkpointing,
    choice_of,
    legend_of,
    make_folder,
    refuse_empty,
    shown,
)
from octetrl.cli.bench_table import print_table
from octetrl.config.cluster import ClusterConfig, cluster_problems
from octetrl.config.limits import MOST_CPUS, MOST_GPUS
from octetrl.config.validate_tail import tail_problems
from octetrl.shapes.spec import MOST_WORKERS
from octetrl.system.errors import UserError

if TYPE_CHECKING:
    from octetrl.bench.cluster import ClusterBench, ClusterTurn
    from octetrl.bench.step import StepBench
    from octetrl.config.schema import TrainerConfig

COLUMNS = {  # key of a row: heading, format
    "time/step": ("step\ns", ",.2f"),
    "step/efficiency": ("effi-\nciency", ".1%"),
    "step/over_embedded": ("over em-\nbedded", ".1%"),
    "step/tokens_per_second": ("tokens/s", ",.0f"),
    "step/tokens_per_second_per_worker": ("tokens/s\neach", ",.0f"),
    "time/produce": ("produce\ns", ",.2f"),
    "time/capture": ("capture\ns", ",.2f"),
    "produce/efficiency": ("effi-\nciency", ".1%"),
    "time/learn": ("learn\ns", ",.2f"),
    "learn/efficiency": ("effi-\nciency", ".1%"),
    "step/beside_tail_share": ("beside\ntail", ".1%"),
    "step/publish_ms": ("publish\nms", ",.1f"),
    "step/publish_gb_per_second": ("GB/s", ",.1f"),
    "publish/gather_ms": ("gather\nms", ",.1f"),
    "publish/gather_gb_per_second": ("GB/s", ",.1f"),
    "publish/link_gb_per_second": ("link\nGB/s", ",.1f"),
    "mismatch/max_abs_diff": ("largest\ndifference", ".2e"),
    "memory/peak_gb": ("peak\nGB", ".1f"),
    "memory/estimate_gb": ("estimate\nGB", ".1f"),
    "time/startup": ("start\ns", ".1f"),
}
MOST_EFFICIENCY, MOST_OVER_EMBEDDED = 1.25, 1.0  # shares; larger ones are noise
LEGEND = (  # key of a column, or nothing, and what it means
    ("", "produce: generation, and samples with random rewards. learn: forward, backward, update, KV scales."),
    ("time/capture", "capture: CUDA graphs of new batch sizes, a part of produce."),
    (
        "step/beside_tail_share",
        "beside tail: share of the tokens trained on before the last answer ended; learn is then what was left.",
    ),
    ("", "publish: new weights on all workers, and the engines' check of them."),
    ("step/publish_gb_per_second", "GB/s: of what a worker receives."),
    ("publish/gather_ms", "gather: the exchange alone."),
    ("publish/link_gb_per_second", "link: speed of one large exchange, measured when the workers start."),
    ("step/efficiency", "efficiency: speed of each worker compared with one worker on Ray."),
    ("step/over_embedded", "over embedded: time of a step on Ray beyond that of the embedded worker."),
    ("memory/peak_gb", "peak: of the worker with the largest, the KV cache included; on a CPU the process."),
    ("memory/estimate_gb", "estimate: a worker's training without the KV cache, by `octetrl check`."),
)
CAPTURES = "give --steps 3 or more: rows have medians"

BesideTail = Annotated[
    bool,
    typer.Option("--learn-beside-tail", help="With --gpus or --cpus: the recipe's rollout.learn_beside_tail."),
]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="embedded,1,2,...",
        help="With --gpus or --cpus: numbers of workers to compare. Default: embedded, 1, 2, 4, ... up to all.",
    ),
]
Gradients = Annotated[
    str, typer.Option(metavar="local|sharded", help="With --gpus or --cpus: the recipe's cluster.gradients.")
]
TensorParallel = Annotated[
    int,
    typer.Option(
        min=1,
        max=MOST_WORKERS,
        help="With --gpus or --cpus: number of workers that share one model (cluster.tensor_parallel). One worker, and"
        " the embedded one, have it whole.",
    ),
]


def cluster_of(
    gpus: int | None,
    cpus: int | None,
    address: str | None,
    gradients: str,
    workers: str | None,
    tensor_parallel: int = 1,
    *,
    refused: Mapping[str, bool],
) -> ClusterConfig | None:
    """The cluster of the options; None if there are no workers to start. Raises UserError.

    `refused`: options that are for the embedded worker alone, and whether each was given.
    """
    if gpus is None and cpus is None:
        given = {
            "--address": address,
            "--workers": workers,
            "--gradients": gradients if gradients != "local" else None,
            "--tensor-parallel": tensor_parallel if tensor_parallel > 1 else None,
        }
        for option, value in given.items():
            if value is not None:
                raise UserError(f"{option}: it is for workers on Ray; add --gpus N or --cpus N, or leave it out")
        return None
    if gpus is not None and cpus is not None:
        raise UserError("--cpus: cannot be combined with --gpus; keep one of the two")
    for option, is_given in refused.items():
        if is_given:
            raise UserError(
                f"{option}: it is for the embedded worker alone; leave it out, or leave out --gpus and --cpus"
            )
    if address is not None:
        refuse_empty("--address", address, "host:port, auto or local")
        for problem in cluster_problems(ClusterConfig(address=address)):
            raise UserError(in_options(problem.text))
    mode: Any = choice_of("--gradients", gradients, ClusterConfig.model_fields["gradients"].annotation.__args__)  # type: ignore[union-attr]
    for option, count, limit in (("--gpus", gpus, MOST_GPUS), ("--cpus", cpus, MOST_CPUS)):
        if count is not None and count > limit:
            raise UserError(f"{option}: {count} is out of range; it must be at most {limit:,}")
    most = gpus or cpus or 1
    if most % tensor_parallel:
        option = "--gpus" if cpus is None else "--cpus"
        raise UserError(
            f"--tensor-parallel: {most} workers do not make groups of {tensor_parallel}; give a multiple as {option}"
        )
    return ClusterConfig(gpus=gpus, cpus=cpus, address=address, gradients=mode, tensor_parallel=tensor_parallel)


def counts_of(text: str | None, cluster: ClusterConfig) -> tuple[int, ...]:
    """Numbers of workers to compare, 0 for the embedded one. Raises UserError."""
    most, size = cluster.num_workers, cluster.tensor_parallel
    if text is None:
        doubled = [1 << power for power in range(most.bit_length())]
        all_counts = (0, *doubled, *([] if most in doubled else [most]))
        return tuple(count for count in all_counts if count < 2 or count % size == 0)
    counts = []
    for word in text.split(","):
        number = 0 if word == "embedded" else int(word) if word.isascii() and word.isdecimal() and len(word) < 6 else -1
        if not (word == "embedded" or 1 <= number <= most):
            option = "--gpus" if cluster.cpus is None else "--cpus"
            raise UserError(
                f"--workers: '{word[:20]}' is neither embedded nor a number from 1 to {most}; write for example"
                f" embedded,1,2, or raise {option}"
            )
        if number > 1 and number % size:
            raise UserError(f"--workers: {number} workers do not make groups of --tensor-parallel {size}; leave it out")
        counts.append(number)
    if len(set(counts)) < len(counts):
        raise UserError(f"--workers: '{text}' names a value twice; repeat all of them with --rounds")
    return tuple(counts)


def device_name(
    cluster: ClusterConfig | None, device: Literal["auto", "cpu", "cuda"]
) -> Literal["auto", "cpu", "cuda"]:
    """The device of the workers. Raises UserError if `--device` is another one."""
    if cluster is None:
        return device
    option, kind, other = ("--cpus", "cpu", "cuda") if cluster.cpus is not None else ("--gpus", "cuda", "cpu")
    if device == other:
        raise UserError(f"--device: {device} is not the device of {option}; leave one of the two out")
    return "cpu" if kind == "cpu" else "cuda"


def measure_cluster(step: StepBench, cluster: ClusterConfig, workers: str | None, folder: Path, name: str) -> None:
    """Measure, print and write the file."""
    from octetrl.bench.cluster import ClusterBench, measure
    from octetrl.bench.cluster_memory import check_memory
    from octetrl.bench.cluster_rows import rows_of
    from octetrl.bench.fair_times import capture_warnings
    from octetrl.bench.on_workers import check_cut, connected, digest_warnings
    from octetrl.telemetry.bench_record import write_result

    plan = ClusterBench(step, cluster, counts_of(workers, cluster))
    check_tail(plan)
    check_cut(cluster, step.model)
    check_checkpointing(step.trainer, step.model)
    check_codes(plan.counts, cluster, step.trainer)
    check_memory(plan)
    make_folder(folder)  # now, so that minutes of measuring are not lost
    with connected(cluster):
        turns = measure(plan, _say)
    rows = rows_of(plan, turns)
    title = f"step, {step.model.name} on {step.device.type} workers, {step.workload.name}"
    names = ("precision", "cluster/kind", "cluster/workers")
    columns = shown(columns_of(beside_tail=step.learn_beside_tail), rows)
    print_table(title, names, columns, rows, legend_of(LEGEND, columns))
    for line in [*capture_warnings(rows, names, CAPTURES), *noise_warnings(rows), *digest_warnings(turns)]:
        typer.echo(line, err=True)
    path = write_result("step", name, rows, folder)
    typer.echo(f"wrote {path}")


def columns_of(*, beside_tail: bool) -> dict[str, tuple[str, str]]:
    """The table's columns. Beside a tail `learn` is only what was left of learning, so it has no efficiency."""
    left_out = "learn/efficiency" if beside_tail else "step/beside_tail_share"
    return {key: value for key, value in COLUMNS.items() if key != left_out}


def noise_warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line if a share is larger than workers can make it, so that steps were too short to be compared."""
    shares = [value for row in rows for key, value in row.items() if key.endswith("/efficiency")]
    beyond = [value for row in rows for key, value in row.items() if key.endswith("/over_embedded")]
    if max(shares, default=0.0) <= MOST_EFFICIENCY and max(beyond, default=0.0) <= MOST_OVER_EMBEDDED:
        return []
    return [
        "warning: such times compare nothing (an efficiency far above 100%, or a worker on Ray far slower than the"
        " embedded one): steps are too short, other programs ran, or a single worker had too little memory; give"
        " longer steps and more --rounds"
    ]


def result_name(cluster: ClusterConfig) -> str:
    """What the file's name says of the workers: `2_gpus`, or `2_gpus_shared_by_2`."""
    shared = f"_shared_by_{cluster.tensor_parallel}" if cluster.tensor_parallel > 1 else ""
    return f"{cluster.num_workers}_{'cpus' if cluster.cpus is not None else 'gpus'}{shared}"


def check_codes(counts: Sequence[int], cluster: ClusterConfig, trainer: TrainerConfig) -> None:
    """Raise UserError if weights would be remade where a worker has only some rows of them."""
    if max(counts) > cluster.tensor_parallel and trainer.weight_codes == "remade":
        raise UserError("--weight-codes: remade needs whole weights, which several workers do not have; use kept")


def check_tail(plan: ClusterBench) -> None:
    """Raise UserError if no number of workers can learn beside the tail of its rollout, or not with these options."""
    if plan.step.learn_beside_tail:
        recipe = plan.recipe(plan.precisions[0], max(plan.counts))
        if max(plan.counts) < 2:
            raise UserError("--learn-beside-tail: one worker samples and trains in turns; raise --gpus or --cpus")
        for problem in tail_problems(recipe):
            raise UserError(in_options(problem.text))


def _say(number: int, turn: ClusterTurn) -> None:
    from octetrl.bench.on_workers import name_of

    for step in turn.steps:
        phases = f"produce {step.produce:.2f} s, learn {step.learn:.2f} s, publish {step.publish * 1e3:.1f} ms"
        arm = f"round {number}  {turn.precision}, {name_of(turn.workers)}"
        typer.echo(f"{arm}: {phases}, largest difference {step.max_abs_diff:.2e}, up in {turn.startup_seconds:.1f} s")

"""`octetrl bench rollout` and `bench train` with `--gpus N` (or `--cpus N`): one and more workers, and the embedded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from octetrl.cli.bench_cluster import check_codes, counts_of, noise_warnings
from octetrl.cli.bench_options import check_checkpointing, make_folder
from octetrl.cli.bench_table import print_table
from octetrl.config.cluster import ClusterConfig
from octetrl.system.errors import UserError

if TYPE_CHECKING:
    from octetrl.bench.cluster_rollout import RolloutTurn
    from octetrl.bench.cluster_train import ClusterTrainTurn
    from octetrl.bench.rollout import Bench
    from octetrl.bench.train import TrainBench

MICRO_BATCHES_OF_A_WORKER = 4  # below it some workers wait for others (docs/scale.md)
ROLLOUT_COLUMNS = {  # key of a row: heading, format
    "time/rollout": ("s", ",.2f"),
    "rollout/efficiency": ("effi-\nciency", ".1%"),
    "rollout/over_embedded": ("over em-\nbedded", ".1%"),
    "rollout/tokens_per_second": ("tokens/s", ",.0f"),
    "rollout/tokens_per_second_per_worker": ("tokens/s\neach", ",.0f"),
    "rollout/tail_share": ("tail", ".1%"),
    "rollout/idle_share": ("idle", ".1%"),
    "rollout/preemptions": ("pre-\nempted", ",d"),
    "memory/peak_gb": ("peak\nGB", ".1f"),
    "time/startup": ("start\ns", ".1f"),
}
TRAIN_COLUMNS = {
    "time/train": ("step\ns", ",.2f"),
    "train/efficiency": ("effi-\nciency", ".1%"),
    "train/over_embedded": ("over em-\nbedded", ".1%"),
    "train/tokens_per_second": ("tokens/s", ",.0f"),
    "train/tokens_per_second_per_worker": ("tokens/s\neach", ",.0f"),
    "train/tflops_per_worker": ("TFLOP/s\neach", ".1f"),
    "train/requantize_ms": ("new codes\nms", ",.1f"),
    "train/gather_ms": ("gather\nms", ",.1f"),
    "train/loss": ("loss", ".4f"),
    "memory/peak_gb": ("peak\nGB", ".1f"),
    "memory/estimate_gb": ("estimate\nGB", ".1f"),
    "time/startup": ("start\ns", ".1f"),
}
COMPARED = (
    " efficiency: speed of each worker compared with one worker on Ray. over embedded: time on one worker on Ray beyond"
    " that of the embedded worker. peak: of the worker with the largest; on a CPU the process."
)
ROLLOUT_LEGEND = (
    "tail: share of the decode time with less than half of a worker's batch running. idle: share of the time in which a"
    " worker has no request left, in the mean over workers." + COMPARED
)
TRAIN_LEGEND = (
    "step: forward, backward, sums of gradients over workers, update, new codes. gather: the exchange of new weights, a"
    " part of new codes. estimate: a worker's training without the KV cache, by `octetrl check`." + COMPARED
)


def measure_rollout(bench: Bench, cluster: ClusterConfig, workers: str | None, folder: Path, name: str) -> None:
    """Measure, print and write the file."""
    from octetrl.bench.cluster_rollout import ClusterRollout, measure, rows_of
    from octetrl.bench.on_workers import check_cut, connected, digest_warnings
    from octetrl.bench.rollout_memory import check_memory
    from octetrl.telemetry.bench_record import write_result

    plan = ClusterRollout(bench, cluster, counts_of(workers, cluster))
    check_cut(cluster, bench.model)
    check_memory(plan)
    make_folder(folder)  # now, so that minutes of measuring are not lost
    with connected(cluster):
        turns = measure(plan, _say_rollout)
    rows = rows_of(plan, turns)
    names = ("precision", "workload", "cluster/kind", "cluster/workers")
    title = f"rollout, {bench.model.name} on {bench.device.type} workers"
    print_table(title, names, ROLLOUT_COLUMNS, rows, ROLLOUT_LEGEND)
    for line in noise_warnings(rows):
        typer.echo(line, err=True)
    for workload in bench.workloads:
        for line in digest_warnings([turn for turn in turns if turn.workload is workload]):
            typer.echo(line, err=True)
    typer.echo(f"wrote {write_result('rollout', name, rows, folder)}")


def make_folder_for(bench: Bench, folder: Path) -> None:
    """Make the folder of the results. Raises UserError if the weights of the embedded worker do not fit."""
    from octetrl.bench.cluster_rollout import ClusterRollout
    from octetrl.bench.on_workers import EMBEDDED
    from octetrl.bench.rollout_memory import check_memory

    check_memory(ClusterRollout(bench, ClusterConfig(), (EMBEDDED,)))
    make_folder(folder)


def measure_train(bench: TrainBench, cluster: ClusterConfig, workers: str | None, folder: Path, name: str) -> None:
    """Measure, print and write the file."""
    from octetrl.bench.cluster_memory import check_memory
    from octetrl.bench.cluster_train import ClusterTrain, measure, rows_of
    from octetrl.bench.on_workers import check_cut, connected
    from octetrl.telemetry.bench_record import write_result

    plan = ClusterTrain(bench, cluster, counts_of(workers, cluster))
    check_cut(cluster, bench.model)
    check_checkpointing(bench.trainer, bench.model)
    check_codes(plan.counts, cluster, bench.trainer)
    check_memory(plan)
    make_folder(folder)
    with connected(cluster):
        turns = measure(plan, _say_train)
    rows = rows_of(plan, turns)
    title = f"train, {bench.model.name} on {bench.device.type} workers, {bench.name}"
    print_table(title, ("precision", "cluster/kind", "cluster/workers"), TRAIN_COLUMNS, rows, TRAIN_LEGEND)
    for line in noise_warnings(rows):
        typer.echo(line, err=True)
    typer.echo(f"wrote {write_result('train', name, rows, folder)}")


def micro_batches_of(given: int | None, cluster: ClusterConfig | None) -> int:
    """Micro-batches of a step, the same for all numbers of workers. Raises UserError if a worker would have none."""
    if cluster is None:
        return 2 if given is None else given
    groups = cluster.num_groups
    if given is not None and given < groups:
        raise UserError(
            f"--micro-batches: {given} leaves some of {groups} workers without work; give at least {groups}, and for"
            f" even shares {MICRO_BATCHES_OF_A_WORKER * groups} or more"
        )
    return MICRO_BATCHES_OF_A_WORKER * groups if given is None else given


def _say_rollout(number: int, turn: RolloutTurn) -> None:
    from octetrl.bench.on_workers import name_of

    arm = f"round {number}  {turn.workload.name}  {turn.precision}, {name_of(turn.workers)}"
    speed = f"{turn.workload.generated_tokens / turn.seconds:,.0f} tokens/s in {turn.seconds:.1f} s"
    typer.echo(f"{arm}: {speed}, up in {turn.startup_seconds:.1f} s")


def _say_train(number: int, turn: ClusterTrainTurn) -> None:
    from octetrl.bench.on_workers import name_of

    arm = f"round {number}  {turn.precision}, {name_of(turn.workers)}"
    seconds = sum(step.train for step in turn.steps)
    speed = f"{turn.work.tokens * len(turn.steps) / seconds:,.0f} tokens/s"
    typer.echo(f"{arm}: {speed}, up in {turn.startup_seconds:.1f} s")

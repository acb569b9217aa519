"""`octetrl bench step --roles N+M`: both roles on each worker, and roles on workers of their own that work at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octetrl.cli.arguments import in_options
from octetrl.cli.bench_cluster import check_codes
from octetrl.cli.bench_options import check_checkpointing, choices, legend_of, make_folder, shown
from octetrl.cli.bench_table import print_table
from octetrl.config.cluster import ClusterConfig, cluster_problems
from octetrl.config.kept_cache import cannot_keep
from octetrl.config.validate_tail import tail_problems
from octetrl.system.errors import UserError

if TYPE_CHECKING:
    from octetrl.bench.roles import RolesArm, RolesBench, RolesTurn
    from octetrl.bench.step import StepBench

MOST_STALENESS = 64  # of a recipe
IN_FLIGHT = ("off", "recompute_cache", "keep_cache")
ROLES = re.compile(r"([1-9][0-9]{0,4})\+([1-9][0-9]{0,4})")
COLUMNS = {  # key of a row: heading, format
    "time/step": ("step\ns", ",.2f"),
    "step/speedup_over_both": ("over\nboth", ".2f"),
    "step/tokens_per_second": ("tokens/s", ",.0f"),
    "step/samples_per_second": ("samples/s", ",.2f"),
    "time/rollout": ("generate\ns", ",.2f"),
    "time/capture": ("capture\ns", ",.2f"),
    "time/train": ("train\ns", ",.2f"),
    "step/wait_for_batch_share": ("training\nwaits", ".1%"),
    "step/wait_for_weights_share": ("generating\nwaits", ".1%"),
    "train/beside_tail_share": ("beside\ntail", ".1%"),
    "time/publish": ("publish\ns", ",.3f"),
    "time/publish_pause": ("pause\ns", ",.3f"),
    "time/receive_weights": ("transfer\ns", ",.3f"),
    "publish/sent_gb_per_second": ("GB/s", ",.1f"),
    "rollout/staleness": ("staleness", ".2f"),
    "mismatch/age_0/max_abs_diff": ("largest\ndifference", ".2e"),
    "memory/peak_gb": ("peak\nGB", ".1f"),
    "time/startup": ("start\ns", ".1f"),
}
LEGEND = (  # key of a column, or nothing, and what it means
    (
        "",
        "step: mean time from the end of a step to the end of the next. both: every worker samples and trains. N+M: N"
        " workers train and M generate.",
    ),
    ("time/train", "generate, train: the time of each; of N+M they overlap."),
    ("time/capture", "capture: CUDA graphs of new batch sizes, a part of generate."),
    (
        "step/wait_for_batch_share",
        "training waits, generating waits: share of the step in which one side waits for the other.",
    ),
    ("train/beside_tail_share", "beside tail: share of the tokens trained on before the last answer ended."),
    ("time/publish", "publish: new weights on the workers that train."),
    ("time/publish_pause", "pause: nothing is generated, because the engines take new weights."),
    ("time/receive_weights", "transfer: new weights to the workers that generate, and its speed."),
    ("rollout/staleness", "staleness: mean age of a token in versions."),
    (
        "mismatch/age_0/max_abs_diff",
        "largest difference: of log-probs, engine to trainer, of tokens that the trainer's own weights sampled, in all"
        " steps.",
    ),
    ("memory/peak_gb", "peak: of the worker with the largest."),
    ("time/startup", "start: until the first timed step, those before it included."),
)
CAPTURES = "compare with more --steps"

Roles = Annotated[
    str | None,
    typer.Option(
        metavar="N+M",
        help="With --gpus or --cpus: compare both roles on each worker with N that train and M that generate.",
    ),
]
MaxStaleness = Annotated[
    int | None,
    typer.Option(min=0, max=MOST_STALENESS, help="With --roles: the recipe's cluster.max_staleness. Default: 1."),
]
WeightsInFlight = Annotated[
    str | None,
    typer.Option(
        metavar=",".join(IN_FLIGHT),
        help="With --roles: kinds of the recipe's cluster.weights_in_flight to compare. Default: off.",
    ),
]


def arms_of(
    roles: str | None,
    max_staleness: int | None,
    in_flight: str | None,
    *,
    cluster: ClusterConfig | None,
    workers: str | None,
    beside_tail: bool,
) -> tuple[RolesArm, ...] | None:
    """What to compare; None without `--roles`. Raises UserError."""
    if roles is None:
        for option, value in (("--max-staleness", max_staleness), ("--weights-in-flight", in_flight)):
            if value is not None:
                raise UserError(f"{option}: it is for roles on workers of their own; add --roles N+M, or leave it out")
        return None
    if cluster is None:
        raise UserError("--roles: it is for workers on Ray; add --gpus N or --cpus N, or leave it out")
    if workers is not None:
        raise UserError("--workers: --roles compares arms that use all workers; leave one of the two out")
    trainers, engines = _roles_of(roles, cluster)
    from octetrl.bench.roles import RolesArm

    versions = 1 if max_staleness is None else max_staleness
    kinds: Any = choices("--weights-in-flight", "off" if in_flight is None else in_flight, IN_FLIGHT)
    if not versions and kinds != ("off",):
        raise UserError(
            "--weights-in-flight: it needs batches that are generated ahead; give --max-staleness 1 or more"
        )
    tail = [RolesArm(beside_tail=True)] if beside_tail else []
    return (RolesArm(), *tail, *(RolesArm((trainers, engines), False, versions, kind) for kind in kinds))


def _roles_of(text: str, cluster: ClusterConfig) -> tuple[int, int]:
    found, count = ROLES.fullmatch(text), cluster.num_workers
    option = "--gpus" if cluster.cpus is None else "--cpus"
    if found is None:
        raise UserError(f"--roles: '{text[:20]}' is not N+M, workers that train and workers that generate; write 1+1")
    trainers, engines = int(found[1]), int(found[2])
    if trainers + engines != count:
        raise UserError(
            f"--roles: {text} are {trainers + engines} workers, and {option} is {count}; all arms use the same number"
        )
    return trainers, engines


def measure_roles(step: StepBench, cluster: ClusterConfig, arms: tuple[RolesArm, ...], folder: Path, name: str) -> None:
    """Measure, print and write the file."""
    from octetrl.bench.fair_times import capture_warnings, drain_warnings
    from octetrl.bench.on_workers import connected
    from octetrl.bench.roles import RolesBench, digest_warnings, measure
    from octetrl.bench.roles_memory import check_memory
    from octetrl.bench.roles_rows import rows_of
    from octetrl.telemetry.bench_record import write_result

    plan = RolesBench(step, cluster, arms)
    check_arms(plan)
    check_checkpointing(step.trainer, step.model)
    check_memory(plan)
    make_folder(folder)  # now, so that minutes of measuring are not lost
    with connected(cluster):
        turns = measure(plan, _say)
    rows = rows_of(plan, turns)
    columns, names = shown(COLUMNS, rows), ("precision", "arm")
    title = (
        f"steps in a row, {step.model.name} on {cluster.num_workers} {step.device.type} workers, {step.workload.name}"
    )
    print_table(title, names, columns, rows, legend_of(LEGEND, columns))
    for line in (*capture_warnings(rows, names, CAPTURES), *drain_warnings(rows), *digest_warnings(turns)):
        typer.echo(line, err=True)
    typer.echo(f"wrote {write_result('step', name, rows, folder)}")


def check_arms(plan: RolesBench) -> None:
    """Raise UserError if a run would refuse an arm, or if two of them were the same."""
    from octetrl.fp8.policy import precision_policy

    for arm in plan.arms:
        for precision in plan.step.precisions:
            recipe = plan.recipe(precision, arm)
            for problem in (*tail_problems(recipe), *cluster_problems(recipe.cluster)):
                raise UserError(in_options(problem.text))
            if cannot_keep(recipe.cluster, precision_policy(plan.model.spec, recipe.fp8).kv_mode) is not None:
                raise UserError(
                    f"--weights-in-flight: {precision} has a calibrated KV cache, which keep_cache recomputes; use"
                    " recompute_cache"
                )
    check_codes(
        [max(arm.roles[0] if arm.roles else plan.cluster.num_workers for arm in plan.arms)],
        plan.cluster,
        plan.step.trainer,
    )


def _say(number: int, turn: RolesTurn) -> None:
    steps = ", ".join(f"{seconds:.2f}" for seconds in turn.seconds)
    arm = f"round {number}  {turn.precision}, {turn.arm.name}"
    typer.echo(f"{arm}: steps of {steps} s, after {turn.startup_seconds:.1f} s")

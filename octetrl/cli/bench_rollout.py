"""`octetrl bench rollout`: generation speed under several precisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octetrl.bench.workload import (
    Shape,
    Workload,
    check_positions,
    check_size,
    fixed_lengths,
    lognormal_lengths,
    recorded_lengths,
)
from octetrl.cli.arguments import Address, Cpus, Device, Gpus
from octetrl.cli.bench_cluster import TensorParallel, Workers, cluster_of, device_name, result_name
from octetrl.cli.bench_on_workers import make_folder_for, measure_rollout
from octetrl.cli.bench_options import (
    KVFraction,
    Layers,
    MaxBatch,
    Model,
    Name,
    Out,
    PrecisionList,
    PrefillChunk,
    Rounds,
    Seed,
    Sigma,
    device_of,
    legend_of,
    model_of,
    precisions_of,
    result_suffix,
    results_folder,
)
from octetrl.cli.bench_rollout_columns import COLUMNS, DRAFT_COLUMNS, DRAFT_LEGEND, LEGEND
from octetrl.cli.bench_table import WIDTH, filled, print_table
from octetrl.cli.bench_vllm import OURS, WARMUP_TOKENS, Backend, Warmup, backends_of, measure_backends
from octetrl.config.speculation import SpeculationConfig
from octetrl.system.errors import UserError

if TYPE_CHECKING:
    from octetrl.bench.model import BenchModel
    from octetrl.bench.rollout import Bench, Turn
    from octetrl.bench.turns import Row

ON_GPU, ON_CPU = (Shape(128, 512, 4096), Shape(256, 512, 1024)), (Shape(8, 16, 32),)  # of the first, what is not given
DRAWN = ("fixed", "lognormal")  # --lengths; anything else is a file
KERNELS_SHOWN = 20
SMALLER = "lower --requests or --prompt, or give a smaller --workload"

Requests = Annotated[
    int | None, typer.Option(min=1, help="Number of completions, including all siblings. Default: 128; on a CPU 8.")
]
Prompt = Annotated[int | None, typer.Option(min=1, help="Tokens of a prompt. Default: 512; on a CPU 16.")]
Answer = Annotated[int | None, typer.Option(min=1, help="Tokens of an answer, or the mean. Default: 4096; CPU 32.")]
Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        help="REQUESTSxPROMPT+ANSWER instead of those three; may be given several times. Default:"
        " 128x512+4096 and 256x512+1024; on a CPU 8x16+32.",
    ),
]
Lengths = Annotated[
    str,
    typer.Option(
        metavar="fixed|lognormal|FILE.jsonl",
        help="Lengths of the answers. A run's rollouts/step_NNNNNN.jsonl sets the prompt lengths too.",
    ),
]
Separate = Annotated[
    bool,
    typer.Option(
        "--separate-siblings",
        help="For unequal lengths: each sibling is a request of its own, and its prompt is prefilled for each sibling."
        " Without it siblings share their prompt, as in a run.",
    ),
]
GroupSize = Annotated[int | None, typer.Option(min=1, help="Siblings that share a prompt. Default: 8; on a CPU 4.")]
Hints = Annotated[
    bool,
    typer.Option(
        "--hints",
        help="For unequal lengths: each request carries the mean length of its group's answers, as a run knows it"
        " from earlier rollouts of the task. The longest start first.",
    ),
]
Drafts = Annotated[
    str | None,
    typer.Option(
        metavar="ngram|RATE,...",
        help="Measure speculation instead: without drafts, with n-gram drafts, or with drafts of which each is right at"
        " this rate (0 to 1) if those before it are. Every answer is compared with the one without drafts.",
    ),
]
DraftTokens = Annotated[int, typer.Option(min=1, max=16, help="Most drafts of a sequence in a forward.")]
AlwaysDraft = Annotated[
    bool,
    typer.Option("--always-draft", help="With --drafts: draft in every forward, and not only where drafts pay."),
]
Profile = Annotated[bool, typer.Option("--profile", help="Also time every kernel of a decode step, on a GPU.")]


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options that define a workload."""

    shapes: Sequence[Shape]
    requests: int | None  # as given: how many rollouts of a file; None: all
    lengths: str
    sigma: float
    group_size: int
    seed: int
    remedy: str  # where a shape is too long for the model
    hints: bool
    separate: bool  # siblings

    def finish(self, workload: Workload) -> Workload:
        workload = workload.separate() if self.separate else workload
        return workload.hinted() if self.hints else workload


def rollout(
    model: Model = None,
    precision: PrecisionList = "bf16,fp8_rollout,fp8_full",
    requests: Requests = None,
    prompt: Prompt = None,
    answer: Answer = None,
    workload: Workloads = None,
    lengths: Lengths = "fixed",
    sigma: Sigma = None,
    group_size: GroupSize = None,
    rounds: Rounds = 1,
    warmup: Warmup = None,
    max_batch: MaxBatch = 256,
    kv_fraction: KVFraction = 0.8,
    prefill_chunk: PrefillChunk = None,
    layers: Layers = None,
    hints: Hints = False,
    separate_siblings: Separate = False,
    drafts: Drafts = None,
    draft_tokens: DraftTokens = 8,
    always_draft: AlwaysDraft = False,
    profile: Profile = False,
    backend: Backend = OURS,
    name: Name = None,
    out: Out = None,
    device: Device = "auto",
    seed: Seed = 0,
    gpus: Gpus = None,
    cpus: Cpus = None,
    address: Address = None,
    workers: Workers = None,
    tensor_parallel: TensorParallel = 1,
) -> None:
    """Measure generation speed under several precisions, and compare it with a memory-bandwidth model."""
    alone = {"--profile": profile, "--drafts": drafts is not None}
    cluster = cluster_of(gpus, cpus, address, "local", workers, tensor_parallel, refused=alone)
    precisions, folder = precisions_of(precision), results_folder(out)
    kinds = _draft_kinds(drafts, refused=profile or rounds > 1)
    drafted = (kinds, _draft_settings(kinds, draft_tokens, max_batch if always_draft else None))
    _check_shape(workload, (requests, prompt, answer))
    _check_lengths(lengths, sigma, (hints, separate_siblings), (workload, prompt, answer, group_size))
    shapes, suffix = _shapes(workload or ()), result_suffix(name)
    from octetrl.bench.rollout import Bench

    on_gpu = (chosen := device_of(device_name(cluster, device), cluster)).type == "cuda"
    if profile and not on_gpu:
        raise UserError("--profile: it times kernels on a GPU, and this would run on a CPU; leave it out")
    only_ours = any((profile, kinds, prefill_chunk, cluster))
    backends = backends_of(backend, on_gpu=on_gpu, refused=only_ours, warmup=warmup, hints=hints)
    found = model_of(model, layers, on_gpu=on_gpu)
    remedy = "give a shorter --workload" if shapes else "shorten --prompt or --answer"
    shapes = shapes or _usual_shapes(ON_GPU if on_gpu else ON_CPU, requests, prompt, answer)
    siblings, spread = group_size or (8 if on_gpu else 4), 0.7 if sigma is None else sigma
    asked = _Asked(shapes, requests, lengths, spread, siblings, seed, remedy, hints, separate_siblings)
    plan = Bench(
        model=found,
        precisions=precisions,
        workloads=tuple(_workloads(asked, found)),
        device=chosen,
        rounds=rounds,
        warmup_tokens=WARMUP_TOKENS if warmup is None else warmup,
        max_batch=max_batch,
        kv_fraction=kv_fraction,
        seed=seed,
        prefill_chunk=prefill_chunk,
    )
    if cluster is not None:
        return measure_rollout(plan, cluster, workers, folder, f"{found.name}_{result_name(cluster)}{suffix}")
    make_folder_for(plan, folder)  # now, so that minutes of measuring are not lost
    if backends != (OURS,):
        return measure_backends(plan, backends, folder, found.name + suffix)
    _measure(plan, folder, found.name + suffix, profile, drafted)


def _draft_kinds(text: str | None, *, refused: bool) -> list[str]:
    if text is not None and refused:
        raise UserError("--drafts: it measures one round and no profile; leave the other options out")
    kinds = [] if text is None else [kind.strip() for kind in text.split(",")]
    for kind in kinds:
        try:
            is_known = kind == "ngram" or 0 <= float(kind) <= 1
        except ValueError:
            is_known = False
        if not is_known:
            raise UserError(f"--drafts: '{kind}' is neither 'ngram' nor a rate from 0 to 1; give --drafts ngram,0.6")
    return kinds


def _draft_settings(kinds: Sequence[str], draft_tokens: int, always_up_to: int | None) -> SpeculationConfig:
    if always_up_to is None:
        return SpeculationConfig(max_draft_tokens=draft_tokens)
    if not kinds:
        raise UserError("--always-draft: it measures nothing without drafts; add --drafts, for example --drafts 0.6")
    return SpeculationConfig(max_draft_tokens=draft_tokens, min_gain=0.0, max_sequences=always_up_to)


def _measure_drafts(plan: Bench, folder: Path, name: str, kinds: Sequence[str], settings: SpeculationConfig) -> None:
    from octetrl.bench.speculation import measure_speculation
    from octetrl.telemetry.bench_record import write_result

    rows = measure_speculation(plan, kinds, settings, typer.echo)
    title = f"speculation, {plan.model.name} on {plan.device.type}"
    print_table(title, ["precision", "workload", "rollout/drafts"], DRAFT_COLUMNS, rows, DRAFT_LEGEND)
    typer.echo(f"wrote {write_result('speculation', name, rows, folder)}")
    unequal = sum(int(row["rollout/unequal_answers"]) for row in rows)
    if unequal:
        raise RuntimeError(f"{unequal} answers differ from those without drafts; `octetrl doctor` finds the op")


def _measure(
    plan: Bench, folder: Path, name: str, profile: bool, drafts: tuple[Sequence[str], SpeculationConfig]
) -> None:
    if drafts[0]:
        _measure_drafts(plan, folder, name, *drafts)
        return
    from octetrl.bench.rollout import measure, rows_of
    from octetrl.telemetry.bench_record import write_result

    rows = rows_of(measure(plan, _say))
    title = f"rollout, {plan.model.name} on {plan.device.type}"
    names, columns = ["precision", "workload"], filled(COLUMNS, rows)
    print_table(title, names, columns, rows, legend_of(LEGEND, columns))
    path = write_result("rollout", name, rows, folder)  # before the profile, which might fail
    if profile:
        from octetrl.bench.profile import profile_rows

        kernels = profile_rows(plan, typer.echo)
        _print_kernels(kernels)
        write_result("rollout", name, rows, folder, kernels=kernels)
    typer.echo(f"wrote {path}")


def _check_shape(workload: Sequence[str] | None, shape: tuple[int | None, int | None, int | None]) -> None:
    if workload and shape != (None, None, None):
        raise UserError("--workload: it replaces --requests, --prompt and --answer; give either it or them")


def _check_lengths(lengths: str, sigma: float | None, unequal: tuple[bool, bool], shape: tuple[object, ...]) -> None:
    """`unequal`: `--hints` and `--separate-siblings`, which are for unequal lengths. `shape`: options that a file of
    rollouts replaces."""
    hints, separate = unequal
    if sigma is not None and lengths != "lognormal":
        raise UserError(f"--sigma: {sigma} spreads drawn lengths and --lengths is '{lengths}'; add --lengths lognormal")
    if lengths not in DRAWN and any(given is not None for given in shape):
        raise UserError(
            f"--lengths: '{lengths}' says how long prompts and answers are and who shares a prompt; give with it"
            " --requests alone"
        )
    if hints and lengths == "fixed":
        raise UserError(
            "--hints: all answers have one length, so the order does not matter; add --lengths lognormal or a file"
        )
    if separate and lengths == "fixed":
        raise UserError(
            "--separate-siblings: siblings of one length are always one request; add --lengths lognormal or a file"
        )


def _shapes(texts: Sequence[str]) -> list[Shape]:
    """The shapes of `--workload`. Raises UserError if one is given twice."""
    shapes = [Shape.parse(text) for text in texts]
    again = next((shape for shape in shapes if shapes.count(shape) > 1), None)
    if again is not None:
        raise UserError(f"--workload: '{again}' is given twice; repeat all of them with --rounds")
    return shapes


def _usual_shapes(usual: Sequence[Shape], requests: int | None, prompt: int | None, answer: int | None) -> list[Shape]:
    if (requests, prompt, answer) == (None, None, None):
        return list(usual)
    first = usual[0]
    return [Shape(requests or first.requests, prompt or first.prompt, answer or first.answer)]


def _workloads(asked: _Asked, model: BenchModel) -> Iterator[Workload]:
    vocab_size, positions = model.spec.vocab_size, model.spec.max_positions
    if asked.lengths not in DRAWN:
        found = recorded_lengths(Path(asked.lengths), asked.requests, vocab_size, asked.seed)
        remedy = f"'{asked.lengths}' says so: give another step's file, or a model with more positions"
        check_positions(found.longest, positions, model.name, remedy)
        yield asked.finish(found)
        return
    for shape in asked.shapes:
        check_positions(shape, positions, model.name, asked.remedy)
        check_size(shape.requests, -(-shape.requests // asked.group_size) * shape.prompt, SMALLER)
        if asked.lengths == "fixed":
            yield fixed_lengths(shape, asked.group_size, vocab_size, asked.seed)
        else:
            drawn = lognormal_lengths(
                shape, asked.group_size, vocab_size, asked.seed, sigma=asked.sigma, max_positions=positions
            )
            yield asked.finish(drawn)


def _say(number: int, turn: Turn) -> None:
    speed = f"{turn.metrics.tokens_per_second:,.0f} tokens/s in {turn.metrics.seconds:.1f} s"
    typer.echo(f"round {number}  {turn.workload.name}  {turn.precision}: {speed}, up in {turn.startup_seconds:.1f} s")


def _print_kernels(kernels: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    by_arm: dict[tuple[object, ...], list[Row]] = {}
    for row in kernels:
        by_arm.setdefault((row["precision"], row["workload"]), []).append(row)
    for (precision, workload), rows in by_arm.items():
        table = Table(title=f"one decode step, {precision}, {workload}")
        table.add_column("kernel", no_wrap=True)
        for heading in ("calls", "us", "share"):
            table.add_column(heading, justify="right")
        shown = [*rows[:-1][:KERNELS_SHOWN], rows[-1]]  # the last is the time between kernels
        for row in shown:
            numbers = [row["calls_per_step"], row["us_per_step"], row["share"]]
            cells = [format(value, form) for value, form in zip(numbers, (".1f", ",.1f", ".1%"), strict=True)]
            table.add_row(str(row["kernel"]), *cells)
        Console(width=WIDTH).print(table)

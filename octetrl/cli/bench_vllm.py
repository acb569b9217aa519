"""`octetrl bench rollout --backend vllm`: vLLM alone, or beside our engine (`--backend octetrl,vllm`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octetrl.cli.bench_table import print_table
from octetrl.config.vllm import why_no_vllm
from octetrl.system.errors import UserError

if TYPE_CHECKING:
    from octetrl.bench.rollout import Bench, Turn
    from octetrl.bench.turns import Row
    from octetrl.bench.vllm import VllmTurn

OURS, VLLM = "octetrl", "vllm"
Backend = Annotated[
    str,
    typer.Option(
        metavar="octetrl|vllm|octetrl,vllm",
        help="vllm: measure vLLM instead, with the same requests. octetrl,vllm: both, each turn in a fresh process.",
    ),
]
WARMUP_TOKENS = 16
Warmup = Annotated[
    int | None,
    typer.Option(
        min=0,
        help=f"Tokens of each answer in an untimed call before the timed one. Default: {WARMUP_TOKENS}. Not for"
        " --backend vllm, which runs its whole workload once before.",
        show_default=False,
    ),
]
COLUMNS = {  # key of a row: heading, format
    "rollout/tokens_per_second": ("tokens/s", ",.0f"),
    "time/rollout": ("s", ",.1f"),
    "rollout/kv_capacity_tokens": ("KV cache\ntokens", ",d"),
    "time/startup": ("start s", ".1f"),
    "time/first_token": ("warm s", ".3f"),
}
LEGEND = (
    "vLLM's fp8: E4M3 linears in 128 x 128 blocks. fp8_kv: an E4M3 cache as well, and attention in FP8. start: from the"
    " start of its engine to the first token, with compiling. warm: the same request again."
)


UNHEEDED = {
    "--warmup": "vLLM runs the whole workload once before it is timed",
    "--hints": "vLLM starts requests in their order",
}


def backends_of(text: str, *, on_gpu: bool, refused: bool, warmup: int | None, hints: bool) -> tuple[str, ...]:
    """The backends to measure. `refused`: options are given that only our engine has. `warmup`, `hints`: those options,
    which have no effect on vLLM. Raises UserError."""
    backends = tuple(word.strip() for word in text.split(","))
    if set(backends) - {OURS, VLLM} or len(set(backends)) < len(backends):
        raise UserError(f"--backend: '{text[:40]}' is not octetrl, vllm or octetrl,vllm; give one of them")
    if backends == (OURS,):
        return backends
    if refused:
        raise UserError(
            "--backend: vLLM has no --profile, --drafts or --prefill-chunk, and runs on one GPU; leave them out"
        )
    given = {"--warmup": warmup is not None, "--hints": hints}
    for option in (name for name, is_given in given.items() if is_given and OURS not in backends):
        raise UserError(f"{option}: it has no effect with --backend {VLLM}: {UNHEEDED[option]}; leave it out")
    if not on_gpu:
        raise UserError("--backend: vLLM needs an NVIDIA GPU, and this would run on a CPU; leave the option out")
    why = why_no_vllm()
    if why is not None:
        raise UserError(why)
    return backends


def measure_backends(plan: Bench, backends: Sequence[str], folder: Path, name: str) -> None:
    """Measure, print and write a file for each backend. The files are written after each turn: turns take minutes."""
    from octetrl.bench.vllm import measure_beside

    taken: list[Turn | VllmTurn] = []

    def on_turn(number: int, turn: Turn | VllmTurn) -> None:
        taken.append(turn)
        _say(number, turn)
        _write(taken, folder, name)

    measure_beside(plan, backends, on_turn)
    ours, theirs = _rows(taken)
    title = f"rollout, {plan.model.name} on {plan.device.type}"
    shown = [*({**row, "rollout/backend": OURS} for row in ours), *theirs]
    print_table(title, ("rollout/backend", "precision", "workload"), COLUMNS, shown, LEGEND)
    for path in _write(taken, folder, name):
        typer.echo(f"wrote {path}")


def _rows(turns: Sequence[Turn | VllmTurn]) -> tuple[list[Row], list[Row]]:
    """Of our engine, and of vLLM."""
    from octetrl.bench.rollout import Turn, rows_of
    from octetrl.bench.vllm import VllmTurn, vllm_rows

    ours = rows_of([turn for turn in turns if isinstance(turn, Turn)])
    return ours, vllm_rows([turn for turn in turns if isinstance(turn, VllmTurn)])


def _write(turns: Sequence[Turn | VllmTurn], folder: Path, name: str) -> list[Path]:
    from octetrl.telemetry.bench_record import write_result

    ours, theirs = _rows(turns)
    found = ("rollout", f"{name}_beside_{VLLM}", ours), (VLLM, name, theirs)
    return [write_result(bench, of, rows, folder) for bench, of, rows in found if rows]


def _say(number: int, turn: Turn | VllmTurn) -> None:
    from octetrl.bench.vllm import VllmTurn, precision_in_vllm

    if isinstance(turn, VllmTurn):
        speed = f"{turn.tokens_per_second:,.0f} tokens/s in {turn.measured.seconds:.1f} s"
        arm, up = f"vLLM {precision_in_vllm(turn.precision)}", turn.measured.startup_seconds
    else:
        speed = f"{turn.metrics.tokens_per_second:,.0f} tokens/s in {turn.metrics.seconds:.1f} s"
        arm, up = turn.precision, turn.startup_seconds
    typer.echo(f"round {number}  {turn.workload.name}  {arm}: {speed}, up in {up:.1f} s")

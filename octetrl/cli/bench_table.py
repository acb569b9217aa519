"""The table that a command of `octetrl bench` prints: a row for each arm and a column for each figure.

If that is wider than the terminal, the table is turned: arms side by side, a figure on each line. If that is too wide
as well, the arms are spread over several such tables. Into a pipe the table goes as it is. A cell is never cut,
because a cut figure is lost.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from octetrl.bench.rows import Row

WIDTH = 150  # of a table without a terminal, at least
MOST = 600  # columns that any table may need
Columns = Mapping[str, tuple[str, str]]  # key of a row: heading, format
NAMES = ("precision", "arm", "workload")
COLUMNS: Mapping[str, Columns] = {
    "rollout": {
        "rollout/tokens_per_second": ("tokens/s", ",.0f"),
        "rollout/speedup_over_bf16": ("to\nbf16", ".2f"),
        "rollout/efficiency": ("effi-\nciency", ".1%"),
        "rollout/over_embedded": ("over em-\nbedded", ".1%"),
        "rollout/step_ms_p50": ("step ms\np50", ".2f"),
        "rollout/step_ms_p99": ("step ms\np99", ".2f"),
        "rollout/floor_tokens_per_second": ("bandw. model\ntokens/s", ",.0f"),
        "rollout/floor_share": ("of bandw.\nmodel", ".1%"),
        "rollout/kv_capacity_tokens": ("KV cache\ntokens", ",d"),
        "rollout/batch_occupancy": ("occupancy", ".1%"),
        "rollout/tail_share": ("tail", ".1%"),
        "rollout/idle_share": ("idle", ".1%"),
        "rollout/preemptions": ("preempted", "d"),
        "time/capture": ("capture\ns", ".2f"),
        "time/startup": ("start s", ".1f"),
        "memory/peak_gb": ("peak GB", ".1f"),
    },
    "train": {
        "train/tokens_per_second": ("tokens/s", ",.0f"),
        "train/speedup_over_bf16": ("to\nbf16", ".2f"),
        "train/efficiency": ("effi-\nciency", ".1%"),
        "train/over_embedded": ("over em-\nbedded", ".1%"),
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
    },
    "step": {
        "time/step": ("step\ns", ",.2f"),
        "step/step_speedup_over_bf16": ("to\nbf16", ".2f"),
        "step/efficiency": ("effi-\nciency", ".1%"),
        "step/over_embedded": ("over em-\nbedded", ".1%"),
        "step/speedup_over_both": ("to\nboth", ".2f"),
        "step/tokens_per_second": ("tokens/s", ",.0f"),
        "time/produce": ("produce\ns", ",.2f"),
        "time/capture": ("capture\ns", ",.2f"),
        "produce/efficiency": ("effi-\nciency", ".1%"),
        "step/produce_speedup_over_bf16": ("to\nbf16", ".2f"),
        "rollout/preemptions": ("pre-\nempted", ",.0f"),
        "time/learn": ("learn\ns", ",.2f"),
        "learn/efficiency": ("effi-\nciency", ".1%"),
        "step/learn_speedup_over_bf16": ("to\nbf16", ".2f"),
        "train/beside_tail_share": ("beside\ntail", ".1%"),
        "step/wait_for_batch_share": ("wait for\nbatch", ".1%"),
        "step/wait_for_weights_share": ("wait for\nweights", ".1%"),
        "step/publish_ms": ("publish\nms", ",.1f"),
        "step/publish_gb_per_second": ("GB/s", ",.1f"),
        "publish/gather_ms": ("gather\nms", ",.1f"),
        "time/publish_pause": ("pause\ns", ",.3f"),
        "rollout/staleness": ("stale-\nness", ".2f"),
        "mismatch/token_mult_prob_error": ("mismatch", ".4f"),
        "mismatch/max_abs_diff": ("largest\ndifference", ".2e"),
        "mismatch/age_0/max_abs_diff": ("of own\nweights", ".2e"),
        "mismatch/tokens": ("of\ntokens", ",.0f"),
        "memory/peak_gb": ("peak\nGB", ".1f"),
        "memory/learn_peak_gb": ("learn\nGB", ".1f"),
        "memory/estimate_gb": ("estimate\nGB", ".1f"),
        "time/startup": ("start\ns", ".1f"),
    },
}
LEGEND = {  # key of a column: what it means
    "rollout/floor_share": "bandw. model: decoding at 4.3 TB/s (H200). A step reads the weights of linears and lm_head"
    " once (of a mixture, the experts that have a row), and the live keys and values once for each sequence. It is no"
    " lower bound: L2 serves some reads of a shared prompt. of bandw. model: the model's time as a share of the"
    " measured one.",
    "rollout/tail_share": "tail: share of the decode time with less than half of the batch running.",
    "rollout/idle_share": "idle: share of the time in which a worker has no request left.",
    "train/tokens_per_second": "tokens/s: of forward and backward, of the median step; whole: with update and"
    " quantisation. TFLOP/s: the model's own, 6 x weights of linears x tokens (of a mixture, the chosen experts'),"
    " lm_head for trained tokens, causal attention 3.5 x its forward; recomputation is not counted.",
    "train/ceiling_share": "of 790: share of the TFLOP/s of a large BF16 GEMM on an H200.",
    "time/produce": "produce: generation, samples with random rewards, packing. learn: forward, backward, update, KV"
    " scales.",
    "time/capture": "capture: CUDA graphs of new batch sizes, a part of generation; a run captures them in each step.",
    "step/publish_ms": "publish: new weights on all workers, and the engines' check of them.",
    "step/publish_gb_per_second": "GB/s: of codes, or of what a worker receives.",
    "train/beside_tail_share": "beside tail: share of the tokens trained on before the last answer ended.",
    "mismatch/token_mult_prob_error": "mismatch: mean exp|engine - trainer| of log-probs, 1 if they are equal; then the"
    " largest difference, that of tokens which the trainer's own weights sampled, and the number of tokens.",
    "memory/learn_peak_gb": "learn: memory of learning, the KV cache freed.",
    "memory/estimate_gb": "estimate: a worker's training without the KV cache, by `octetrl check`.",
    "step/efficiency": "efficiency: speed of each worker compared with one worker on Ray. over embedded: time on one"
    " worker on Ray beyond that of the embedded one.",
    "time/startup": "start: until the first timed step, those before it included.",
}


def print_rows(verb: str, title: str, rows: Sequence[Row]) -> None:
    """The table of a verb's rows, with the columns that some row has a figure for, and their meaning."""
    columns = {key: shown for key, shown in COLUMNS[verb].items() if any(key in row for row in rows)}
    names = [name for name in NAMES if name == "precision" or len({row[name] for row in rows}) > 1]
    print_table(title, names, columns, rows, " ".join(text for key, text in LEGEND.items() if key in columns))


def print_table(
    title: str,
    names: Sequence[str],
    columns: Mapping[str, tuple[str, str]],
    rows: Sequence[Row],
    legend: str | None = None,
) -> None:
    """`names`: keys of the text columns; `columns`: key of a row -> heading and format. A missing figure is `-`."""
    from rich.console import Console

    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for table, needed in fitting(room, title, names, columns, rows):
        Console(width=max(needed, WIDTH if room is None else 1)).print(table)
    if legend:
        Console(width=room or max(needed, WIDTH)).print(legend, style="italic", highlight=False, markup=False)


def fitting(
    room: int | None,
    title: str,
    names: Sequence[str],
    columns: Mapping[str, tuple[str, str]],
    rows: Sequence[Row],
) -> list[tuple[Table, int]]:
    """The tables for a terminal of `room` columns, and how many each takes. None: no terminal."""
    from rich.console import Console

    measure = Console(width=MOST).measure
    table = _with_rows(title, names, columns, rows)
    needed = measure(table).maximum
    if room is None or needed <= room:
        return [(table, needed)]
    for each in range(len(rows), 0, -1):  # arms of a table
        parts = [_turned(title, names, columns, rows[start : start + each]) for start in range(0, len(rows), each)]
        widths = [measure(part).maximum for part in parts]
        if max(widths) <= room or (each == 1 and max(widths) < needed):
            return list(zip(parts, widths, strict=True))
    return [(table, needed)]


def _with_rows(title: str, names: Sequence[str], columns: Mapping[str, tuple[str, str]], rows: Sequence[Row]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for name in names:
        table.add_column(_short(name), no_wrap=True)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *[str(row[name]) for name in names], *[_cell(row, key, form) for key, (_, form) in columns.items()]
        )
    return table


def _turned(title: str, names: Sequence[str], columns: Mapping[str, tuple[str, str]], rows: Sequence[Row]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column("\n".join(map(_short, names)), no_wrap=True)
    for row in rows:
        table.add_column("\n".join(str(row[name]) for name in names), justify="right", no_wrap=True)
    for key, (heading, form) in columns.items():
        table.add_row(heading.replace("\n", " "), *[_cell(row, key, form) for row in rows])
    return table


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _cell(row: Row, key: str, form: str) -> str:
    return format(row[key], form) if key in row else "-"

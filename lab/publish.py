"""What publishing new weights costs a worker beside the exchange: quantising, transposing codes, and the digest.

    python -m lab.publish [--model qwen3-8b] [--out FOLDER]

One GPU, random weights, `fp8_full`. Codes are written by few launches for all weights (layers/many_linears.py), and
`separate` by a launch for each, to the same bytes. The sums of the digest are those of plain torch (one tensor of each
shape) and those of each tensor alone.

    quantise            the weights' codes and scales
    quantise half       the rows of one of two workers
    requantise          codes, transposed codes, scales and the check for values that are not finite: one worker
    transpose           transposed codes of codes that others wrote
    sums of the digest  of codes, scales and all other parameters
    engine              takes the weights of several workers and reads them back, digest included

Milliseconds are medians. `host_ms` ends when the call returns, and `ms` when the GPU has finished. GB/s counts the
bytes that a part must read and write.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lab.record import RESULTS, Row, need_hopper, write_result
from octetrl.bench.model import draw_on_device, find_model
from octetrl.config.load import PRECISIONS
from octetrl.config.schema import Fp8Config
from octetrl.engine.weights import digest_of, put_weights, share_weights, weight_set, weights_digest
from octetrl.fp8.backends import choose_backend
from octetrl.fp8.policy import precision_policy
from octetrl.kernels.quantize.quantize_weight import check_scales
from octetrl.kernels.rows.sum_words import sum_words, sum_words_reference
from octetrl.layers import many_linears, weight_memory
from octetrl.layers.linear import Float8Linear
from octetrl.layers.many_linears import LinearRows
from octetrl.models.decoder import Decoder

REPEATS = 9


@dataclass(frozen=True)
class Case:
    """One part of publishing. `result` reads what it wrote; `separate`: the same by a launch for each weight."""

    op: str
    together: Callable[[], object]
    separate: Callable[[], object] | None
    result: Callable[[], object]
    clear: Callable[[], None]  # of what it writes
    moved: int  # bytes


def build(model: str, device: torch.device) -> tuple[Decoder, Decoder]:
    """The trainer's model, whose codes are transposed already, and the engine's, which shares its memory."""
    source = find_model(model)
    policy = precision_policy(source.spec, Fp8Config(**PRECISIONS["fp8_full"]))
    trainer = Decoder(source.spec, policy, "train", device=device, backend=choose_backend(device, None))
    draw_on_device(trainer, 0)
    trainer.requantize()
    for _, linear in trainer.float8_linears():
        linear.codes_transposed = linear.codes.t().contiguous()
    engine = Decoder(source.spec, policy, "rollout", device="meta", backend=trainer.backend)
    share_weights(engine, trainer)
    return trainer, engine


def cases(trainer: Decoder, engine: Decoder) -> Iterator[Case]:
    linears = {f"{name}.weight": linear for name, linear in trainer.float8_linears()}
    elements = sum(linear.codes.numel() for linear in linears.values())
    for op, share in (("quantise", 1), ("quantise half", 2)):
        parts = {name: _rows(linear, share) for name, linear in linears.items()}
        moved = 3 * sum(part.rows_RK.numel() for part in parts.values())
        yield _written(op, linears, partial(many_linears.quantize_rows, parts), partial(_each, parts), moved)
    yield _written(
        "requantise",
        linears,
        lambda: many_linears.requantize(linears),
        lambda: _requantize_each(linears),
        4 * elements,
    )
    yield _written(
        "transpose",
        linears,
        lambda: many_linears.adopt_codes(linears.values()),
        lambda: [linear.adopt_codes() for linear in linears.values()],
        2 * elements,
        keeps_codes=True,
    )
    read = read_by(engine)
    sums: list[Tensor] = []
    yield Case(
        "sums of the digest",
        lambda: sums.append(sum_words(read)),
        None,
        lambda: sums[-1].tolist(),
        sums.clear,
        sum(tensor.nbytes for tensor in read),
    )
    weights = weight_set(trainer, 1)
    others = {name: tensor for name, tensor in weights.tensors.items() if name not in linears}
    shared = replace(weights, tensors=others)  # as several workers have them: FP8 weights are codes alone

    def take() -> str:
        weight_set(trainer, 1)
        put_weights(engine, shared)
        return weights_digest(engine, shared, covers_all=True)

    yield Case("engine", take, None, take, lambda: None, sum(tensor.nbytes for tensor in read))


def read_by(engine: Decoder) -> list[Tensor]:
    """What the digest of several workers covers."""
    codes = [tensor for _, linear in engine.float8_linears() for tensor in linear.quantized]
    return [*codes, *(parameter.detach() for parameter in engine.parameters())]


def _rows(linear: Float8Linear, share: int) -> LinearRows:
    assert linear.weight is not None
    unit = weight_memory.rows_per_unit(linear)
    return LinearRows(linear, 0, linear.weight.detach()[: linear.weight.shape[0] // unit // share * unit])


def _each(parts: Mapping[str, LinearRows]) -> None:
    for name, part in parts.items():
        weight_memory.quantize_rows(*part, name)


def _requantize_each(linears: Mapping[str, Float8Linear]) -> None:
    for name, linear in linears.items():
        linear.requantize(name, check=False)
    check_scales({name: (one.weight.detach(), one.scale) for name, one in linears.items() if one.weight is not None})


def _written(
    op: str,
    linears: Mapping[str, Float8Linear],
    together: Callable[[], object],
    separate: Callable[[], object],
    moved: int,
    *,
    keeps_codes: bool = False,
) -> Case:
    """A case that writes codes, scales and transposed codes."""
    held = [[one.codes, one.scale] for one in linears.values()]
    turned = [one.codes_transposed for one in linears.values() if one.codes_transposed is not None]
    written = turned if keeps_codes else [*(tensor for pair in held for tensor in pair), *turned]

    def clear() -> None:
        for tensor in written:
            tensor.view(torch.uint8).fill_(0xFF)

    def result() -> str:
        return digest_of(0, [*(tensor for pair in held for tensor in pair), *turned])

    return Case(op, together, separate, result, clear, moved)


def times(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """(ms until the device has finished, ms until the call returns): medians."""
    walls, hosts = [], []
    for _ in range(REPEATS):
        _finish(device)
        began = time.perf_counter()
        call()
        hosts.append(time.perf_counter() - began)
        _finish(device)
        walls.append(time.perf_counter() - began)
    return 1e3 * statistics.median(walls), 1e3 * statistics.median(hosts)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(case: Case, workload: str, device: torch.device) -> Row:
    """Compares the results first. Clears what is written before each, so that nothing left over can be equal."""
    results = []
    for call in (case.together, case.separate or case.together):
        case.clear()
        call()
        results.append(case.result())
    assert results[0] == results[1], f"{case.op}: the results differ"
    ms, host_ms = times(case.together, device)
    row: dict[str, object] = {"op": case.op, "precision": "fp8_full", "workload": workload, "ms": ms}
    row |= {"host_ms": host_ms, "gb_per_s": case.moved / ms / 1e6}
    if case.separate is not None:
        row["separate_ms"], row["separate_host_ms"] = times(case.separate, device)
    return row


def check_sums(engine: Decoder) -> None:
    """The sums of one tensor of each shape are those of plain torch, and those of all are each tensor's own."""
    read = read_by(engine)
    alike = list({(one.shape, one.dtype): one for one in read}.values())
    sums = sum_words(alike)
    assert torch.equal(sums, sum_words_reference(alike, torch.zeros_like(sums))), "sums differ from plain torch's"
    assert torch.equal(sum_words(read), torch.cat([sum_words([tensor]) for tensor in read])), "sums of all differ"


def bench(model: str, device: torch.device) -> list[Row]:
    trainer, engine = build(model, device)
    check_sums(engine)
    return [measure(case, model, device) for case in cases(trainer, engine)]


def show(rows: list[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, title="publishing without the exchange")
    for row in rows:
        cells = [row.get(name, "") for name in columns]
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    need_hopper("publish")
    rows = bench(arguments.model, torch.device("cuda"))
    show(rows)
    print(f"wrote {write_result('publish', arguments.model, rows, arguments.out)}")


if __name__ == "__main__":
    main()

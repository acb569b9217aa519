"""The optimizer's update: first its numbers against the reference, then its time, by format of states and master.

    python -m lab.kernels.adamw [--out FOLDER]

Numbers: a ragged tensor, a few steps; the largest share of codes that differ by more than one (the GPU's root and
quotient may turn a last bit, and so now and then a code), and the master's largest relative difference. Two runs must
be equal to the bit. Time: tensors of 2^26 elements, so many that nothing stays in L2; bytes are those that an update
must read and write. `torch fused` is torch's own AdamW in float32, with the copy into the BF16 weight that it needs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from triton.testing import do_bench

from lab.record import RESULTS, write_result
from octetrl.bench.hardware import MEMORY_BYTES_PER_SECOND
from octetrl.kernels.optimizer.adamw import AdamScalars, Moment, adamw, adamw_reference
from octetrl.trainer.optimizer_states import StateFormat, zero_moment

ELEMENTS = 1 << 26
FORMATS: tuple[StateFormat, ...] = ("float32", "bfloat16", "8bit")
STATE_BYTES = {"float32": 16.0, "bfloat16": 8.0, "8bit": 4 + 4 / 128}  # read and written, both moments


@dataclass(frozen=True)
class Tensors:
    weight: Tensor
    master: Tensor | None
    exp_avg: Moment
    exp_avg_sq: Moment

    def flat(self) -> list[Tensor]:
        every = (self.weight, self.master, *self.exp_avg, *self.exp_avg_sq)
        return [tensor for tensor in every if tensor is not None]


def tensors(count: int, states: StateFormat, own_master: bool, device: str) -> Tensors:
    weight = torch.randn(count, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    moments = zero_moment(weight, states, None), zero_moment(weight, states, None)
    return Tensors(weight, weight.float() if own_master else None, *moments)


def run(states: StateFormat, own_master: bool, device: str, steps: int = 5, count: int = 1_000_003) -> list[Tensor]:
    own = tensors(count, states, own_master, device)
    update = adamw if device == "cuda" else adamw_reference
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        size = 10 ** torch.randn(count, generator=generator)
        gradient = (torch.randn(count, generator=generator) * size).to(device)
        scalars = AdamScalars(1e-3, 0.9, 0.95, 1e-8, 0.1, step)
        clip = torch.tensor(0.5, device=device)
        update(own.weight, own.master, gradient, own.exp_avg, own.exp_avg_sq, clip, scalars, key=1000 + step)
    return [tensor.cpu() for tensor in own.flat()]


def check_numbers() -> bool:
    fine = True
    for states in FORMATS:
        for own_master in (True, False):
            ours, again, theirs = (
                run(states, own_master, "cuda"),
                run(states, own_master, "cuda"),
                run(states, own_master, "cpu"),
            )
            repeats = all(torch.equal(one, other) for one, other in zip(ours, again, strict=True))
            differing = 0.0
            for one, other in zip(ours, theirs, strict=True):
                if one.dtype == torch.uint8:
                    off = (one.int() - other.int()).abs() > 1
                else:
                    wide = one.float(), other.float()
                    tolerance = 2**-7 if one.dtype == torch.bfloat16 else 1e-5
                    off = (wide[0] - wide[1]).abs() > tolerance * wide[1].abs() + 1e-9
                differing = max(differing, off.float().mean().item())
            passed = repeats and differing < 1e-5
            fine &= passed
            print(
                f"{'OK' if passed else 'FAIL'} {states}, master {own_master}: {differing:.1e} differ, repeats {repeats}"
            )
    return fine


def timings() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    gradient = torch.randn(ELEMENTS, device="cuda")
    clip = torch.ones((), device="cuda")
    for states in FORMATS:
        for own_master in (True, False):
            own = tensors(ELEMENTS, states, own_master, "cuda")
            scalars = AdamScalars(1e-6, 0.9, 0.95, 1e-8, 0.0, 10)

            def update(own: Tensors = own, scalars: AdamScalars = scalars) -> None:
                adamw(own.weight, own.master, gradient, own.exp_avg, own.exp_avg_sq, clip, scalars, key=1)

            each = 4 + STATE_BYTES[states] + (10 if own_master else 4)
            rows.append(row(f"{states}{', master' if own_master else ', by chance'}", each, do_bench(update)))
    weight = torch.randn(ELEMENTS, device="cuda").bfloat16()
    master, first, second = weight.float(), torch.zeros_like(gradient), torch.zeros_like(gradient)
    steps = [torch.ones((), device="cuda")]

    def torch_update() -> None:
        torch_adamw(
            [master], [gradient], [first], [second], [], steps, fused=True, amsgrad=False, beta1=0.9, beta2=0.95,
            lr=1e-6, weight_decay=0.0, eps=1e-8, maximize=False,
        )  # fmt: skip
        weight.copy_(master)

    rows.append(row("torch fused, master", 34, do_bench(torch_update)))
    return rows


def row(name: str, bytes_each: float, milliseconds: float) -> dict[str, object]:
    rate = ELEMENTS * bytes_each / milliseconds / 1e9
    return {
        "workload": "update",
        "precision": name,
        "bytes an element": round(bytes_each, 2),
        "ms": round(milliseconds, 4),
        "TB/s": round(rate, 2),
        "% of floor": round(100 * rate * 1e12 / MEMORY_BYTES_PER_SECOND, 1),
        "ms for 8.2e9": round(milliseconds * 8.2e9 / ELEMENTS, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    fine = check_numbers()
    rows = timings()
    table = Table(*rows[0])
    for entry in rows:
        table.add_row(*map(str, entry.values()))
    Console(width=120).print(table)
    print(f"wrote {write_result('kernels', 'adamw', rows, arguments.out)}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()

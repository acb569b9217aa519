"""Times the package's kernels on a Hopper GPU, and chooses the kernels of decoding's GEMMs.

    python -m lab.kernels attention|break_even|delta_rule|experts|gather|gemm|quantize|rows [--out FOLDER]
    python -m lab.kernels gemm --tune [--shapes qwen3-8b,llama-3.1-8b] [--m 1,8,16,32]

Each name is a module of this folder; its docstring says what is timed. Leaves `lab/results/kernels_NAME.json`. The bits
of these kernels are compared in tests/gpu. `gather` needs two GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from lab.kernels import attention, break_even, delta_rule, experts, gather, gemm, quantize, rows
from lab.kernels.clock import Row
from lab.record import RESULTS, need_hopper, show, write_result

BENCHMARKS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "attention": attention.measure,
    "break_even": break_even.measure,
    "delta_rule": delta_rule.measure,
    "experts": experts.measure,
    "gather": gather.measure,
    "gemm": gemm.measure,
    "quantize": quantize.measure,
    "rows": rows.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(BENCHMARKS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON, and of the table of --tune")
    parser.add_argument("--tune", action="store_true", help="gemm: choose the kernels again, and write their table")
    parser.add_argument("--shapes", default="qwen3-8b", help=f"gemm: models, of {','.join(gemm.MODELS)}")
    parser.add_argument("--m", default=gemm.SIZES, help=f"gemm: numbers of rows (default {gemm.SIZES})")
    arguments = parser.parse_args()
    need_hopper("kernels")
    torch.manual_seed(0)
    found = BENCHMARKS[arguments.name](arguments)
    if found:
        show(found, arguments.name)
        print(f"wrote {write_result('kernels', arguments.name, found, arguments.out)}")


if __name__ == "__main__":
    main()

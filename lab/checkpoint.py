"""How long a checkpoint stops a run, how fast it is written beside the next step, and how fast it is loaded.

    python -m lab.checkpoint --gb 2                      on a CPU
    python -m lab.checkpoint --gb 33 --device cuda       the state of an 8B model: BF16 weights, 8-bit moments

Rows, by `workload`:

    before   what OctetRL did until then: safetensors' save_file, then each file read and hashed by SHA-256, while the
             run waits. At most --before-gb of the state
    save     `stopped_seconds` is the copy to host memory, `write_seconds` the background's work with its sync
    step     a matrix product repeated for as long as a save takes: its share of the speed that it has alone
    load     every file read and verified. The files may be in the page cache, as they are after a restart in place

The folder is on the disk of --folder. Nothing is left there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lab.record import RESULTS, write_result
from octetrl.system.host_memory import available_host_bytes
from octetrl.trainer import checkpoint
from octetrl.trainer.file_digests import fastest_algorithm
from octetrl.trainer.state_writer import Content, Files, StateWriter, in_shards

TENSOR_BYTES = 64 << 20
REPEATS = 3  # of the copy
PRODUCT = {"cpu": 512, "cuda": 4096}  # rows of the square matrices of the step


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="of state: half weights, half moments")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--before-gb", type=float, default=4.0, help="at most so much is saved the way of before")
    parser.add_argument("--folder", type=Path, default=Path(), help="on whose disk to write")
    parser.add_argument("--name", default=None, help="of the result; the device and the size if not given")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def state(num_bytes: float, device: torch.device) -> Files:
    """BF16 weights and 8-bit moments, in tensors of TENSOR_BYTES, of values that don't compress."""
    tensors: dict[str, dict[str, Tensor]] = {"model.safetensors": {}, "optimizer.safetensors": {}}
    for name, dtype in (("model.safetensors", torch.bfloat16), ("optimizer.safetensors", torch.uint8)):
        for index in range(max(1, int(num_bytes / 2 / TENSOR_BYTES))):
            values = torch.randint(0, 256, (TENSOR_BYTES,), dtype=torch.uint8, device=device)
            tensors[name][f"layers.{index:04d}"] = values.view(dtype)
    files: dict[str, Content] = {}
    for name, one in tensors.items():
        files |= in_shards(name, one)
    return files


def size_of(files: Files) -> int:
    return sum(
        tensor.nbytes for content in files.values() if not isinstance(content, bytes) for tensor in content.values()
    )


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def before(files: Files, limit: float, folder: Path) -> dict[str, object]:
    """Seconds and GB/s of save_file, sync, and SHA-256 of what was written."""
    saved = 0
    seconds = hashing = 0.0
    for name, content in files.items():
        assert not isinstance(content, bytes)
        held: dict[str, Tensor] = {}
        for key, tensor in content.items():
            if saved < limit:
                held[key] = tensor
                saved += tensor.nbytes
        if held:
            file = folder / name
            seconds += timed(lambda held=held, file=file: save_file({k: v.cpu() for k, v in held.items()}, file))  # type: ignore[misc]
            with file.open("rb") as stream:
                seconds += timed(lambda stream=stream: os.fsync(stream.fileno()))  # type: ignore[misc]
                hashing += timed(lambda stream=stream: hashlib.file_digest(stream, "sha256"))  # type: ignore[misc]
            file.unlink()
    whole = seconds + hashing
    return {
        "workload": "before",
        "gb": saved / 1e9,
        "stopped_seconds": whole,
        "gb_per_second": saved / 1e9 / whole,
        "load_gb_per_second": saved / 1e9 / hashing,
    }


class Product:
    """The work of a step: products of two matrices, counted."""

    def __init__(self, device: torch.device) -> None:
        rows = PRODUCT[device.type]
        self._a, self._b = (torch.randn(rows, rows, device=device) for _ in range(2))
        self._device = device

    def per_second(self, is_over: Callable[[], bool]) -> float:
        count, began = 0, time.perf_counter()
        while not is_over():
            torch.mm(self._a, self._b)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            count += 1
        return count / (time.perf_counter() - began)


def save(files: Files, device: torch.device, folder: Path) -> tuple[list[dict[str, object]], Path]:
    """Copies REPEATS times, then writes the last copy beside products."""
    size = size_of(files) / 1e9
    writer = StateWriter(lambda: files, device)
    prepared = timed(writer.prepare)
    first = timed(writer.copy)  # waits for the memory
    copies = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        refusal = writer.copy()
        if refusal is not None:
            raise SystemExit(f"lab.checkpoint: {refusal}")
        copies.append(time.perf_counter() - began)
    product = Product(device)
    until = time.perf_counter() + 2
    alone = product.per_second(lambda: time.perf_counter() > until)
    taken: list[float] = []
    written: list[Path] = []

    def write() -> None:
        began = time.perf_counter()
        written.append(checkpoint.save(folder, 1, {}, write_more=lambda place: writer.write(place, copied=True)))
        taken.append(time.perf_counter() - began)

    thread = threading.Thread(target=write)
    thread.start()
    beside = product.per_second(lambda: not thread.is_alive())
    thread.join()
    stopped = sorted(copies)[len(copies) // 2]
    saved: dict[str, object] = {
        "workload": "save",
        "gb": size,
        "algorithm": fastest_algorithm(),
        "memory_seconds": prepared + first,
        "stopped_seconds": stopped,
        "copy_gb_per_second": size / stopped,
        "write_seconds": taken[0],
        "gb_per_second": size / taken[0],
    }
    return [saved, {"workload": "step", "gb": size, "share_of_speed_alone": beside / alone}], written[0]


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    num_bytes, free = arguments.gb * 1e9, available_host_bytes()
    copies = 2 if device.type == "cpu" else 1
    if free is not None and copies * num_bytes > free:
        raise SystemExit(
            f"lab.checkpoint: --gb {arguments.gb:g} takes {copies * arguments.gb:g} GB of host memory,"
            f" {free / 1e9:.1f} are free; give less"
        )
    files = state(num_bytes, device)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = [before(files, arguments.before_gb * 1e9, Path(folder))]
        saved, path = save(files, device, Path(folder))
        rows += saved
        seconds = timed(lambda: checkpoint.load(path))
        size = size_of(files) / 1e9
        rows.append({"workload": "load", "gb": size, "load_seconds": seconds, "load_gb_per_second": size / seconds})
    for row in rows:
        row["precision"] = arguments.device
        print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    name = arguments.name or f"{arguments.device}_{arguments.gb:g}gb"
    print(f"wrote {write_result('checkpoint', name, rows, arguments.out)}")


if __name__ == "__main__":
    main()

"""Which GPU a worker of pytest uses first: they are dealt in turn, so that a suite takes all GPUs of a machine.

Every worker still sees all of them, in a turned order: a test that names no GPU runs on the first, and one of two GPUs
has two. The driver reads the variable once, so it is set before anything asks for a GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import MutableMapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def driver_lists() -> list[str]:
    """Numbers of the GPUs that the driver lists here. CUDA may order them otherwise, which changes nothing here."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def visible(environment: MutableMapping[str, str], numbers: list[str] | None = None) -> list[str]:
    """The GPUs that a process may use, as the variable names them."""
    if VISIBLE not in environment:
        return driver_lists() if numbers is None else list(numbers)
    return [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]


def turn(environment: MutableMapping[str, str], numbers: list[str] | None = None) -> None:
    """Let worker n begin with GPU n modulo their count. No change with one GPU, none, or outside a worker."""
    worker = environment.get("PYTEST_XDIST_WORKER")
    names = visible(environment, numbers) if worker else []
    if worker and len(names) > 1:
        first = int(worker.removeprefix("gw")) % len(names)
        environment[VISIBLE] = ",".join(names[first:] + names[:first])


def sharing(environment: MutableMapping[str, str], numbers: list[str] | None = None) -> int:
    """The most workers that begin with one GPU."""
    workers = int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return -(-workers // max(1, len(visible(environment, numbers))))


if __name__ == "__main__":
    print(max(1, len(visible(os.environ))))

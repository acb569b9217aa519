"""Which GPU a worker of pytest uses first: they are dealt in turn, so that a suite takes all GPUs of a machine.

Every worker still sees all of them, in a turned order: a test that names no GPU runs on the first, and one of two GPUs
has two. The driver reads the variable once, so it is set before anything asks for a GPU.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
NUMBERS = [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def visible(environment: MutableMapping[str, str], numbers: list[str] = NUMBERS) -> list[str]:
    """The GPUs that a process may use, as the variable names them."""
    if VISIBLE not in environment:
        return list(numbers)
    return [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]


def turn(environment: MutableMapping[str, str], numbers: list[str] = NUMBERS) -> None:
    """Let worker n begin with GPU n modulo their count. No change with one GPU, none, or outside a worker."""
    names, worker = visible(environment, numbers), environment.get("PYTEST_XDIST_WORKER", "gw0")
    if len(names) > 1:
        first = int(worker.removeprefix("gw")) % len(names)
        environment[VISIBLE] = ",".join(names[first:] + names[:first])


def sharing(environment: MutableMapping[str, str], numbers: list[str] = NUMBERS) -> int:
    """The most workers that begin with one GPU."""
    workers = int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return -(-workers // max(1, len(visible(environment, numbers))))


if __name__ == "__main__":
    print(max(1, len(visible(os.environ))))

"""What the workers of a run do, in a file of its folder that `octetrl status` reads. No torch.

The driver writes it about once a second from what the workers last said. It is renamed into place, so that a reader
never sees half of it. Machines that share no file system need nothing else, and no dashboard.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octetrl.system.errors import UserError, nearest_file, runs_in

STATUS_FILE = "workers.json"
STALE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker does now."""

    rank: int
    host: str
    gpu: str  # as Ray numbers it; empty on a CPU
    pid: int
    phase: str  # of its last or current work
    seconds: float  # in this phase, or since it ended
    busy: bool
    memory_gb: float  # of the GPU, or of the process on a CPU
    last_lines: tuple[str, ...] = ()  # of what it printed
    done: int = 0  # micro-batches of the current `train`
    total: int = 0  # 0: it does not train
    read_gb: float = 0.0  # of weights, from files, when it was built
    quantized_gb: float = 0.0  # of weights, in the model's dtype
    role: str = ""  # trains or generates; empty: it does both

    @property
    def place(self) -> str:
        role = f", {self.role}" if self.role else ""
        return f"worker {self.rank}{role} (host {self.host}, {self.device})"

    @property
    def device(self) -> str:
        return f"GPU {self.gpu}" if self.gpu else "CPU"


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The last status that a worker sent, and how long ago."""

    status: WorkerStatus
    seconds_ago: float

    @property
    def _doing(self) -> str:
        status, seconds = self.status, self.status.seconds + self.seconds_ago
        if not status.busy:
            return f"idle for {seconds:.0f} s after {status.phase}"
        done = f" ({status.done}/{status.total} micro-batches)" if status.total else ""
        return f"{status.phase} for {seconds:.0f} s{done}"

    def short_line(self, *, with_host: bool) -> str:
        """For a narrow terminal: worker 0, GPU 3: train for 12 s, 61.2 GB"""
        status = self.status
        parts = [f"worker {status.rank}", status.role, status.host if with_host else "", status.device]
        silent = f", silent for {self.seconds_ago:.0f} s" if self.seconds_ago > STALE_SECONDS else ""
        return f"{', '.join(part for part in parts if part)}: {self._doing}, {status.memory_gb:.1f} GB{silent}"

    @property
    def line(self) -> str:
        """For a person: worker 0 (host gpu1, GPU 3): train for 12 s, 61.2 GB, process 77, read 4.1 GB of weights"""
        status = self.status
        silent = f", silent for {self.seconds_ago:.0f} s" if self.seconds_ago > STALE_SECONDS else ""
        read = ""
        if status.read_gb:
            read = (
                f", read {size_in_words(status.read_gb)} and quantised {size_in_words(status.quantized_gb)} of weights"
            )
        return f"{status.place}: {self._doing}, {status.memory_gb:.1f} GB, process {status.pid}{read}{silent}"


def size_in_words(gb: float) -> str:
    """4.1 GB, or 33 MB."""
    return f"{gb:.1f} GB" if gb >= 0.1 else f"{1e3 * gb:.2g} MB"


def write_status(folder: Path, reports: Sequence[StatusReport]) -> None:
    workers: list[Mapping[str, Any]] = []
    for one in reports:
        said = asdict(one.status)
        del said["last_lines"]
        workers.append({**said, "seconds_ago": one.seconds_ago})
    aside = folder / f".{STATUS_FILE}"
    aside.write_text(json.dumps({"time": time.time(), "driver": os.getpid(), "workers": workers}))
    aside.replace(folder / STATUS_FILE)


def status_lines(folder: Path) -> Iterator[str]:
    """What each worker of a run does. UserError if no run on several workers is live."""
    path = folder / STATUS_FILE
    try:
        written = json.loads(path.read_text())
        age = max(0.0, time.time() - float(written["time"]))
        reports = [StatusReport(_status(worker), float(worker["seconds_ago"]) + age) for worker in written["workers"]]
    except FileNotFoundError:
        if not folder.exists():
            raise UserError(f"'{folder}' does not exist; give the folder of a run{nearest_file(folder)}") from None
        raise UserError(
            f"'{folder}' has no finished step and no workers; give the folder of a run{runs_in(folder)}"
        ) from None
    except NotADirectoryError:
        raise UserError(f"'{folder}' is a file; give the folder of a run") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{path}' can't be read ({error}); remove it if no run is live") from error
    if age > STALE_SECONDS:
        yield f"the run's process {written.get('driver')} wrote this {age:.0f} s ago; it has stopped or is very busy"
    yield from (one.line for one in reports)


def _status(worker: Mapping[str, Any]) -> WorkerStatus:
    return WorkerStatus(**{name: worker[name] for name in WorkerStatus.__slots__ if name in worker})


def print_into(log: Path) -> None:
    """Sends all that the process prints into `log`, also what a library prints without Python."""
    if not log.parent.is_dir():
        return  # a machine that does not see the run folder (nodes.py)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)


def last_lines(log: Path, count: int = 20) -> tuple[str, ...]:
    """The last lines of a file; none if it is not there."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 16_384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line for line in text.splitlines() if line.strip())[-count:]

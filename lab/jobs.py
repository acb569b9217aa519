"""Runs jobs as processes side by side, over the GPUs that are visible, until a clock ends them.

A job resumes its own work: the same command again goes on where the clock stopped it. `WARNING_SECONDS` before the end
every job gets Ctrl-C, which lets a run save a checkpoint; what still runs at the end is killed. A job that exits with
`UNFINISHED` was stopped by that. Any other code but 0 is a failure: it is printed, and the other jobs go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

WARNING_SECONDS = 25.0
POLL_SECONDS = 0.2
UNFINISHED = 3  # exit code of a job that was stopped and can go on
INTERRUPTED = (130, -signal.SIGINT)  # of `octetrl train`, and of a Python that had no handler yet


@dataclass(frozen=True)
class Job:
    """A command of this Python (`-m` and on). after: the job that must be complete before."""

    name: str
    words: tuple[str, ...]
    is_complete: Callable[[], bool]
    after: Job | None = None


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    gpu: str | None  # None: a machine without one


def run_jobs(jobs: Sequence[Job], logs: Path, *, at_once: int, seconds: float) -> list[str]:
    """Run the jobs that are not complete, `at_once` on each GPU. Returns the failures with their logs' last lines."""
    began, asked, failures = time.monotonic(), False, list[str]()
    waiting, running = [job for job in jobs if not job.is_complete()], list[Running]()
    gpus = visible_gpus()
    try:
        while waiting or running:
            left = seconds - (time.monotonic() - began)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                failures += _ended(one, logs)
            if left <= WARNING_SECONDS and not asked:
                asked = True
                for one in running:
                    one.process.send_signal(signal.SIGINT)
            if left <= 0 or (asked and not running):
                break
            ready = [job for job in waiting if job.after is None or job.after.is_complete()]
            if not asked and ready and len(running) < at_once * max(1, len(gpus)):
                gpu = min(gpus, key=lambda gpu: sum(one.gpu == gpu for one in running), default=None)
                running.append(_start(ready[0], logs, gpu))
                waiting.remove(ready[0])
            elif not running:
                break  # what waits needs a job that failed
            else:
                time.sleep(POLL_SECONDS)
    finally:
        for one in running:
            one.process.kill()
        for one in running:
            one.process.wait()
    return failures


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name, for one GPU each."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [one.strip() for one in given.split(",") if one.strip() not in ("", "-1")]
    return [str(number) for number in range(torch.cuda.device_count())]


def _start(job: Job, logs: Path, gpu: str | None) -> Running:
    logs.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
    with (logs / f"{job.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *job.words],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
    return Running(job, process, gpu)


def _ended(one: Running, logs: Path) -> list[str]:
    """Print how a job ended; returns its failure, if it is one."""
    code, name = one.process.returncode, one.job.name
    if code in (UNFINISHED, *INTERRUPTED):
        print(f"  stopped: {name}; the same command goes on with it", flush=True)
        return []
    if code == 0 and one.job.is_complete():
        print(f"  complete: {name}", flush=True)
        return []
    lines = (logs / f"{name}.log").read_text(errors="replace").strip().splitlines()
    failure = f"{name} failed: {lines[-1] if lines else 'it printed nothing'}"
    print(f"  {failure}", flush=True)
    return [failure]

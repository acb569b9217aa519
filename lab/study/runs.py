"""Trains the arms of a table of the study, several processes side by side, in calls of limited length.

    python -m lab.study.runs tiny-sums --seeds 8 --jobs 5 --seconds 560 [--arms bf16,fp8_full] [--model FOLDER]

A job is an arm with a seed (job.py). Jobs run seed by seed, so that a study cut short has the same seeds in all arms.
The cold start of a seed comes before its arms. The same command again goes on where the last one stopped: complete jobs
have their line, a job that was cut off resumes from its checkpoint.

The jobs are spread over the GPUs that the command sees (all, or those of CUDA_VISIBLE_DEVICES), `--jobs` on each. A job
uses one GPU. `--then ARMS:FIRST:COUNT` adds jobs behind those of `--arms`: these arms, with COUNT seeds from FIRST on.
It may be repeated.

The clock: `WARNING_SECONDS` before the end of `--seconds` every job is asked to stop after its step and saves. What
still runs at the end is killed, and loses at most the steps since its last checkpoint. No job is started that would not
end in time, by the longest job of its kind so far, unless no call of this length could hold it. On a new machine the
first jobs also compile the kernels and take several times as long; `--job-seconds` says what later jobs take. A job
that fails `ATTEMPTS` times leaves a line that says so. A job that refuses its input leaves none, and no job follows it.
Ctrl-C and SIGTERM end the jobs at once, and `--pack` still packs. A state whose lines, starts or runs have other
changes, steps or another model is refused.

On a machine that is given up after each call, `--pack FOLDER` leaves there what the next call needs, in pieces of
`--piece-mb` at most: all lines, then starts, then the runs that were cut off, as far as `--pack-mb` allows; what was
left out is made or run again. `--unpack FOLDER` reads the pieces first. The state is in `--state`, which may have
another path then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lab.command import held_signals, run_command
from lab.study.arms import ARMS, TABLES
from lab.study.job import (
    REFUSED,
    START,
    UNFINISHED,
    arm_recipe,
    key,
    line_path,
    model_digest,
    read_seconds_of,
    start_folder,
    start_recipe,
    write_line,
)
from lab.study.lines import refuse_other_settings
from lab.study.refusals import made_folder, read_seconds, refuse_numbers
from lab.study.travel import pack, unpack
from octetrl.system.errors import UserError
from octetrl.telemetry.bench_record import provenance

WARNING_SECONDS = 25.0
ATTEMPTS = 2
POLL_SECONDS = 0.2
MOST_DIGITS = 10  # of a seed


@dataclass(frozen=True, slots=True)
class Job:
    table: str
    arm: str  # or START
    seed: int

    @property
    def name(self) -> str:
        return key(self.table, self.arm, self.seed)


@dataclass(slots=True)
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    began: float
    gpu: str | None  # None: a machine without one


@dataclass(slots=True)
class Plan:
    """The jobs that are left, and how long jobs take."""

    state: Path
    jobs: list[Job]
    guess: float  # seconds of an arm's job before one has ended
    expected: float | None = None  # seconds of an arm's job, whatever the earlier ones took
    settings: dict[str, Any] = field(default_factory=dict)  # what lines say of the recipes
    attempts: dict[str, int] = field(default_factory=dict)
    refusal: str | None = None  # of the first job that refused its input

    def is_complete(self, job: Job) -> bool:
        if job.arm == START:
            return TABLES[job.table].start is None or start_folder(self.state, job.table, job.seed).is_dir()
        return line_path(self.state, job.table, job.arm, job.seed).exists()

    def ready(self, running: Sequence[Running]) -> Iterator[Job]:
        """Jobs that may start, in order: not complete, not running, and their start is made. None after a refusal."""
        if self.refusal is not None:
            return
        names = {one.job.name for one in running}
        for job in self.jobs:
            if job.name in names or self.is_complete(job) or self.attempts.get(job.name, 0) >= ATTEMPTS:
                continue
            if job.arm == START or self.is_complete(Job(job.table, START, job.seed)):
                yield job

    def seconds(self, job: Job) -> float:
        """What the job still takes: as expected, else the longest of its kind so far; less what it has run."""
        known = read_seconds(self.state)
        kind = f"{job.table}-{'start' if job.arm == START else 'arm'}"
        done = read_seconds_of(self.state / "runs" / job.name)
        whole = self.expected if self.expected is not None and job.arm != START else known.get(kind, self.guess)
        return max(whole - done, 0.0)

    def note_seconds(self, job: Job, seconds: float) -> None:
        known = read_seconds(self.state)
        kind = f"{job.table}-{'start' if job.arm == START else 'arm'}"
        write_line(self.state / "seconds.json", known | {kind: max(seconds, known.get(kind, 0.0))})


def jobs_of(table: str, arms: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """Seed by seed: the start, then the arms."""
    has_start = TABLES[table].start is not None
    return [Job(table, arm, seed) for seed in seeds for arm in (*([START] if has_start else []), *arms)]


def command_of(job: Job, arguments: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m", "lab.study.job", str(arguments.state), job.table, job.arm, str(job.seed)]
    model = [] if arguments.model is None else ["--model", arguments.model]
    changes = arguments.start_change if job.arm == START else arguments.change
    return [*words, *model, *changes]


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name, for one GPU each."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [one.strip() for one in given.split(",") if one.strip() not in ("", "-1")]
    return [str(number) for number in range(torch.cuda.device_count())]


def emptiest(gpus: Sequence[str], running: Sequence[Running]) -> str | None:
    """The GPU with the fewest jobs, the first of several; None: there is no GPU."""
    return min(gpus, key=lambda gpu: sum(one.gpu == gpu for one in running), default=None)


def start(job: Job, arguments: argparse.Namespace, gpu: str | None) -> Running:
    logs = arguments.state / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}
    with (logs / f"{job.name}.log").open("ab") as log:
        process = subprocess.Popen(
            command_of(job, arguments), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )
    return Running(job, process, time.monotonic(), gpu)


def ended(plan: Plan, one: Running, *, asked: bool) -> None:
    """Note how a job ended. One that failed too often leaves a line; its arms do not start without their start."""
    seconds, code = time.monotonic() - one.began, one.process.returncode
    if code == 0 and plan.is_complete(one.job):
        ran = (
            json.loads(line_path(plan.state, one.job.table, one.job.arm, one.job.seed).read_text())
            if (one.job.arm != START)
            else {"seconds": seconds}
        )
        plan.note_seconds(one.job, float(ran["seconds"]))
        print(f"  complete: {one.job.name}, {ran['seconds']:.0f} s", flush=True)
        return
    if code == UNFINISHED or asked:
        print(f"  cut off: {one.job.name}, the next call goes on with it", flush=True)
        return
    log = (plan.state / "logs" / f"{one.job.name}.log").read_text(errors="replace").strip().splitlines()
    why = log[-1] if log else "it printed nothing"
    if code == REFUSED:
        plan.refusal = plan.refusal or f"{one.job.name} was refused: {why}"
        return
    tries = plan.attempts[one.job.name] = plan.attempts.get(one.job.name, 0) + 1
    print(f"  failed ({tries} of {ATTEMPTS}): {one.job.name}: {why}", flush=True)
    if tries >= ATTEMPTS and one.job.arm != START:
        job = one.job
        failed = {"table": job.table, "arm": job.arm, "seed": job.seed, "status": "failed", "why": why}
        write_line(
            line_path(plan.state, job.table, job.arm, job.seed),
            failed | plan.settings | {"seconds": round(seconds, 1), "from": provenance()},
        )


def run_jobs(plan: Plan, arguments: argparse.Namespace) -> None:
    """Run what fits into the time, and return when nothing runs any more."""
    began, running, asked = time.monotonic(), list[Running](), False
    gpus = visible_gpus()
    most = arguments.jobs * max(1, len(gpus))
    try:
        while True:
            left = arguments.seconds - WARNING_SECONDS - (time.monotonic() - began)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                ended(plan, one, asked=asked)
            if not asked and left <= 0:
                asked = True
                for one in running:
                    one.process.send_signal(signal.SIGINT)
            if not asked:
                for job in plan.ready(running):
                    if len(running) >= most:
                        break
                    whole_call = arguments.seconds - WARNING_SECONDS
                    if plan.seconds(job) <= left or plan.seconds(job) > whole_call:
                        with held_signals():
                            running.append(start(job, arguments, emptiest(gpus, running)))
            if not running or left <= -WARNING_SECONDS:
                break
            time.sleep(POLL_SECONDS)
    finally:
        for one in running:
            one.process.kill()
        for one in running:
            one.process.wait()
            ended(plan, one, asked=True)


def chosen_arms(table: str, asked: str | None, option: str = "--arms") -> tuple[str, ...]:
    if asked is None:
        return TABLES[table].arms
    arms = tuple(ARMS) if asked == "all" else tuple(asked.split(","))
    for arm in arms:
        if arm not in ARMS:
            raise UserError(f"{option}: '{arm}' is no arm of the study; give all, or some of {', '.join(ARMS)}")
    return arms


def all_jobs(arguments: argparse.Namespace) -> list[Job]:
    """Those of `--arms`, then those of each `--then`, each once. UserError: a `--then` cannot be read."""
    jobs = jobs_of(
        arguments.table,
        chosen_arms(arguments.table, arguments.arms),
        range(arguments.first_seed, arguments.first_seed + arguments.seeds),
    )
    for words in arguments.then:
        arms, *numbers = words.split(":")
        remedy = "give for example bf16,fp8:4:4 for seeds 4 to 7"
        if len(numbers) != 2 or not all(number.isdecimal() and len(number) < MOST_DIGITS for number in numbers):
            raise UserError(f"--then: '{words}' is not ARMS:FIRST:COUNT; {remedy}")
        first, count = map(int, numbers)
        if count == 0:
            raise UserError(f"--then: '{words}' adds no seed, COUNT is 0; {remedy}")
        jobs += jobs_of(arguments.table, chosen_arms(arguments.table, arms, "--then"), range(first, first + count))
    return list(dict.fromkeys(jobs))


def settings_of(arguments: argparse.Namespace, jobs: Sequence[Job]) -> dict[str, Any]:
    """What a line says of its recipe. UserError: a recipe of the table does not take the changes."""
    state, table = arguments.state, arguments.table
    if TABLES[table].start is not None:
        start_recipe(state, table, 0, arguments.start_change)
    arms = dict.fromkeys(job.arm for job in jobs if job.arm != START)
    steps = {arm_recipe(state, table, arm, 0, arguments.model, arguments.change).steps for arm in arms}
    assert len(steps) == 1, "an arm changes no steps"
    found = {"of_steps": steps.pop(), "changes": list(arguments.change)}
    if TABLES[table].start is not None:
        return found | {"start_changes": list(arguments.start_change)}
    return found | {"model": model_digest(arguments.model)}


def prepare(arguments: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Create the folders and unpack. UserError: a folder, a piece or a line in them cannot be used; no folder is left
    then that was not there."""

    def refuse(folder: Path, option: str) -> None:
        refuse_other_settings(folder, option, arguments.table, settings)
        read_seconds(folder, option)

    refuse(arguments.state, "--state")
    pack_folder = nullcontext() if arguments.pack is None else made_folder("--pack", arguments.pack)
    with made_folder("--state", arguments.state), pack_folder:
        if arguments.unpack is not None:
            unpack(arguments.unpack, arguments.state, lambda unpacked: refuse(unpacked, "--unpack"))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--arms", help="default: the table's; or all")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--then", action="append", default=[], metavar="ARMS:FIRST:COUNT", help="further arms and seeds"
    )
    parser.add_argument("--jobs", type=int, default=8, help="processes side by side on each GPU, or on the CPU")
    parser.add_argument("--seconds", type=float, default=560.0, help="after this time nothing runs any more")
    parser.add_argument("--job-seconds", type=float, help="of an arm's job; default: the longest so far")
    parser.add_argument("--model", help="folder of the pretrained model, for a table that has one")
    parser.add_argument("--state", type=Path, default=Path("runs/study"))
    parser.add_argument("--unpack", type=Path)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--pack-mb", type=float, default=58.0)
    parser.add_argument("--piece-mb", type=float, default=15.0)
    parser.add_argument("--start-change", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--change", action="append", default=[], metavar="section.key=value", help="of all arms")
    arguments = parser.parse_args(words)
    refuse_numbers(arguments, least_seconds=WARNING_SECONDS)
    table = TABLES[arguments.table]
    if table.start is None and arguments.model is None:
        raise UserError(f"--model: table '{arguments.table}' needs the folder of a pretrained model")
    jobs = all_jobs(arguments)
    settings = settings_of(arguments, jobs)
    prepare(arguments, settings)
    plan = Plan(arguments.state, jobs, table.job_seconds, arguments.job_seconds, settings)
    try:
        run_jobs(plan, arguments)
    finally:
        if arguments.pack is not None:
            left_out = pack(arguments.state, arguments.pack, arguments.pack_mb, arguments.piece_mb)
            print(f"packed into {arguments.pack}; left out: {', '.join(left_out) or 'nothing'}")
    left = [job.name for job in jobs if not plan.is_complete(job)]
    print(f"{len(jobs) - len(left)} of {len(jobs)} jobs complete; left: {', '.join(left[:6]) or 'none'}")
    if plan.refusal is not None:
        raise UserError(f"{plan.refusal}; the other jobs were not started")


if __name__ == "__main__":
    run_command("study.runs", main)

"""Trains the arms of a table of the study, several processes side by side, in calls of limited length.

    python -m benchmarks.study.runs tiny-sums --seeds 8 --jobs 5 --seconds 560 [--arms bf16,fp8_full] [--model FOLDER]

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

On a machine that is given up after each call, `--pack FOLDER` leaves there what the next call needs, in pieces of
`--piece-mb` at most: all lines, then starts, then the runs that were cut off, as far as `--pack-mb` allows; what was
left out is made or run again. `--unpack FOLDER` reads the pieces first. The state is in `--state`, which may have
another path then.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.study.arms import ARMS, TABLES
from benchmarks.study.job import (
    REFUSED,
    START,
    UNFINISHED,
    arm_recipe,
    key,
    line_path,
    start_folder,
    start_recipe,
    write_line,
)
from benchmarks.study.refusals import make_folder, refuse_numbers
from octetrl.config.errors import UserError
from octetrl.telemetry.bench_record import provenance

WARNING_SECONDS = 25.0
ATTEMPTS = 2
POLL_SECONDS = 0.2
PIECE = "state.tar.gz."
PLACE = "place.json"  # the packed state's path, which its runs name


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
        path = self.state / "seconds.json"
        known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        kind = f"{job.table}-{'start' if job.arm == START else 'arm'}"
        ran = self.state / "runs" / job.name / "seconds"
        done = float(ran.read_text()) if ran.exists() else 0.0
        whole = self.expected if self.expected is not None and job.arm != START else known.get(kind, self.guess)
        return max(whole - done, 0.0)

    def note_seconds(self, job: Job, seconds: float) -> None:
        path = self.state / "seconds.json"
        known: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        kind = f"{job.table}-{'start' if job.arm == START else 'arm'}"
        write_line(path, known | {kind: max(seconds, known.get(kind, 0.0))})


def jobs_of(table: str, arms: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """Seed by seed: the start, then the arms."""
    has_start = TABLES[table].start is not None
    return [Job(table, arm, seed) for seed in seeds for arm in (*([START] if has_start else []), *arms)]


def command_of(job: Job, arguments: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m", "benchmarks.study.job", str(arguments.state), job.table, job.arm, str(job.seed)]
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
            failed | {"seconds": round(seconds, 1), "from": provenance()},
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
                        running.append(start(job, arguments, emptiest(gpus, running)))
            if not running or left <= -WARNING_SECONDS:
                break
            time.sleep(POLL_SECONDS)
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()
            ended(plan, one, asked=True)


# ---------------------------------------------------------------- travel


def pack(state: Path, folder: Path, limit_mb: float, piece_mb: float) -> list[str]:
    """Write the state in pieces; returns what was left out. Codes and weights hardly compress: sizes are as on disk."""
    groups = [
        [path for path in (state / "lines", state / "before", state / "seconds.json") if path.exists()],
        *([path] for path in _visible(state / "starts")),
        *([path] for path in _visible(state / "runs")),
    ]
    left_out, used, buffer = list[str](), 0, io.BytesIO()
    write_line(state / PLACE, {"state": str(state)})
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        archive.add(state / PLACE, PLACE)
        for number, group in enumerate(groups):
            size = sum(file.stat().st_size for path in group for file in (path, *path.rglob("*")) if file.is_file())
            if number and used + size > limit_mb * 2**20:
                left_out += [str(path.relative_to(state)) for path in group]
                continue
            used += size
            for path in group:
                archive.add(path, str(path.relative_to(state)))
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{PIECE}*"):
        old.unlink()
    data, step = buffer.getvalue(), int(piece_mb * 2**20)
    for number, place in enumerate(range(0, len(data), step)):
        (folder / f"{PIECE}{number:02d}").write_bytes(data[place : place + step])
    return left_out


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if not path.name.startswith(".")) if folder.is_dir() else []


def unpack(folder: Path, state: Path) -> None:
    """Put packed files into the state. Files that the state has already stay as they are."""
    pieces = sorted(folder.glob(f"{PIECE}*")) if folder.is_dir() else []
    if not pieces:
        raise UserError(f"--unpack: '{folder}' holds no {PIECE}00; give the folder that --pack wrote")
    state.mkdir(parents=True, exist_ok=True)
    aside = state / ".unpacked"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        data = b"".join(piece.read_bytes() for piece in pieces)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            archive.extractall(aside, filter="data")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(
            f"--unpack: the pieces in '{folder}' are damaged or incomplete ({error}); copy all of them again"
        ) from error
    place = aside / PLACE
    packed_from = json.loads(place.read_text())["state"] if place.exists() else str(state)
    for name in ("lines", "before", "starts", "runs"):
        for path in _visible(aside / name):
            target = state / name / path.name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                _name_place(path, packed_from, str(state))
                path.rename(target)
    if (aside / "seconds.json").exists() and not (state / "seconds.json").exists():
        (aside / "seconds.json").rename(state / "seconds.json")
    shutil.rmtree(aside)


def _name_place(unpacked: Path, old: str, new: str) -> None:
    """Put the state's new path into the recipes of unpacked runs: a run resumes with the paths that it began with."""
    for recipe in unpacked.rglob("config.yaml") if old != new else ():
        recipe.write_text(recipe.read_text().replace(f"{old}/", f"{new}/"))


def chosen_arms(table: str, asked: str | None) -> tuple[str, ...]:
    if asked is None:
        return TABLES[table].arms
    arms = tuple(ARMS) if asked == "all" else tuple(asked.split(","))
    for arm in arms:
        if arm not in ARMS:
            raise UserError(f"--arms: '{arm}' is no arm of the study; give all, or some of {', '.join(ARMS)}")
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
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise UserError(
                f"--then: '{words}' is not ARMS:FIRST:COUNT; give for example bf16,fp8:4:4 for seeds 4 to 7"
            )
        first, count = map(int, numbers)
        jobs += jobs_of(arguments.table, chosen_arms(arguments.table, arms), range(first, first + count))
    return list(dict.fromkeys(jobs))


def refuse_changes(arguments: argparse.Namespace, chosen: Sequence[str]) -> None:
    """UserError: a recipe of the table does not take the changes."""
    state, table = arguments.state, arguments.table
    if TABLES[table].start is not None:
        start_recipe(state, table, 0, arguments.start_change)
    for arm in chosen:
        arm_recipe(state, table, arm, 0, arguments.model, arguments.change)


def main(words: Sequence[str] | None = None) -> int:
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
    if arguments.unpack is not None:
        make_folder("--state", arguments.state)
        unpack(arguments.unpack, arguments.state)
    table = TABLES[arguments.table]
    if table.start is None and arguments.model is None:
        raise UserError(f"--model: table '{arguments.table}' needs the folder of a pretrained model")
    jobs = all_jobs(arguments)
    refuse_changes(arguments, list(dict.fromkeys(job.arm for job in jobs if job.arm != START)))
    make_folder("--state", arguments.state)
    if arguments.pack is not None:
        make_folder("--pack", arguments.pack)
    plan = Plan(arguments.state, jobs, table.job_seconds, arguments.job_seconds)
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
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UserError as error:
        print(f"benchmarks.study.runs: {error}", file=sys.stderr)
        raise SystemExit(2) from None

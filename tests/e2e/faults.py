"""Kills what a run on several workers consists of, at random moments, and shows that nothing hangs and nothing is lost.

    python -m tests.e2e.faults [--moments 20] [--seed S] [--folder F]      or: make test-faults SEED=S

A moment is a victim (a worker, the driver, raylet, gcs_server, a reward process), a signal (SIGKILL, SIGSTOP) and a
time of the run: while it starts, or so long after so many steps. After each of them

- the run goes on, with or without new workers, or it ends in bounded time with one line;
- after its end there is no process, no shared memory, no temporary file of it;
- resumed to its end, it has the metrics, rollouts and checkpoints of a run that nobody killed, byte for byte.

The seed of the moments is printed, and names them again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octetrl.config.load import dump_recipe
from octetrl.trainer import checkpoint
from octetrl.workers.ray_watcher import STATUS_FILE, processes_of
from tests.e2e.test_turns import UNTIMED
from tests.e2e.tiny_run import make_model, read_lines, timeless, tiny_recipe
from tests.house.tree import REPO

STEPS = 4
SILENT_SECONDS = 6.0
PAUSE_SECONDS = 9.0  # of a driver that is stopped and continued: longer than it waits for a silent worker
HANG_SECONDS = 600.0  # also on a machine with much other work; a start takes 10 s on a free one
CHANGES: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint.every": 1,
    "cluster.device": "auto",
    "cluster.cpu_threads": 1,
    "cluster.deadlines.silent_seconds": SILENT_SECONDS,
    "environment.reward": "tests.e2e.tiny_rewards:slowly_by_text",
    "environment.reward_timeout_seconds": 4.0,
}
AHEAD: dict[str, Any] = {  # one worker trains, one generates a batch ahead; a checkpoint has that batch
    "cluster.cpus": None,
    "cluster.trainer_cpus": 1,
    "cluster.engine_cpus": 1,
    "cluster.max_staleness": 1,
    "checkpoint.batches_ahead": "saved",
}
LAYOUTS: tuple[dict[str, Any], ...] = ({"cluster.cpus": 3}, {"cluster.cpus": 2}, AHEAD)
SPREAD = UNTIMED | {"fp8/kv_saturation", "rollout/reward_restarts"}  # follows the clock, or counts the strike itself
VICTIMS = ("worker", "driver", "raylet", "gcs_server", "reward")


@dataclass(frozen=True)
class Moment:
    """`steps`: lines of metrics.jsonl that this attempt has written before, with all workers built; -1: while it
    starts, from the moment the victim is there."""

    victim: str
    signal: signal.Signals
    steps: int
    seconds: float
    restarts: int = 0  # cluster.max_restarts of the attempt

    def __str__(self) -> str:
        when = "while it starts" if self.steps < 0 else f"after {self.steps} steps"
        return f"{self.signal.name} to {self.victim} {when} + {self.seconds:.2f} s, {self.restarts} restarts allowed"


def moments(seed: int, count: int) -> list[Moment]:
    """Every victim gets both signals before any gets one again."""
    draw = random.Random(seed)
    found: list[Moment] = []
    while len(found) < count:
        pairs = [(victim, how) for victim in VICTIMS for how in (signal.SIGKILL, signal.SIGSTOP)]
        draw.shuffle(pairs)
        for victim, how in pairs:
            steps = draw.choice([-1, 0, 0, 1, 1, 2])
            found.append(Moment(victim, how, steps, draw.uniform(0.0, 3.0 if steps < 0 else 1.0), draw.choice([0, 1])))
    return found[:count]


class Attempt:
    """One process of a run, from its start or its last checkpoint."""

    def __init__(self, model: Path, folder: Path, workers: Mapping[str, Any], restarts: int) -> None:
        self.run = folder / "run"
        changes = CHANGES | {**workers, "cluster.max_restarts": restarts}
        recipe = folder / "recipe.yaml"
        recipe.write_text(dump_recipe(tiny_recipe(model, self.run, changes)))
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self._said = folder / "stderr"
        self._lines_before = self._lines()
        self.shared_before = set(Path("/dev/shm").iterdir())
        self.ray_folder: Path | None = None
        resume = ["--resume"] if (self.run / "config.yaml").exists() else []
        with self._said.open("w") as said:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "octetrl", "train", str(recipe), *resume],
                cwd=REPO,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env={**os.environ, "TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")},
            )

    def _lines(self) -> int:
        try:
            return (self.run / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    @property
    def steps(self) -> int:
        return max(0, self._lines() - self._lines_before)

    @property
    def said(self) -> str:
        return self._said.read_text()

    def find_ray(self) -> Path | None:
        """Ray's folder, from the arguments of the watcher beside the run."""
        if self.ray_folder is None:
            self.ray_folder = ray_folder_of(self.driver.pid)
        return self.ray_folder

    def victims(self, kind: str) -> list[int]:
        if kind == "driver":
            return [self.driver.pid]
        if kind == "reward":
            supervisors = [
                name for name, parts in command_lines()
                if parent_of(name) == self.driver.pid and "CheckedScorer" in parts
            ]  # fmt: skip
            return [name for name, _ in command_lines() if parent_of(name) in supervisors]
        folder = self.find_ray()
        if folder is None:
            return []
        title = "ray::_RayWorker" if kind == "worker" else kind
        mine = set(processes_of(folder, exempt={self.driver.pid}))
        return [
            name for name, parts in command_lines()
            if name in mine and (parts[0].startswith(title) or Path(parts[0]).name == title)
        ]  # fmt: skip

    def strike(self, moment: Moment, draw: random.Random) -> bool:
        """Whether there was anything left to strike."""

        def is_time() -> bool:
            is_built = moment.steps < 0 or (self.run / STATUS_FILE).exists()
            return is_built and self.steps >= moment.steps and bool(self.victims(moment.victim))

        wait_for(lambda: self.has_ended() or is_time(), f"{moment.victim} to appear")
        time.sleep(moment.seconds)
        victims = self.victims(moment.victim)
        if self.has_ended() or not victims:
            return False
        self.find_ray()
        with contextlib.suppress(ProcessLookupError):
            if moment.victim == "driver" and moment.signal is signal.SIGKILL:
                for worker in self.victims("worker")[:1]:
                    os.kill(worker, signal.SIGSTOP)  # one that could not end by itself
            os.kill(draw.choice(victims), moment.signal)
        if moment.victim == "driver" and moment.signal is signal.SIGSTOP:
            time.sleep(PAUSE_SECONDS)
            self.driver.send_signal(signal.SIGCONT)
        return True

    def has_ended(self) -> bool:
        self.find_ray()
        return self.driver.poll() is not None

    def wait(self) -> int:
        """Until the run ends; its exit code."""
        wait_for(self.has_ended, "the run to end")
        return self.driver.wait()

    def check_end(self, moment: Moment | None) -> None:
        """One line if it failed, and nothing left of it."""
        code, folder = self.driver.returncode, self.ray_folder
        if folder is not None:
            wait_for(lambda: not folder.exists() and not processes_of(folder, exempt=set()), "Ray to be gone", 120.0)
        wait_for(lambda: not any(parent_of(name) == self.driver.pid for name, _ in command_lines()), "children to end")
        mine = f"{self.run}".encode()
        wait_for(lambda: not any(_mentions(name, mine) for name, _ in command_lines()), "all processes to end", 120.0)
        wait_for(lambda: not _plasma() - self.shared_before, "shared memory to be freed", 120.0)
        assert not list(self.temporary.iterdir()), list(self.temporary.iterdir())
        said = self.said
        assert "Traceback" not in said, said
        own = [line for line in said.splitlines() if line.startswith("octetrl: ")]
        if code:
            assert own and said.splitlines()[-1] in (own[-1], *_further_lines(said)), said
            assert code == (-signal.SIGKILL if moment is not None and moment.victim == "driver" else 1), (code, said)
            if code == -signal.SIGKILL and not (self.run / "config.yaml").exists():
                assert not list(self.run.iterdir()), "nothing was written, as the line says"
            elif code == -signal.SIGKILL:
                assert list((self.run / "logs" / "ray").glob("raylet.*")), "Ray's own logs were not kept"
        else:
            assert not own, said


def _further_lines(said: str) -> list[str]:
    """Lines that belong to a message: what the lost worker printed, and how the run continues."""
    how = ("    ", "  the last checkpoint is step ", "  no checkpoint is there yet: ", "  the run had not begun; ")
    return [line for line in said.splitlines() if line.startswith(how)]


def ray_folder_of(driver: int) -> Path | None:
    """The temporary folder of the Ray that a process started, from the arguments of the watcher beside it."""
    for name, arguments in command_lines():
        if parent_of(name) == driver and any(part.endswith("ray_watcher.py") for part in arguments):
            return Path(arguments[arguments.index(next(a for a in arguments if "watcher" in a)) + 1])
    return None


def command_lines() -> Iterator[tuple[int, list[str]]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                parts = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace").split("\0")
                if parts != [""]:
                    yield int(name), parts


def parent_of(pid: int) -> int:
    try:
        return int(Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _mentions(pid: int, text: bytes) -> bool:
    try:
        return pid != os.getpid() and text in Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:
        return False


def _plasma() -> set[Path]:
    return {path for path in Path("/dev/shm").iterdir() if "plasma" in path.name or "octetrl" in path.name}


def wait_for(found: Callable[[], bool], what: str, seconds: float = HANG_SECONDS) -> None:
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


def assert_same_run(folder: Path, whole: Path) -> None:
    """Metrics less what the clock says, rollouts, and the last checkpoint."""
    ours, theirs = (measured(place / "metrics.jsonl") for place in (folder, whole))
    assert ours == theirs
    names = sorted(path.name for path in (whole / "rollouts").iterdir())
    assert sorted(path.name for path in (folder / "rollouts").iterdir()) == names
    for name in names:
        assert (folder / "rollouts" / name).read_bytes() == (whole / "rollouts" / name).read_bytes(), name
    saved, expected = (checkpoint.load(place / "checkpoints" / f"step_{STEPS:06d}") for place in (folder, whole))
    assert set(saved.files) == set(expected.files)
    for name in saved.files:
        assert (saved.folder / name).read_bytes() == (expected.folder / name).read_bytes(), name
    assert not list((folder / "checkpoints").glob(".*")), "what was left half written is still there"


def measured(path: Path) -> list[dict[str, Any]]:
    lines = timeless(read_lines(path))
    return [
        {name: value for name, value in line.items() if name not in SPREAD and not name.startswith("memory/")}
        for line in lines
    ]


def struck_run(model: Path, folder: Path, workers: Mapping[str, Any], strikes: list[Moment], seed: int) -> int:
    """Begins a run, strikes it at each moment and resumes it, until it ends. Returns how many moments it used up."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, used = random.Random(seed), 0
    while True:
        moment = strikes[used] if used < len(strikes) else None
        attempt = Attempt(model, folder, workers, 0 if moment is None else moment.restarts)
        began = time.monotonic()
        try:
            struck = moment is not None and attempt.strike(moment, draw)
            code = attempt.wait()
            attempt.check_end(moment if struck else None)
        finally:
            if attempt.driver.poll() is None:
                attempt.driver.kill()
                attempt.driver.wait()
        if moment is not None:
            last = (attempt.said.strip().splitlines() or [""])[-1].strip()
            outcome = "there was nothing to strike" if not struck else f"exit code {code}"
            print(f"  {used + 1}. {moment}: {outcome}, {time.monotonic() - began:.0f} s  {last[:150]}", flush=True)
            used += 1
        if code == 0:
            return used


def main() -> None:
    parser = argparse.ArgumentParser(description="kill a run at random moments")
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None)
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}: {given.moments} moments; the same again: make test-faults SEED={seed}", flush=True)
    base = given.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    model = make_model(base / "model")
    left, runs = moments(seed, given.moments), 0
    wholes: dict[int, Path] = {}
    while left:
        runs += 1
        layout = runs % len(LAYOUTS)
        if layout not in wholes:
            struck_run(model, base / f"whole_{layout}", LAYOUTS[layout], [], seed)
            wholes[layout] = base / f"whole_{layout}" / "run"
        print(f"run {runs}, with {LAYOUTS[layout]}", flush=True)
        folder = base / f"struck_{runs}"
        used = struck_run(model, folder, LAYOUTS[layout], left[:6], seed + runs)
        left = left[used:]
        assert_same_run(folder / "run", wholes[layout])
    print(json.dumps({"seed": seed, "moments": given.moments, "runs": runs, "passed": True}))
    shutil.rmtree(base)


if __name__ == "__main__":
    main()

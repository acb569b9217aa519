"""Boxes as containers of docker or podman, by their command line.

A container is named after the process of the run: machine, process namespace, process, its start, and a number. So a
container whose run was killed, and that did not end with it, is recognised by the next run, and no other is touched.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from octetrl.boxes.box import MOST_PROCESSES, PAYLOAD, Box, BoxError, program_of

if TYPE_CHECKING:  # pydantic takes as long to import as a reward process takes to start
    from octetrl.config.box import BoxConfig

LABEL = "octetrl-box"
_SECONDS = 120.0  # for a command of docker or podman that starts nothing
_NETWORKS = {"off": "none", "bridge": "bridge", "host": "host"}
_numbers = itertools.count()


class Container(Box):
    def __init__(self, config: BoxConfig) -> None:
        super().__init__(config)
        self.name = f"{_place()}-{os.getpid()}-{begun(os.getpid())}-{next(_numbers)}"

    def start_command(self) -> list[str]:
        config = self.config
        if config.image is None:
            raise BoxError("the box has no image; name it in environment.box.image")
        words = [*program_of(config), "run", "-i", "--rm", "--name", self.name, "--label", LABEL, "--entrypoint", "sh"]
        words += ["--network", _NETWORKS[config.network], "--memory", f"{config.memory_mib}m"]
        words += ["--pids-limit", str(MOST_PROCESSES)]
        words += [] if config.cpus is None else ["--cpus", str(config.cpus)]
        return [*words, *config.options, config.image, "-c", PAYLOAD]

    def client(self, command: Sequence[str], env: Mapping[str, str], user: str | None, *, reads: bool) -> list[str]:
        words = [
            *program_of(self.config),
            "exec",
            *(["-i"] if reads else []),
            *([] if user is None else ["--user", user]),
        ]
        for name, value in env.items():
            words += ["--env", f"{name}={value}"]
        return [*words, self.name, *command]

    def find_pid(self) -> int:
        pid = int(call_engine(self.config, "inspect", "--format", "{{.State.Pid}}", self.name))
        try:
            environment = Path(f"/proc/{pid}/cmdline").read_bytes()
        except FileNotFoundError:
            environment = b""
        if PAYLOAD.encode() not in environment:  # docker counts processes elsewhere, and this is another one
            raise OSError("its processes are not those of this machine or container")
        return pid

    def clean(self, *, ended_by_itself: bool) -> None:
        if not ended_by_itself:
            remove(self.config, [self.name])


def sweep(config: BoxConfig) -> list[str]:
    """Remove the containers of runs of this machine that have ended without them. Returns their names. Raises
    OSError."""
    listed = call_engine(config, "ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}")
    left = [name for name in listed.split() if _is_left(name)]
    remove(config, left)
    return left


def remove(config: BoxConfig, names: Sequence[str]) -> None:
    for name in names:
        for words in (["kill"], ["rm", "-f"]):  # podman's rm waits 10 s for a process to end by itself
            with contextlib.suppress(OSError):  # it has ended
                call_engine(config, *words, name)


@cache
def _place() -> str:
    """Names the machine since its start, and the process namespace: process ids are compared only within it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:13]
    return f"octetrl-{boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def _is_left(name: str) -> bool:
    owner = re.fullmatch(rf"{_place()}-(\d+)-(\d+)-\d+", name)
    return owner is not None and begun(int(owner[1])) != int(owner[2])


def begun(pid: int) -> int:
    """When a process began, in ticks since the machine's start; -1: there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return -1


def call_engine(config: BoxConfig, *words: str, seconds: float = _SECONDS) -> str:
    """What a command of docker or podman prints. Raises OSError if it fails, and BoxError without the program."""
    program = program_of(config)
    try:
        ended = subprocess.run(
            [*program, *words], capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{program[0]} {words[0]} has not ended in {seconds:g} s") from error
    if ended.returncode != 0:
        said = " ".join((ended.stderr or ended.stdout).split())[-300:]
        raise OSError(said or f"{program[0]}: exit code {ended.returncode}")
    return ended.stdout

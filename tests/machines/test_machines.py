"""Runs on several machines, which are network namespaces of this one (network.py): bits, slow wires, cables, deaths.

`make test-machines` runs them; they need root and about four minutes on two cores. All runs are compared with one of as
many workers on threads of one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.load import dump_recipe
from tests.e2e.tiny_run import make_model, read_lines, tiny_recipe
from tests.house.tree import REPO
from tests.machines import network
from tests.machines.network import Machines
from tests.required import missing
from tests.unit.workers.thread_team import run_on, steps_of, unspread

pytestmark = [pytest.mark.machines, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 4
DELAY, LOST, MBIT = 5.0, 0.005, 200  # of the third machine's wire; and of every machine
SILENT_SECONDS = 8.0
CHANGES: dict[str, Any] = {"steps": STEPS, "checkpoint.every": 1}


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """Three, of which the first two have a Ray, and the third a slow wire."""
    if (why := network.problem()) is not None:
        missing("machines", why)
    with (
        tempfile.TemporaryDirectory(prefix="om", dir="/tmp", ignore_cleanup_errors=True) as folder,
        Machines(3, Path(folder), slow=(DELAY, LOST), mbit=MBIT) as machines,
    ):
        machines.start_ray(1)
        machines.start_ray(2)
        yield machines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def of_threads(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """The metrics of each step of as many workers on threads."""

    def lines(count: int) -> list[dict[str, Any]]:
        with run_on(count, model, tmp_path_factory.mktemp("threads"), **CHANGES) as threads:
            return steps_of(threads, STEPS)[1]

    return lines


class RunOn:
    """A run on the machines, from its first step or its last checkpoint."""

    def __init__(self, machines: Machines, model: Path, folder: Path, nodes: int, **changes: Any) -> None:
        self.folder, self._said = folder / "run", folder / "said.txt"
        cluster = {"address": machines.ray_address, "nodes": nodes, "cpus_per_node": 1, "device": "auto"}
        cluster |= {"deadlines.silent_seconds": SILENT_SECONDS}
        all_changes = CHANGES | {f"cluster.{name}": value for name, value in (cluster | changes).items()}
        recipe = folder / "recipe.yaml"
        recipe.write_text(dump_recipe(tiny_recipe(model, self.folder, all_changes)))
        command = [sys.executable, "-m", "octetrl", "train", str(recipe), "--resume", "auto"]
        self.process = machines.popen(1, command, self._said)

    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return read_lines(path) if path.exists() else []

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + 240.0
        while len(self.lines()) < step:
            assert self.process.poll() is None and time.monotonic() < until, self._said.read_text()
            time.sleep(0.05)

    def ends(self, code: int = 0) -> list[dict[str, Any]]:
        try:
            assert self.process.wait(300.0) == code, self._said.read_text()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self._said.read_text()) from None
        return comparable(self.lines())

    @property
    def last_lines(self) -> list[str]:
        return self._said.read_text().splitlines()


def comparable(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without those of the clock and of how the work was spread."""
    return unspread([{name: line[name] for name in line if name != "step"} for line in lines])


def test_a_machine_may_join_late_and_all_have_the_bits_of_threads(
    machines: Machines, model: Path, of_threads: Callable[[int], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """First two machines; then three, of which the last joins while the run waits, over a wire that loses frames."""
    for name, nodes in (("two", 2), ("three", 3)):
        (tmp_path / name).mkdir()
        run = RunOn(machines, model, tmp_path / name, nodes, **{"deadlines.machines_seconds": 120.0})
        if nodes == 3:
            time.sleep(5.0)
            machines.start_ray(3)
        assert run.ends() == of_threads(nodes)


def test_a_cable_that_is_out_for_a_moment_costs_a_moment(
    machines: Machines, model: Path, of_threads: Callable[[int], list[dict[str, Any]]], tmp_path: Path
) -> None:
    run = RunOn(machines, model, tmp_path, 2)
    run.wait_for_step(1)
    machines.cut(2)
    time.sleep(SILENT_SECONDS / 3)
    machines.join(2)
    assert run.ends() == of_threads(2)
    assert not any("restart" in line for line in run.last_lines)


def test_a_machine_that_dies_and_comes_back_changes_nothing(
    machines: Machines, model: Path, of_threads: Callable[[int], list[dict[str, Any]]], tmp_path: Path
) -> None:
    run = RunOn(machines, model, tmp_path, 2, **{"max_restarts": 1, "deadlines.machines_seconds": 120.0})
    run.wait_for_step(1)
    machines.switch_off(2)
    time.sleep(2.0)
    machines.start_ray(2)
    assert run.ends() == of_threads(2)


def test_a_cable_that_stays_out_ends_the_run_in_one_line_and_it_goes_on_later(
    machines: Machines, model: Path, of_threads: Callable[[int], list[dict[str, Any]]], tmp_path: Path
) -> None:
    run = RunOn(machines, model, tmp_path, 2)
    run.wait_for_step(1)
    machines.cut(2)
    assert len(run.ends(1)) < STEPS
    assert sum("(host m2, CPU) was lost in phase" in line for line in run.last_lines) == 1
    machines.join(2)
    machines.switch_off(2)  # its Ray was given up by the first machine's
    machines.start_ray(2)
    again = RunOn(machines, model, tmp_path, 2)
    assert again.ends() == of_threads(2)


STAND_INS = {
    "scontrol": "printf 'm1\\nm2\\nm3\\n'",
    "hostname": f"echo {network.PREFIX}.1",
    "octetrl": f'exec {sys.executable} -m octetrl "${{@/cluster.gpus_per_node=8/cluster.cpus_per_node=1}}"',
    "srun": """
        for word in "$@"; do case $word in
            --nodelist=*) nodes=${word#--nodelist=} ;;
            --exclude=m1) nodes="m2 m3" ;;
        esac; done
        while [[ $1 == --* ]]; do shift; done
        own='[ "$0" = m1 ] || mount -t tmpfs none "$RAY_TMPDIR"; exec "$@"'
        for node in $nodes; do ip netns exec "$MACHINES$node" unshare --mount sh -c "$own" "$node" "$@" & done
        wait""",
}


def test_the_slurm_script_starts_a_run_on_three_machines(
    machines: Machines, model: Path, of_threads: Callable[[int], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """The last of this file: its Ray takes the place of the one before."""
    for number in (1, 2, 3):
        machines.switch_off(number)
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(tiny_recipe(model, tmp_path / "run", CHANGES | {"cluster.device": "auto"})))
    job = machines.popen(
        1,
        ["bash", str(REPO / "examples/slurm.sh"), str(recipe)],
        tmp_path / "said.txt",
        PATH=f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        MACHINES=machines.name(1).removesuffix("m1"),
        SLURM_JOB_NODELIST="m[1-3]",
        SLURM_JOB_NUM_NODES="3",
        RAY_TMPDIR=str(machines.folder),
    )
    assert job.wait(400.0) == 0, (tmp_path / "said.txt").read_text()
    assert comparable(read_lines(tmp_path / "run/metrics.jsonl")) == of_threads(3)

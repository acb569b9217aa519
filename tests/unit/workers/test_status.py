"""What `octetrl status` prints, from the file that a live run writes; and the end of what a worker printed."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.schema import ClusterConfig, ModelConfig, Recipe
from octetrl.system.errors import UserError
from octetrl.workers.hosted import WorkerPlan
from octetrl.workers.status import STATUS_FILE, StatusReport, WorkerStatus, last_lines, status_lines, write_status

GPU = WorkerStatus(0, "gpu1", "3", 77, "train", 12.0, True, 61.24, done=3, total=8, read_gb=4.1, quantized_gb=8.2)
CPU = WorkerStatus(1, "here", "", 78, "publish", 2.0, False, 0.5, last_lines=("words",))


def test_each_worker_has_a_line(tmp_path: Path) -> None:
    write_status(tmp_path, [StatusReport(GPU, 0.0), StatusReport(CPU, 11.0)])
    assert list(tmp_path.iterdir()) == [tmp_path / STATUS_FILE], "renamed into place"
    assert list(status_lines(tmp_path)) == [
        "worker 0 (host gpu1, GPU 3): train for 12 s (3/8 micro-batches), 61.2 GB, process 77, read 4.1 GB and"
        " quantised 8.2 GB of weights",
        "worker 1 (host here, CPU): idle for 13 s after publish, 0.5 GB, process 78, silent for 11 s",
    ]


def test_a_worker_with_a_role_says_it(tmp_path: Path) -> None:
    write_status(tmp_path, [StatusReport(replace(GPU, role="trains"), 0.0)])
    (line,) = status_lines(tmp_path)
    assert line.startswith("worker 0, trains (host gpu1, GPU 3): train for")


@pytest.mark.parametrize("trains", [True, False])
def test_the_first_workers_train(trains: bool) -> None:
    cluster = ClusterConfig(trainer_cpus=2, engine_cpus=1)
    recipe = Recipe(model=ModelConfig(preset="tiny", init="random"), cluster=cluster)
    roles = [WorkerPlan(recipe, rank, 3, trains, ".", None).role for rank in range(3)]
    assert roles == (["trains", "trains", "generates"] if trains else ["both"] * 3)


def test_an_old_file_names_the_run_that_stopped(tmp_path: Path) -> None:
    write_status(tmp_path, [StatusReport(CPU, 0.0)])
    file = tmp_path / STATUS_FILE
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"time": time.time() - 100.0}))
    first, worker = status_lines(tmp_path)
    assert re.fullmatch(
        rf"the run's process {os.getpid()} wrote this 10\d s ago; it has stopped or is very busy", first
    )
    assert re.search(r"idle for 10[2-9] s after publish, .*, silent for 10\d s$", worker)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"time": 1, "workers": [{"rank": 0}]}', '{"time": "x"}'])
def test_a_damaged_file_is_one_line(damage: str, tmp_path: Path) -> None:
    (tmp_path / STATUS_FILE).write_text(damage)
    with pytest.raises(UserError, match=r"workers\.json' can't be read .*; remove it if no run is live") as error:
        list(status_lines(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("made", "says"),
    [(None, "does not exist"), ("folder", "has no finished step and no workers"), ("file", "is a file")],
)
def test_what_is_no_run_is_refused(made: str | None, says: str, tmp_path: Path) -> None:
    target = tmp_path / "run"
    if made is not None:
        target.mkdir() if made == "folder" else target.write_text("")
    with pytest.raises(UserError, match=rf"{says}.*; give the folder of a run"):
        list(status_lines(target))


def test_a_lost_worker_shows_the_last_twenty_lines_that_it_printed(tmp_path: Path) -> None:
    log = tmp_path / "worker_0.log"
    assert last_lines(log) == ()
    lines: Any = [f"line {number}" for number in range(5000)]
    log.write_bytes("\n\n".join(lines).encode() + b"\n\xff\n\n")
    found = last_lines(log)
    assert len(found) == 20 and found[:-1] == tuple(lines[-19:]) and found[-1] == "\ufffd"

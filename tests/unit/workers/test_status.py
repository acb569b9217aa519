"""What `octetrl status` prints, from the file that a live run writes; a phase's deadline; the progress of a call."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.cluster import DeadlineConfig
from octetrl.config.schema import ClusterConfig, ModelConfig, Recipe
from octetrl.system.errors import UserError
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import pack
from octetrl.workers.hosted import WorkerPlan
from octetrl.workers.status import STATUS_FILE, StatusReport, WorkerStatus, last_lines, status_lines, write_status
from octetrl.workers.team import Deadlines, counted, num_micro_batches
from tests.unit.trainer.tiny_trainer import random_samples, tiny_trainer

GPU = WorkerStatus(0, "gpu1", "3", 77, "train", 12.0, True, 61.24, done=3, total=8, read_gb=4.1, quantized_gb=0.033)
CPU = WorkerStatus(1, "here", "", 78, "publish", 2.0, False, 0.5, last_lines=("words",))


def test_each_worker_has_a_line(tmp_path: Path) -> None:
    of_role = replace(GPU, rank=2, role="trains")
    write_status(tmp_path, [StatusReport(GPU, 0.0), StatusReport(CPU, 11.0), StatusReport(of_role, 0.0)])
    assert list(tmp_path.iterdir()) == [tmp_path / STATUS_FILE], "renamed into place"
    work = "train for 12 s (3/8 micro-batches), 61.2 GB, process 77, read 4.1 GB and quantised 33 MB of weights"
    assert list(status_lines(tmp_path)) == [
        f"worker 0 (host gpu1, GPU 3): {work}",
        "worker 1 (host here, CPU): idle for 13 s after publish, 0.5 GB, process 78, silent for 11 s",
        f"worker 2, trains (host gpu1, GPU 3): {work}",
    ]


@pytest.mark.parametrize("trains", [True, False])
def test_the_first_workers_train(trains: bool) -> None:
    cluster = ClusterConfig(trainer_cpus=2, engine_cpus=1)
    recipe = Recipe(model=ModelConfig(preset="tiny", init="random"), cluster=cluster)
    roles = [WorkerPlan(recipe, rank, 3, trains, ".", None).role for rank in range(3)]
    assert roles == (["trains", "trains", "generates"] if trains else ["both"] * 3)


def test_an_old_file_names_the_run_that_stopped(tmp_path: Path) -> None:
    write_status(tmp_path, [StatusReport(CPU, 0.0)])
    file = tmp_path / STATUS_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"time": time.time() - 100.0}))
    first, worker = status_lines(tmp_path)
    assert re.match(rf"the run's process {os.getpid()} wrote this 10\d s ago", first)
    assert re.search(r"idle for 10[2-9] s after publish, .*, silent for 10\d s$", worker)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"time": 1, "workers": [{"rank": 0}]}', '{"time": "x"}'])
def test_a_damaged_file_is_one_line(damage: str, tmp_path: Path) -> None:
    (tmp_path / STATUS_FILE).write_text(damage)
    with pytest.raises(UserError, match=STATUS_FILE) as error:
        list(status_lines(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [lambda _: None, Path.mkdir, Path.touch])
def test_what_is_no_run_is_refused(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "run")
    with pytest.raises(UserError, match=r"run'.*give the folder of a run"):
        list(status_lines(tmp_path / "run"))


def test_a_lost_worker_shows_the_last_twenty_lines_that_it_printed(tmp_path: Path) -> None:
    log = tmp_path / "worker_0.log"
    assert last_lines(log) == ()
    lines = [f"line {number}" for number in range(5000)]
    log.write_bytes("\n\n".join(lines).encode() + b"\n\xff\n\n")
    assert last_lines(log) == (*lines[-19:], "\ufffd")


def test_the_limit_of_a_phase_follows_from_the_longest_so_far() -> None:
    usual, strict = Deadlines(DeadlineConfig()), DeadlineConfig(first_seconds=50.0, least_seconds=20.0, times_usual=3.0)
    assert [usual.limit(phase) for phase in ("train", "load", "state", "submit")] == [3600.0, 3600.0, 300.0, 300.0]
    for seconds, limit in ((2.0, 300.0), (100.0, 1000.0), (31.0, 1000.0)):
        usual.took("train", seconds)
        assert usual.limit("train") == limit
    assert usual.limit("publish") == 3600.0, "each phase has its own"
    for phase, first in (("state", 20.0), ("train", 50.0)):
        deadlines = Deadlines(strict)
        assert deadlines.limit(phase) == first
        deadlines.took(phase, 10.0)
        assert deadlines.limit(phase) == 30.0


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (2, 3)])
def test_every_micro_batch_counts_once(epochs: int, minibatches: int) -> None:
    trainer = tiny_trainer(tokens_per_micro_batch=32, epochs=epochs, minibatches=minibatches)
    batch = pack(random_samples(9), trainer.layout, trainer.algorithm.token_weighting)
    shown: list[tuple[int, int]] = []
    with counted(trainer, batch, lambda done, total: shown.append((done, total))):
        trainer.train(batch, KVReplay(), None)
    total = num_micro_batches(batch, epochs)
    assert total > 3 and shown == [(done, total) for done in range(1, total + 1)]
    trainer.train(batch, KVReplay(), None)
    assert len(shown) == total, "nobody looks any more"

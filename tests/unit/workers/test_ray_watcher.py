"""The watcher of a run's own Ray: a line about its end only if nobody else has said it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.e2e.installed_ray import ray  # noqa: F401  # isort: skip: the imports of octetrl.workers.ray* need it

from octetrl.workers import ray_cluster, ray_watcher
from octetrl.workers.ray import RayTeam


@pytest.mark.parametrize(
    ("word", "said"), [(b"", ray_watcher.KILLED), (ray_watcher.BYE, ""), (ray_watcher.STOPPED, "")]
)
def test_only_of_a_process_that_was_killed_it_says_so(word: bytes, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "ray"
    folder.mkdir()
    script = [sys.executable, "-I", "-S", ray_watcher.__file__, str(folder)]
    ended = subprocess.run(script, input=word, capture_output=True, timeout=120)
    assert ended.returncode == 0 and not folder.exists()
    assert said in ended.stderr.decode() and bool(said) == bool(ended.stderr)


MINE = ("logs/worker_0.log", "logs/worker_notes.log", "logs/mine.log")
LOGS_OF_A_START = ("logs/worker_1.log", "logs/worker_12.log")
OF_A_START = ("lock", "workers.json", ".workers.json", *LOGS_OF_A_START)


def write_files(folder: Path, names: Sequence[str]) -> None:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("")


def close_team(folder: Path, before: set[Path]) -> None:
    team = object.__new__(RayTeam)
    team._folder, team._logs_before, team._cluster, team._actors, team._places = folder, before, None, [], None
    team._ends, team._watch = threading.Event(), threading.Thread()
    team.close()


@pytest.mark.parametrize("mine", [MINE, ()])
@pytest.mark.parametrize(
    ("remove", "of_the_start"),
    [(ray_watcher.remove_files, OF_A_START), (close_team, ("workers.json", *LOGS_OF_A_START))],
)
def test_of_a_run_that_did_not_begin_only_its_own_files_go(
    remove: Callable[[Path, set[Path]], None], of_the_start: Sequence[str], mine: Sequence[str], tmp_path: Path
) -> None:
    write_files(tmp_path, mine)
    before = set(tmp_path.glob(ray_watcher.LOGS))
    write_files(tmp_path, of_the_start)
    remove(tmp_path, before)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted(mine) and (tmp_path / "logs").exists() == bool(mine)


def test_the_watcher_takes_the_logs_of_its_beginning_for_somebody_elses(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "ray"
    other.mkdir()
    write_files(run, (*MINE, "lock", "workers.json"))
    script = [sys.executable, "-I", "-S", ray_watcher.__file__, str(other), str(run)]
    subprocess.run(script, input=b"", capture_output=True, timeout=120, check=True)
    assert sorted(path.name for path in run.rglob("*") if path.is_file()) == sorted(Path(name).name for name in MINE)


def test_a_process_that_ends_at_once_tells_its_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(ray_cluster, "_WATCHERS", {1: writer, 2: -1})
    ray_cluster.stopped_at_once()
    assert os.read(reader, 8) == ray_watcher.STOPPED
    os.close(reader)
    os.close(writer)

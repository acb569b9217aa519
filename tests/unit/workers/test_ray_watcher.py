"""The watcher of a run's own Ray: a line about its end only if nobody else has said it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def start_files(folder: Path) -> None:
    """What is in the folder of a run that ends before it begins, beside somebody else's file."""
    (folder / "logs").mkdir(parents=True)
    for name in ("lock", "workers.json", "logs/worker_0.log", "logs/worker_1.log", "logs/mine.log"):
        (folder / name).write_text("")


def test_of_a_run_that_did_not_begin_only_its_own_files_go(tmp_path: Path) -> None:
    run, ray = tmp_path / "run", tmp_path / "ray"
    ray.mkdir()
    start_files(run)
    script = [sys.executable, "-I", "-S", ray_watcher.__file__, str(ray), str(run)]
    subprocess.run(script, input=b"", capture_output=True, timeout=120, check=True)
    assert [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()] == ["logs/mine.log"]


def test_a_refused_run_forgets_the_logs_of_its_workers_only(tmp_path: Path) -> None:
    start_files(tmp_path)
    team = object.__new__(RayTeam)
    team._folder = tmp_path
    team.forget_logs()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["mine.log"]
    (tmp_path / "logs" / "mine.log").unlink()
    team.forget_logs()
    assert not (tmp_path / "logs").exists()


def test_a_process_that_ends_at_once_tells_its_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(ray_cluster, "_WATCHERS", {1: writer, 2: -1})
    ray_cluster.stopped_at_once()
    assert os.read(reader, 8) == ray_watcher.STOPPED
    os.close(reader)
    os.close(writer)

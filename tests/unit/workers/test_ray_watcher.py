"""The watcher of a run's own Ray: a line about its end only if nobody else has said it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octetrl.workers import ray_cluster, ray_watcher


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


def test_a_process_that_ends_at_once_tells_its_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(ray_cluster, "_WATCHERS", {1: writer, 2: -1})
    ray_cluster.stopped_at_once()
    assert os.read(reader, 8) == ray_watcher.STOPPED
    os.close(reader)
    os.close(writer)

"""A run names its commit: of a checkout by git, of an installed package by the file that its build wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octetrl.telemetry import bench_record
from tests.house.tree import REPO


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_an_installed_package_has_the_commit_of_its_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout, built = tmp_path / "checkout", tmp_path / "built"
    (checkout / "octetrl").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        (checkout / name).write_bytes((REPO / name).read_bytes())
    (checkout / "octetrl" / "__init__.py").write_text("")
    (checkout / "octetrl" / "version.py").write_bytes((REPO / "octetrl" / "version.py").read_bytes())
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    build = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib"]
    subprocess.run([*build, str(built)], cwd=checkout, check=True, capture_output=True)
    monkeypatch.delenv("OCTETRL_COMMIT", raising=False)
    commit = git(checkout, "describe", "--always")
    for root in (checkout, built):
        monkeypatch.setattr(bench_record, "ROOT", root)
        bench_record._commit_of_files.cache_clear()
        assert bench_record._commit() == commit, root
    (built / "octetrl" / "commit.txt").unlink()
    bench_record._commit_of_files.cache_clear()
    assert bench_record._commit() in ("unknown", bench_record.version("octetrl"))
    bench_record._commit_of_files.cache_clear()

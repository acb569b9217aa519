"""The digest of the package's files: equal for a commit and a copy of it, and for nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from octetrl.telemetry.source_digest import DIGITS, digest_of_commit, main, source_digest


def git(folder: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *settings, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of three files, committed, in a repository with another file."""
    root = tmp_path / "checkout"
    package = root / "package"
    (package / "room").mkdir(parents=True)
    (root / "README.md").write_text("not of the package\n")
    (package / "a.py").write_text("A = 1\n")
    (package / "room/b.py").write_text("B = 'ä'\n", encoding="utf-8")
    (package / "room-1.json").write_text("")
    git(tmp_path, "init", "-q", str(root))
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return package


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_copy_without_git_has_the_digest_of_its_commit(package: Path, tmp_path: Path) -> None:
    commit = git(package, "rev-parse", "HEAD")
    copied = tmp_path / "elsewhere/package"
    shutil.copytree(package, copied)
    (copied / "__pycache__").mkdir()
    (copied / "__pycache__/a.pyc").write_bytes(b"compiled")
    (package.parent / "README.md").write_text("changed\n")
    digest = digest_of_commit(commit, package)
    assert digest is not None and len(digest) == DIGITS
    assert digest == source_digest(package) == source_digest(copied)
    assert digest_of_commit(commit, copied) is None and digest_of_commit("no-such-commit", package) is None

    for name, text in (("a.py", "A = 2\n"), ("new.py", ""), ("room/b.py", None)):
        changed = tmp_path / name.replace("/", "-") / "package"
        shutil.copytree(package, changed)
        (changed / name).unlink() if text is None else (changed / name).write_text(text)
        assert source_digest(changed) != digest, name


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.strip() == source_digest()
    assert main(["no-such-commit"]) == 2
    assert "no commit 'no-such-commit'" in capsys.readouterr().out

"""The digest of the package's files: equal for a commit and a copy of it, and for nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octetrl.telemetry import provenance
from octetrl.telemetry.provenance import DIGITS, LAB, SCRIPTS, digest_of_commit, main, source_digest, write_result
from tests.house.tree import REPO


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
    (copied / "recipes").mkdir()  # a copy that follows the link to the recipes
    (copied / "recipes/r.yaml").write_text("steps: 1\n")
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


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_of_a_folder_only_the_files_of_an_ending_may_count(package: Path) -> None:
    first = source_digest(package, ".py")
    assert first == digest_of_commit("HEAD", package, ".py") != source_digest(package)
    (package / "room-1.json").write_text("[]")
    assert source_digest(package, ".py") == first
    (package / "room/b.py").write_text("B = 2\n")
    assert source_digest(package, ".py") != first == digest_of_commit("HEAD", package, ".py")


def test_only_a_result_of_a_benchmark_script_has_a_digest_of_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script, of_scripts in ((LAB / "memory.py", True), (tmp_path / "octetrl", False)):
        monkeypatch.setattr(sys, "argv", [str(script)])
        record = json.loads(write_result("memory", "a", [], tmp_path).read_text())
        assert record["source_digest"] == source_digest()
        assert record.get("benchmarks_digest") == (source_digest(LAB, SCRIPTS) if of_scripts else None)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--lab"]) == 0
    assert capsys.readouterr().out.strip() == source_digest(LAB, SCRIPTS)
    assert main([]) == 0
    assert capsys.readouterr().out.strip() == source_digest()
    assert main(["no-such-commit"]) == 2
    assert "no commit 'no-such-commit'" in capsys.readouterr().out


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
    commit = git(checkout, "describe", "--always")
    for root in (checkout, built):
        monkeypatch.setattr(provenance, "ROOT", root)
        provenance._commit.cache_clear()
        assert provenance._commit() == commit, root
    (built / "octetrl" / "commit.txt").unlink()
    provenance._commit.cache_clear()
    assert provenance._commit() in ("unknown", provenance.version("octetrl"))
    provenance._commit.cache_clear()

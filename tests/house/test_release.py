"""What people get without a checkout: the wheel has every file of the package and works; image and changelog name what
is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from octetrl.version import __version__
from tests.house.tree import REPO

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCKERFILE = re.sub(r"\\\n\s*", "", (REPO / "Dockerfile").read_text(encoding="utf-8"))


def instructions(word: str) -> list[str]:
    return re.findall(rf"^{word} (.+)$", DOCKERFILE, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip builds it, with nothing written in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "egg").mkdir()
    steps = ["egg_info", "--egg-base", str(folder / "egg"), "build", "--build-base", str(folder / "build")]
    command = [sys.executable, "setup.py", "-q", *steps, "bdist_wheel", "--dist-dir", str(folder)]
    built = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    folders = os.walk(REPO / "octetrl", followlinks=True)  # recipes/ is a link
    ours = {
        (Path(folder) / name).relative_to(REPO).as_posix()
        for folder, _, names in folders
        for name in names
        if not name.endswith((".pyc", ".partial"))
    }
    assert inside - {"octetrl/commit.txt"} == ours - {"octetrl/commit.txt"}
    assert {"octetrl/recipes/recipe.schema.json", "octetrl/py.typed"} <= inside


def test_the_wheel_works_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    code = (
        "import octetrl, sys; from octetrl.cli.main import run_command\n"
        "assert octetrl.__file__.startswith(sys.argv[1]), octetrl.__file__\n"
        "for words in ('recipes', 'recipes --copy demo_grpo --to mine', 'init grpo .', 'train recipe.yaml steps=2',\n"
        "    'report runs/first', 'generate runs/first --prompt hello --max-new-tokens 2'):\n"
        "    if code := run_command(words.split()): sys.exit(f'{words}: {code}')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "installed")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    assert {path.name for path in (tmp_path / "mine").rglob("*.*")} == {
        *("demo_grpo.yaml", "demo_rl.yaml", "demo_sums.yaml", "recipe.schema.json")
    }


def test_the_image_copies_files_that_exist_and_runs_the_program_without_rights_of_root() -> None:
    copied = [path for line in instructions("COPY") for path in line.split()[:-1]]
    kept = {line[1:] for line in (REPO / ".dockerignore").read_text(encoding="utf-8").split() if line[0] == "!"}
    assert copied and all((REPO / path).exists() for path in copied) and set(copied) <= kept
    assert instructions("USER") == ["octetrl"] and instructions("ENTRYPOINT") == ['["octetrl"]']
    assert "octetrl" in PROJECT["scripts"]
    (extras,) = re.findall(r"ARG EXTRAS=(\S+)", DOCKERFILE)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    (torch,) = re.findall(r"install torch==(\S+)", DOCKERFILE)
    least = next(one.partition(">=")[2] for one in PROJECT["dependencies"] if one.startswith("torch>="))
    assert [int(part) for part in torch.split(".")[:2]] >= [int(part) for part in least.split(".")]


def test_the_changelog_has_this_version_and_the_forms_headings() -> None:
    text = (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(.+?)\]", text, flags=re.MULTILINE)[0] in ("Unreleased", __version__)
    assert __version__ in text
    headings = set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE))
    assert headings and headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}

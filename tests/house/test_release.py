"""What people get without a checkout: the wheel has every file of the package and works; image and changelog name what
is there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from octetrl.version import __version__
from tests.house.tree import REPO
from tests.required import missing

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


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_the_wheel_works_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    code = (
        "import octetrl, sys; from octetrl.cli.main import run_command\n"
        "assert octetrl.__file__.startswith(sys.argv[1]), octetrl.__file__\n"
        "for words in ('recipes', 'recipes --copy demo_grpo --to mine', 'init grpo .', 'train recipe.yaml steps=2',\n"
        "    'report runs/first', 'generate runs/first --prompt hello --max-new-tokens 2'):\n"
        "    if code := run_command(words.split()): sys.exit(f'{words}: {code}')\n"
        "import octetrl.run.demo as demo\n"
        "def stop(*_): raise KeyboardInterrupt\n"
        "demo.evaluate_checkpoint = stop  # what follows takes minutes: `make demo`\n"
        "assert run_command(['demo', '--to', 'demo']) == 130\n"
        "if len(sys.argv) > 2: sys.exit(run_command(['serve', 'runs/first', '--port', '0']))"
    )
    serves = find_spec("uvicorn") is not None
    command = [sys.executable, "-c", code, str(installed), *["serve"] * serves]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        said = list[str]()
        for line in child.stderr:  # up to the server's first one
            said.append(line)
            if address := re.findall(r"serving at (\S+)", line):
                question = {"model": "first", "prompt": "1 +", "max_tokens": 2}
                try:
                    answer = httpx.post(f"{address[0]}/completions", json=question, timeout=60.0)
                finally:
                    child.send_signal(signal.SIGTERM)
                assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0, answer.text
    assert child.returncode == 0, said
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    assert {path.name for path in (tmp_path / "mine").rglob("*.*")} == {
        *("demo_grpo.yaml", "demo_rl.yaml", "demo_sums.yaml", "recipe.schema.json")
    }
    assert "made" in (tmp_path / "demo" / "made_by_octetrl_demo").read_text()
    assert (tmp_path / "demo" / "model" / "config.json").is_file()
    if not serves:
        missing("serve", "uvicorn is not installed")
    assert any("serving at" in line for line in said)


def test_the_image_copies_files_that_exist_and_runs_the_program_without_rights_of_root() -> None:
    copied = [path for line in instructions("COPY") for path in line.split()[:-1]]
    kept = {line[1:] for line in (REPO / ".dockerignore").read_text(encoding="utf-8").split() if line[0] == "!"}
    assert copied and all((REPO / path).exists() for path in copied) and set(copied) <= kept
    assert instructions("USER") == ["10001"] and instructions("ENTRYPOINT") == ['["octetrl"]']
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

"""Commands that are refused: one line on stderr, exit code 2, nothing written. refusals.txt has them all."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octetrl.cli.main import run_command
from tests.e2e.tiny_run import make_model
from tests.house.tree import REPO
from tests.unit.telemetry.sampled_rows import write_run

EARLY, LATE = (
    [line.partition(" => ")[::2] for line in part.splitlines()[1:]]
    for part in Path(__file__).with_name("refusals.txt").read_text(encoding="utf-8").split("# refused with")[1:]
)
RECIPE = """
precision: fp8_full
model: {path: model, context_length: 128}
rollout: {prompts_per_step: 1, group_size: 2, max_prompt_tokens: 100, max_new_tokens: 8}
engine: {page_size: 16}
environment: {kind: jsonl, dataset: sums.jsonl, eval_size: 2, reward: "tests.e2e.tiny_rewards:by_text"}
cluster: {device: cpu}
logging: {console: quiet, tensorboard: false}
steps: 1
output_dir: run
"""
SUMS = "{kind: jsonl, dataset: sums.jsonl, eval_size: 2}"
FILES = {
    "r.yaml": RECIPE,
    "begun.yaml": RECIPE.replace("output_dir: run", "output_dir: begun"),
    "begun/config.yaml": RECIPE.replace("output_dir: run", "output_dir: begun"),
    "several.yaml": f"extends: r.yaml\nenvironments: {{noise: {SUMS}, exact: {SUMS}}}\n",
    "tasks.yaml": "model: {path: model}\nenvironment: {kind: jsonl, dataset: sum.jsonl}\noutput_dir: run\n",
    "empty.yaml": "",
    "cut.yaml": "model: {path",
    "words.yaml": "just words",
    "leaves.py": "import os\nos._exit(0)\n",
    "torn.jsonl": '{"prompt": "a", "answer": "b"}\n{',
    **dict.fromkeys(("file", "held/config.yaml", "page/report.html"), ""),
    **dict.fromkeys(("runs/first/config.yaml", "runs/second/config.yaml"), ""),
    "locked/lock": "4242",
}
WEIGHTS, NORM = "model.safetensors", "model.norm.weight"


def edited(file: str, **fields: object) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | fields))


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {  # what is wrong with a model folder
    "no_config": lambda folder: (folder / "config.json").unlink(),
    "no_json": lambda folder: (folder / "config.json").write_text("{"),
    "gpt2": edited("config.json", architectures=["GPT2LMHeadModel"]),
    "heads": edited("config.json", head_dim=48),
    "no_weights": lambda folder: (folder / WEIGHTS).unlink(),
    "zeros": lambda folder: (folder / WEIGHTS).write_bytes(bytes(20)),
    "lacks_norm": with_tensors(lambda tensors: tensors.pop(NORM)),
    "has_more": with_tensors(lambda tensors: tensors.update({"extra.weight": torch.zeros(2)})),
    "other_shape": with_tensors(lambda tensors: tensors.update({NORM: torch.zeros(3)})),
    "nan": with_tensors(lambda tensors: tensors[NORM].fill_(torch.nan)),
    "no_end": edited("tokenizer_config.json", eos_token=None),
    "no_tokenizer": lambda folder: [path.unlink() for path in folder.glob("*token*")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the commands name, and what they may not change."""
    folder = tmp_path_factory.mktemp("refusals")
    make_model(folder / "model")
    for name, damage in DAMAGE.items():
        damage(shutil.copytree(folder / "model", folder / "broken" / name))
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    shutil.copy(REPO / "tests/e2e/sums.jsonl", folder)
    write_run(folder / "sampled")
    with open(folder / "locked/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def contents(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Folders, and size and time of every file; caches of modules left out."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None for path in paths}


def words(command: str) -> list[str]:
    return [word.replace("{long}", "x" * 300).replace("{newline}", "\n") for word in shlex.split(command)]


@pytest.mark.parametrize(("command", "says"), LATE, ids=[command for command, _ in LATE])
def test_it_is_refused_in_one_line(
    command: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cuda" in command and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    before = contents(folder)
    monkeypatch.setattr("sys.path", [*sys.path])
    with chdir(folder):
        assert run_command(words(command)) == 2, capsys.readouterr().err
    error = capsys.readouterr().err
    assert error.startswith("octetrl: ") and error.endswith("\n") and error.count("\n") == 1, error
    assert says and all(part in error for part in says.split(" … ")), error
    assert contents(folder) == before, "something was written"


SCRIPT = """
import json, sys
sys.modules["torch"] = None  # an import of it now raises
from octetrl.cli.main import run_command
print(json.dumps([run_command(arguments) for arguments in json.loads(sys.argv[1])]))
"""


def test_what_is_missing_or_cannot_be_written_is_refused_before_torch_is_imported(folder: Path) -> None:
    before, commands = contents(folder), json.dumps([words(command) for command, _ in EARLY])
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    called = [sys.executable, "-c", SCRIPT, commands]
    run = subprocess.run(called, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [2] * len(EARLY), run.stderr
    for line, (command, says) in zip(run.stderr.splitlines(), EARLY, strict=True):
        assert says and says in line, command
    assert contents(folder) == before, "something was written"


def test_the_installed_command_exits_with_2(folder: Path) -> None:
    command = [sys.executable, "-m", "octetrl.cli.main", "train", "gone.yaml"]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=240)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "octetrl: gone.yaml: no such file; give the path of a YAML file\n"

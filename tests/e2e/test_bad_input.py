"""Bad input: each case one line on stderr, exit code 2, and nothing written."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octetrl.cli.main import run_command
from octetrl.config.schema import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.run.tiny_model import save_tokenizer
from octetrl.shapes.presets import preset_config

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
SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 320}


@pytest.fixture(scope="module")
def sound_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "model"
    folder.mkdir()
    tokenizer = save_tokenizer(["1 + 2 = 3"], folder, vocab_size=SMALL["vocab_size"])
    spec = spec_from_config(preset_config("tiny") | SMALL | {"eos_token_id": tokenizer.eos_token_id})
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train", dtype=torch.bfloat16, device="cpu")
    model.random_init(0)
    save_weights(model, folder)
    return folder


@pytest.fixture
def here(sound_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a sound recipe and a sound model."""
    shutil.copytree(sound_model, tmp_path / "model")
    shutil.copy(Path(__file__).with_name("sums.jsonl"), tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but caches and the process id in a run's lock; the top level by name, empty folders included."""
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in files if path.name != "lock" and path.parent.name != "__pycache__")
    top = {path.name: b"" for path in folder.iterdir() if path.name != "__pycache__"}
    return top | {str(path): path.read_bytes() for path in kept}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that a command is refused with; asserts that it is one line, exit code 2, and nothing written."""
    before = contents(Path("."))
    capsys.readouterr()
    code = run_command(list(arguments))
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("octetrl: ")
    assert error.endswith("\n")
    assert error.count("\n") == 1, error
    assert contents(Path(".")) == before
    return error


# --- the recipe ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no such file"),
        ("", "is empty"),
        ("model: {path", "not YAML"),
        ("\t- :", "not YAML"),
        ("just words", "this is a str"),
        (RECIPE + "stepz: 3\n", "did you mean 'steps'?"),
        (RECIPE.replace("steps: 1", "steps: many"), "steps: 'many' is not a whole number"),
        (RECIPE.replace("group_size: 2", "group_size: 1"), "no siblings"),
        (RECIPE.replace("context_length: 128", "context_length: 107"), "model.context_length: 107"),
        (RECIPE + "algorithm: {name: sft, conversations: c.jsonl}\n", "has no data for calibration"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "check"])
def test_a_bad_recipe(verb: str, text: str | None, says: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.yaml").unlink()
    if text is not None:
        Path("r.yaml").write_text(text)
    assert says in refused(capsys, verb, "r.yaml")


@pytest.mark.parametrize("override", ["rolout.group_size=4", "rollout.group_size=four", "nonsense", "seed=-1"])
def test_a_bad_override(override: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "train", "r.yaml", override)


def test_the_installed_command_exits_with_2(here: Path) -> None:
    command = [sys.executable, "-m", "octetrl.cli.main", "train", "gone.yaml"]
    repository = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "octetrl: gone.yaml: no such file; give the path of a YAML file\n"


# --- the model folder ---------------------------------------------------------------------------------------


def edit_config(**fields: object) -> None:
    path = Path("model/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file("model/model.safetensors")
    change(tensors)
    save_file(tensors, "model/model.safetensors")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda: shutil.rmtree("model"), "model"),
        (lambda: Path("model/config.json").unlink(), "config.json"),
        (lambda: Path("model/config.json").write_text("{"), "JSON"),
        (lambda: edit_config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
        (lambda: edit_config(head_dim=48), "head size"),
        (lambda: Path("model/model.safetensors").unlink(), "safetensors"),
        (lambda: Path("model/model.safetensors").write_bytes(b"\x00" * 20), "safetensors"),
        (lambda: edit_weights(lambda tensors: tensors.pop(NORM)), NORM),
        (lambda: edit_weights(lambda tensors: tensors.update({"extra.weight": torch.zeros(2)})), "extra.weight"),
        (lambda: edit_weights(lambda tensors: tensors.update({NORM: torch.zeros(3)})), NORM),
        (lambda: edit_weights(lambda tensors: tensors[NORM].fill_(torch.nan)), NORM),
    ],
)
def test_a_bad_model_folder(
    damage: Callable[[], object], says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage()
    assert says in refused(capsys, "train", "r.yaml")


def test_a_tokenizer_without_an_end(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("model/tokenizer_config.json")
    settings = json.loads(path.read_text())
    settings["eos_token"] = None
    path.write_text(json.dumps(settings))
    assert "no EOS token" in refused(capsys, "train", "r.yaml")


def test_a_model_folder_without_tokenizer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in Path("model").glob("*token*"):
        path.unlink()
    assert "tokenizer" in refused(capsys, "train", "r.yaml")


@pytest.mark.parametrize(
    "arguments",
    [["eval", "gone", "--recipe", "r.yaml"], ["generate", "gone", "-p", "x"], ["export", "gone", "--to", "out"]],
)
def test_a_target_that_is_not_there(arguments: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "gone" in refused(capsys, *arguments)


def test_export_into_a_folder_in_use(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not empty" in refused(capsys, "export", "model", "--to", ".")


def test_export_where_no_folder_can_be(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in ("r.yaml", "r.yaml/out"):
        assert "--to: cannot write '" in refused(capsys, "export", "model", "--to", target)


def test_an_answer_longer_than_the_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "generate", "model", "-p", "x", "--max-new-tokens", "5000")
    assert said.startswith("octetrl: --max-new-tokens: ")


# --- the environment ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("environment.dataset=chain_sun", "did you mean 'chain_sum'"),
        ("environment.parameters={max_termz: 3}", "did you mean 'max_terms'"),
        ("environment.reward=no_such_module:reward", "no_such_module"),
        ("environment.reward=json:no_such_function", "no_such_function"),
    ],
)
def test_a_bad_environment(override: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generated = ["environment.kind=reasoning_gym", "environment.dataset=chain_sum", "environment.reward=null"]
    assert says in refused(capsys, "train", "r.yaml", *(generated if says.startswith("did") else []), override)


def test_a_gate_that_could_never_end_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate = "mismatch.fail_on_difference=true"
    said = refused(capsys, "train", "r.yaml", "precision=fp8_rollout", gate)
    assert "mismatch.fail_on_difference: true" in said and "FP8 on one side only" in said
    allowed = refused(capsys, "train", "r.yaml", "mismatch.fail_on_difference=maybe")
    assert "'maybe' is not allowed; choose one of auto, true, false" in allowed


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (["environment.reward=leaves:f"], "could not load the reward (the process exited with code 0)"),
        (["environment.kind=python", "environment.dataset=leaves:f"], "module 'leaves' ends its process when imported"),
    ],
)
@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_module_that_ends_its_process_does_not_end_the_run(
    verb: str, override: list[str], says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("leaves.py").write_text("import os\nos._exit(0)\n")
    assert says in refused(capsys, verb, "r.yaml", *override)


@pytest.mark.parametrize(
    ("text", "says"), [(None, "tasks.jsonl"), ("", "tasks.jsonl"), ('{"prompt": "a", "answer": "b"}\n{', "2")]
)
def test_a_bad_file_of_tasks(text: str | None, says: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        Path("tasks.jsonl").write_text(text)
    overrides = ["environment.kind=jsonl", "environment.dataset=tasks.jsonl"]
    assert says in refused(capsys, "train", "r.yaml", *overrides)


# --- the output folder and the device -----------------------------------------------------------------------


def test_an_output_folder_that_holds_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    shutil.copy("r.yaml", "run/config.yaml")
    assert "--resume" in refused(capsys, "train", "r.yaml")
    assert "another recipe: seed is 9, was 0" in refused(capsys, "train", "r.yaml", "seed=9", "--resume")


def test_an_output_folder_in_use_by_a_live_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    with open("run/lock", "w") as lock:
        lock.write("4242")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use by a live run (process 4242)" in refused(capsys, "train", "r.yaml")


def test_nothing_to_resume(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no run" in refused(capsys, "train", "r.yaml", "--resume")


def test_an_output_folder_that_cannot_be(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "output_dir" in refused(capsys, "train", "r.yaml", "output_dir=r.yaml/run")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no usable GPU" in refused(capsys, "train", "r.yaml", "cluster.device=cuda")
    assert "no usable GPU" in refused(capsys, "generate", "model", "-p", "x", "--device", "cuda")

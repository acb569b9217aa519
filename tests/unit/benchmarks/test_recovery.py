"""`benchmarks.recovery` on a process that writes and says what a run would."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.recovery import Watched, check_disk, find_model, main, measure, recover, write_model
from benchmarks.recovery_reward import varied
from octetrl.config.load import load_recipe
from octetrl.config.schema import ModelConfig, OptimizerConfig, Recipe, TrainerConfig
from octetrl.data.tokenizer import load_tokenizer
from octetrl.models.families import load_spec
from octetrl.models.weight_files import SINGLE
from octetrl.system.errors import UserError

SHORT = ("--model", "tiny", "--answer-tokens", "64")
RUN = """
import json, subprocess, sys, time
from pathlib import Path
folder, resumed, done, code, usual = Path(sys.argv[1]), *map(int, sys.argv[2:])

def step(number):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": number, "time/step": usual, "mismatch/max_abs_diff": 0.1 * number}) + "\\n")

def steps(first, last):
    for number in range(first, last + 1):
        step(number)

worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
(folder / "workers.json").write_text(json.dumps({"workers": [{"pid": 1}, {"pid": worker.pid}]}))
steps(1, 2)
time.sleep(0.5 * (done > 2)), steps(3, done)
(folder / "checkpoints" / "step_000002").mkdir(parents=True)
worker.wait()
time.sleep(0.2), print("worker 1 ended\\n  building all workers again")
time.sleep(0.4), print(f"resumed after step {resumed} from a folder")
(folder / "metrics.jsonl").write_text("")
steps(1, resumed)
time.sleep(0.3), steps(resumed + 1, 4)
sys.exit(code)
"""


def watched(folder: Path, *, resumed: int = 2, done: int = 2, code: int = 0, usual: int = 1) -> Watched:
    """A run that saves step 2 when `done` steps have ended, and ends with `code`. usual: seconds of a step, as its
    metrics have it."""
    numbers = [str(number) for number in (resumed, done, code, usual)]
    return Watched([sys.executable, "-c", RUN, str(folder), *numbers], folder)


def test_the_times_of_a_killed_worker(tmp_path: Path) -> None:
    """A step takes 60 s by its metrics, so that much of it is left on any machine when its worker is killed. A line
    may be read late, and then the next part is short by that; from the kill on no moment is early."""
    found = measure(watched(tmp_path, usual=60), after=0.01)
    notice, build, step = (found[f"recovery/{part}_seconds"] for part in ("notice", "build", "step"))
    assert notice >= 0.2 and notice + build >= 0.6 and notice + build + step >= 0.9
    assert min(build, step) > 0.0 and found["time/step"] == 60
    assert found["recovery/steps_again"] == 1 and found["mismatch/max_abs_diff"] == 0.4
    left = notice + build + step - found["recovery/lost_seconds"]
    assert 0 < left < 59.45, "of the step when it is killed after 0.6 s"


def test_a_worker_is_killed_only_when_the_checkpoint_is_complete(tmp_path: Path) -> None:
    """It took longer than the third step, so the third and the fourth step are lost."""
    found = measure(watched(tmp_path, done=3), after=0.0)
    assert found["recovery/steps_again"] == 2


def test_a_step_that_ended_first_measures_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="had ended before its worker was missed"):
        measure(watched(tmp_path, resumed=3), after=0.2)


def test_a_run_that_fails_later_is_an_error_and_leaves_no_process(tmp_path: Path) -> None:
    run = watched(tmp_path, code=3)
    with pytest.raises(UserError, match="recovered, and then ended with exit code 3:"):
        measure(run, after=0.0)
    assert run.process.poll() == 3


def test_the_weights_of_a_preset_are_a_models_folder(tmp_path: Path) -> None:
    spec, folder = find_model("tiny")
    assert folder is None
    write_model(spec, tmp_path / "model")
    assert find_model(str(tmp_path / "model")) == (load_spec(tmp_path / "model"), tmp_path / "model")
    assert load_spec(tmp_path / "model").num_parameters == spec.num_parameters
    assert load_tokenizer(tmp_path / "model", spec.vocab_size).eos_token_id is not None
    weights = load_file(tmp_path / "model" / SINGLE)
    norms = [weights[f"model.{name}.weight"] for name in ("norm", "layers.0.input_layernorm")]
    assert all(bool((norm == 1).all()) for norm in norms)
    weight = weights["model.layers.0.mlp.down_proj.weight"].float()
    assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.05)
    assert weight.unique(dim=0).shape == weight.shape, "no two rows are equal"


def test_the_run_has_the_changes_and_may_restart_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[list[str], Path]] = []
    monkeypatch.setattr("benchmarks.recovery.Watched", lambda command, folder: runs.append((command, folder)))
    monkeypatch.setattr("benchmarks.recovery.measure", lambda _, after: {"after": after})
    asked = Namespace(model="tiny", precision="fp8", gpus=None, cpus=2, prompts=3, group=2, answer_tokens=8)
    recipe, found = recover(Namespace(after=0.3, changes=["seed=7", "rollout.group_size=4"], **vars(asked)), tmp_path)
    ((command, folder),) = runs
    at = command.index("train")
    assert load_recipe(command[at + 1], command[at + 2 :]) == recipe and recipe.seed == 7
    assert folder == Path(recipe.output_dir) and found == {"after": 0.3}
    assert recipe.cluster.max_restarts == 1, "after the kill the run goes on, and it ends if that fails"


def test_siblings_have_different_rewards() -> None:
    assert {varied(None, "") for _ in range(2000)} == set(range(11))


def test_a_run_that_ends_is_named_with_its_last_lines(tmp_path: Path) -> None:
    run = Watched([sys.executable, "-c", "print('recipe: no such key')"], tmp_path)
    with pytest.raises(UserError, match="ended before step 2: recipe: no such key"):
        measure(run, after=0.2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cpus", "2", *SHORT, "trainer.epoch=2"], "did you mean"),
        (["--cpus", "2", "--model", "tiy"], "--model: 'tiy' is neither a folder nor one of the presets"),
        (["--cpus", "2", "--after", "1.5"], "--after: 1.5 is out of range"),
        (["--cpus", "2", "--folder", "/no/such"], "--folder: '/no/such' is not a folder"),
        (["--cpus", "2", "--name", "../x"], "--name: '../x' cannot be part of a file name"),
        (["--cpus", "2", "--out", "/dev/null"], "--out: '/dev/null' is a file"),
        (["--cpus", "2", "--model", ""], "'' names no model"),
        (["--cpus", "2", "--model", "tiny"], "--answer-tokens: 1024 is too long for tiny; give "),
        (["--cpus", "2", *SHORT, "steps=3"], "steps: 3 are too few"),
        (["--cpus", "2", *SHORT, "cluster.cpus=1"], "a run of one worker cannot go on without it; give 2 or more"),
        (["--cpus", "2", *SHORT, "cluster.address=here:6379"], "cluster.address: a worker is killed by its number"),
        (["--gpus", "4000"], "4000 GPUs were asked for, this machine has"),
    ],
)
def test_bad_settings_are_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], says: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["recovery", *words])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UserError) as ended:
        main()
    assert says in str(ended.value) and "\n" not in str(ended.value) and not list(tmp_path.iterdir())
    assert str(tmp_path) not in str(ended.value)


def test_no_worker_is_killed_of_a_run_that_has_ended(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        (tmp_path / "workers.json").write_text(json.dumps({"workers": [{"pid": bystander.pid}]}))
        run = Watched([sys.executable, "-c", ""], tmp_path)
        run.process.wait()
        with pytest.raises(UserError, match="the last worker had ended before it was killed"):
            run.kill_last_worker()
        assert bystander.poll() is None
    finally:
        bystander.kill()


def test_a_disk_that_is_too_small_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = find_model("qwen3-8b")
    recipe = Recipe(
        model=ModelConfig(preset="tiny", init="random"),
        trainer=TrainerConfig(optimizer=OptimizerConfig(states="8bit", master="stochastic_rounding")),
    )
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((90e9, True), (70e9, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free: usage._replace(free=int(free)))
        with (
            nullcontext()
            if fits
            else pytest.raises(UserError, match="--folder: model and checkpoints take about 82 GB")
        ):
            check_disk(recipe, spec, tmp_path, writes_model=True)

"""A run that was cut off and resumed equals one that never was: the same metrics, rollouts and weights, to the bit.

Cut off by what may happen: `kill -9` at any moment and at every stage of writing a checkpoint, Ctrl-C, an error in the
middle of a step. What cannot be resumed is refused by name.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from octetrl.cli.main import run_command
from octetrl.run.loop import train
from octetrl.system.errors import UserError
from octetrl.telemetry.console import Console
from octetrl.trainer import checkpoint
from octetrl.workers.worker import Worker
from tests.e2e import killed_run
from tests.e2e.killed_run import Kill
from tests.e2e.terminal import run_on_terminal
from tests.e2e.tiny_run import read_lines, recipe_tree, run, timeless, tiny_recipe

pytestmark = pytest.mark.usefixtures("rewards_here")
STEPS = 5
CHANGES: dict[str, Any] = {
    "steps": STEPS,
    "checkpoint.every": 1,
    "evaluation.every": 2,
    "rollout.max_new_tokens": 6,
    "trainer.minibatches": 2,
    "algorithm.kl_coefficient": 0.01,
    "trainer.optimizer.warmup_steps": 2,
}


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never cut off."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(model, folder, CHANGES)
    return folder


def assert_equal_runs(folder: Path, whole: Path) -> None:
    """Metrics less what the clock says, rollouts and the last checkpoint's tensors."""
    assert timeless(read_lines(folder / "metrics.jsonl")) == timeless(read_lines(whole / "metrics.jsonl"))
    names = sorted(path.name for path in (whole / "rollouts").iterdir())
    assert sorted(path.name for path in (folder / "rollouts").iterdir()) == names
    for name in names:
        assert (folder / "rollouts" / name).read_bytes() == (whole / "rollouts" / name).read_bytes()
    ours, theirs = (checkpoint.load(place / "checkpoints" / f"step_{STEPS:06d}") for place in (folder, whole))
    assert set(ours.files) == set(theirs.files)
    for name in ours.files:
        assert (ours.folder / name).read_bytes() == (theirs.folder / name).read_bytes(), name
    assert not list((folder / "checkpoints").glob(".*"))


def test_kept_prefixes_resume_equal(model: Path, tmp_path: Path) -> None:
    """A checkpoint has no pages, so the run that goes on has none after it either."""
    changes = {"steps": 4, "checkpoint.every": 2, "precision": "bf16", "engine.prefix_cache": "keep"}
    changes |= {"trainer.optimizer.lr": 0.01, "rollout.system_prompt": "Say a number. " * 4}
    changes |= {"model.context_length": 256, "rollout.max_prompt_tokens": 200, "engine.kv_cache_tokens": 4096}
    lines = run(model, tmp_path / "whole", changes)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_000004")
    train(tiny_recipe(model, tmp_path / "cut", changes), resume=True)
    assert timeless(read_lines(tmp_path / "cut" / "metrics.jsonl")) == timeless(lines)
    assert lines[1]["mismatch/max_abs_diff"] > 0, "step 2 read pages of step 1"


# --- kill -9 ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_at_random_moments(model: Path, whole: Path, tmp_path: Path) -> None:
    tree = recipe_tree(model, tmp_path / "run", CHANGES)
    moments = [random.uniform(0.5, 2.5) for _ in range(6)]  # the seed is the test's; the machine's clock does the rest
    for seconds in moments:
        process = killed_run.start(tree)
        process.join(seconds)
        process.kill()
        process.join()
        print(f"killed after {seconds:.3f} s:", sorted(path.name for path in (tmp_path / "run").rglob("*")))
    process = killed_run.start(tree)
    process.join()
    assert process.exitcode == 0
    assert_equal_runs(tmp_path / "run", whole)


HIDDEN = "checkpoints/.step_00000{}.partial"
STAGES = [
    ("run.json is written aside", Kill("fsync", "run.json.partial")),
    ("run.json stands, config.yaml is written aside", Kill("replace", "config.yaml")),
    ("the rollouts of step 1 have no name yet", Kill("replace", "step_000001.jsonl")),
    ("its metrics are not on the disk", Kill("fsync", "metrics.jsonl")),
    ("files of its checkpoint are missing", Kill("fsync", HIDDEN.format(1) + "/optimizer.safetensors")),
    ("step 2 has run before the manifest of step 1 is there", Kill("fsync", HIDDEN.format(1) + "/manifest.json")),
    ("the checkpoint is whole and hidden", Kill("rename", "checkpoints/step_000001")),
    ("the checkpoint of step 1 stands; the folder is not synced", Kill("fsync", "/checkpoints")),
    ("the rollouts of step 3 have no name yet", Kill("replace", "step_000003.jsonl")),
    ("the oldest is about to go", Kill("rename", ".step_000001.removed")),
]


@pytest.mark.slow
def test_killed_at_each_stage_of_writing(model: Path, whole: Path, tmp_path: Path) -> None:
    """One attempt after the other, each going on from what the one before left."""
    tree = recipe_tree(model, tmp_path / "run", CHANGES)
    for stage, kill in STAGES:
        process = killed_run.start(tree, kill=kill)
        process.join()
        assert process.exitcode == -signal.SIGKILL, stage
    process = killed_run.start(tree)
    process.join()
    assert process.exitcode == 0
    assert_equal_runs(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("first", [2, 4])
def test_killed_while_steps_run_ahead_of_a_save(first: int, model: Path, whole: Path, tmp_path: Path) -> None:
    """The disk never takes the checkpoint of step `first`: the step after it has its line in metrics.jsonl."""
    folder = tmp_path / "run"
    held = HIDDEN.format(first)
    kill = Kill("replace", f"step_00000{first + 2}.jsonl", while_held=f"{held}/manifest.json")
    if first == 4:
        kill = Kill("replace", "step_000005.jsonl", while_held=f"{held}/manifest.json")
    process = killed_run.start(recipe_tree(model, folder, CHANGES | {"checkpoint.every": 2}), kill=kill)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")][-1] == min(first + 1, 4)
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {Path(held).name} | ({"step_000002"} if first == 4 else set())
    train(tiny_recipe(model, folder, CHANGES), resume=True)
    assert_equal_runs(folder, whole)


# --- Ctrl-C -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_ends_the_step_and_saves(model: Path, whole: Path, tmp_path: Path) -> None:
    """On a terminal, which is left as it was."""
    recipe, pressed = tmp_path / "r.yaml", []
    recipe.write_text(yaml.safe_dump(recipe_tree(model, tmp_path / "run", CHANGES | {"checkpoint.every": 0})))
    words = ["train", str(recipe), "logging.console=auto", "steps=400"]

    def on_screen(lines: list[str], press: Callable[[], None]) -> None:
        if not pressed and any(line.startswith("step ") for line in lines):
            pressed.append(press())

    command = [sys.executable, "-m", "octetrl", *words]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = run_on_terminal(command, tmp_path, environment, on_screen, columns=400)
    text, metrics = "\n".join(ended.screen), tmp_path / "run" / "metrics.jsonl"
    assert ended.code == 130 and "stopping after this step" in text, text
    last = read_lines(metrics)[-1]["step"]
    said = f"octetrl: stopped; step {last} is saved; continue with: octetrl {' '.join(words)} --resume"
    assert ended.screen[-2:] == [said, ""] and f"step {last:>3}/400" in text
    assert ended.shows_cursor and not re.search("[━─]|PyTorch", text), text
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") == tmp_path / "run" / "checkpoints" / f"step_{last:06d}"
    if last <= STEPS:
        assert run_command(["train", str(recipe), "--resume"]) == 0
        assert timeless(read_lines(metrics)) == timeless(read_lines(whole / "metrics.jsonl"))


def test_ctrl_c_between_two_steps_saves_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not on a terminal, as the line of step 1 is written."""
    recipe, folder, show = tmp_path / "r.yaml", tmp_path / "run", Console.step
    recipe.write_text(yaml.safe_dump(recipe_tree(model, folder, CHANGES | {"checkpoint.every": 0})))

    def press(console: Console, step: int, *given: Any, **options: Any) -> None:
        show(console, step, *given, **options)
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Console, "step", press)
    before, words = signal.signal(signal.SIGINT, signal.default_int_handler), ["train", str(recipe)]
    try:
        assert run_command([*words, "logging.console=plain"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    last = read_lines(folder / "metrics.jsonl")[-1]["step"]
    assert f"step {last}/{STEPS}" in out and "stopping after this step" in err
    said = f"octetrl: stopped; step {last} is saved; continue with: octetrl {' '.join(words)} logging.console=plain"
    assert err.splitlines()[-1] == f"{said} --resume"
    assert checkpoint.latest(folder / "checkpoints") == folder / "checkpoints" / f"step_{last:06d}"


# --- an error in the middle of a step -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "saved"), [("generate", 2), ("train", 2), ("publish", 0)], ids=["rollout", "train", "publish"]
)
def test_an_error_within_a_step(
    verb: str,
    saved: int,
    model: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In step 3: the two before are saved, unless the weights had changed already."""
    recipe = tiny_recipe(model, tmp_path / "run", CHANGES | {"checkpoint.every": 0, "evaluation.every": 0})
    method = getattr(Worker, verb)

    def fails(worker: Worker, *args: Any) -> Any:
        if len(list((tmp_path / "run" / "rollouts").glob("*"))) == (2 if verb == "generate" else 3):
            raise RuntimeError("the lights went out")
        return method(worker, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, verb, fails)
        with pytest.raises(RuntimeError, match="the lights went out"):
            train(recipe)
    assert "cut off in step 3" in capsys.readouterr().err
    latest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert (latest.name if latest else None) == (f"step_{saved:06d}" if saved else None)
    train(recipe, resume=True)
    expected = [
        {name: value for name, value in line.items() if not name.startswith("eval/")}
        for line in read_lines(whole / "metrics.jsonl")
    ]
    assert timeless(read_lines(tmp_path / "run" / "metrics.jsonl")) == timeless(expected)


# --- what is refused, and what may change -------------------------------------------------------------------


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", _alter),
        ("optimizer.safetensors", _truncate),
        ("cursor.json", Path.unlink),
        ("manifest.json", _truncate),
        ("manifest.json", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    name: str, damage: Callable[[Path], None], whole: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / f"step_{STEPS:06d}"
    damage(last / name)
    if damage is not _alter:  # found without reading the files
        monkeypatch.setattr("octetrl.run.loop.build_run", lambda *_, **__: pytest.fail("something was built"))
    with pytest.raises(UserError) as refusal:
        train(tiny_recipe(model, tmp_path / "run", CHANGES), resume=True)
    assert f"{last}: {name}" in str(refusal.value)
    assert f"goes on from step_{STEPS - 1:06d}" in str(refusal.value)


def test_steps_may_be_raised(whole: Path, model: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "run", CHANGES | {"steps": 2})
    train(tiny_recipe(model, tmp_path / "run", CHANGES), resume=True)
    assert_equal_runs(tmp_path / "run", whole)


def test_a_run_at_its_end_has_nothing_left_to_do(whole: Path, model: Path, tmp_path: Path) -> None:
    """Except for what a process left that was killed while it removed a checkpoint."""
    shutil.copytree(whole, tmp_path / "run")
    for suffix in (".partial", ".removed"):
        (tmp_path / "run" / "checkpoints" / f".step_000001{suffix}" / "part").mkdir(parents=True)
    train(tiny_recipe(model, tmp_path / "run", CHANGES), resume=True)
    assert_equal_runs(tmp_path / "run", whole)


def test_every_option_with_a_state_survives_a_resume(model: Path, tmp_path: Path) -> None:
    """Stochastic rounding draws, dynamic scales and a decaying learning rate."""
    changes = {
        "steps": 4,
        "precision": "fp8",
        "fp8.kv_cache": "dynamic",
        "trainer.optimizer.master": "stochastic_rounding",
        "trainer.optimizer.decay": "cosine",
        "trainer.epochs": 2,
        "checkpoint.every": 2,
    }
    expected = run(model, tmp_path / "whole", changes)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000004")
    train(tiny_recipe(model, tmp_path / "run", changes), resume=True)
    assert timeless(read_lines(tmp_path / "run" / "metrics.jsonl")) == timeless(expected)
    ours, theirs = (load_file(tmp_path / n / "checkpoints/step_000004/model.safetensors") for n in ("run", "whole"))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


# --- a full disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["rollouts/step_000002", "checkpoints/.step_000002", "metrics.jsonl", "config.yaml"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    at: str,
    model: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(recipe_tree(model, tmp_path / "run", CHANGES)))
    sync = os.fsync

    def full(descriptor: int) -> None:
        if at in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert run_command(["train", str(recipe)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("octetrl: ")
    assert "space left" in error.lower()
    if at == "config.yaml":
        assert not (tmp_path / "run").exists()
        return
    assert run_command(["train", str(recipe), "--resume"]) == 0
    assert_equal_runs(tmp_path / "run", whole)


def test_a_recipe_begins_from_a_run(model: Path, tmp_path: Path) -> None:
    """The weights of the new run's start are those that the other run ended with."""
    run(model, tmp_path / "first", {"steps": 2, "checkpoint.every": 1})
    run(Path(f"{tmp_path / 'first'}@1"), tmp_path / "branch", {"steps": 1, "trainer.optimizer.lr": 0.0})
    saved = [
        tmp_path / folder / "checkpoints" / step / "model.safetensors"
        for folder, step in (("first", "step_000001"), ("branch", "step_000001"), ("first", "step_000002"))
    ]
    first, branch, later = (load_file(path) for path in saved)
    assert all(torch.equal(first[name], branch[name]) for name in first)
    assert any(not torch.equal(first[name], later[name]) for name in first)
    assert "checkpoints/step_000001" in (tmp_path / "branch/config.yaml").read_text()


Finished = Callable[[str], Path]


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> str:
    """Of one step with a learning rate that warms up, so that the start of the schedule is seen."""
    changes = {"precision": "fp8_full", "steps": 1, "seed": 9, "trainer.optimizer.warmup_steps": 4}
    path = tmp_path / "r.yaml"
    tree = recipe_tree(model, tmp_path / "run", changes)
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def test_a_branch_with_optimizer_and_one_without(recipe: str, finished: Finished, tmp_path: Path) -> None:
    source = finished("fp8_full")
    states, lines = {}, {}
    for name, options in {"alone": [], "both": ["--with-optimizer"]}.items():
        words = ["train", recipe, f"output_dir={tmp_path / name}", "--from", f"{source}@2", *options]
        assert run_command(words) == 0
        states[name] = load_file(tmp_path / name / "checkpoints" / "step_000001" / "optimizer.safetensors")
        (lines[name],) = read_lines(tmp_path / name / "metrics.jsonl")
    assert int(states["alone"]["step_count"]) == 1 and int(states["both"]["step_count"]) == 3
    assert lines["alone"]["reward/mean"] == lines["both"]["reward/mean"]  # the same weights drew the same answers
    assert lines["alone"]["lr"] == lines["both"]["lr"] == pytest.approx(1e-3 / 4)
    assert all(line["mismatch/unequal_tokens"] == 0 for line in lines.values())
    saved = yaml.safe_load((tmp_path / "both" / "config.yaml").read_text())
    assert saved["model"]["path"].endswith("checkpoints/step_000002")


def test_what_is_no_run_is_refused(
    recipe: str, finished: Finished, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(finished("fp8_full"))
    for options, says in [
        (["--from", str(model)], "is no run, RUN@STEP or checkpoint; for another model set model.path"),
        (["--from", f"{source}@7"], "the run has no checkpoint of step 7; it has 2, 3"),
        (["--from", source, "model.path=x"], "--from: 'model.path=x' names other weights"),
        (["--with-optimizer"], "--with-optimizer: it belongs to --from RUN"),
    ]:
        assert run_command(["train", recipe, *options]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1, error
    assert not (tmp_path / "run").exists()


TASKS = Path(__file__).with_name("sums.jsonl")
DRAFTED: dict[str, Any] = {
    "engine.speculation": {"name": "ngram", "ngrams": [2, 1], "min_gain": 0.0, "max_draft_tokens": 3},
    "engine.max_batch": 32,
    "environment.eval_size": 1,
    "evaluation.every": 1,
    "checkpoint.every": 1,
    "checkpoint.keep_last": 4,
    "steps": 4,
}


@pytest.fixture(scope="module")
def drafting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that meets two tasks again and again."""
    folder = tmp_path_factory.mktemp("drafted")
    (folder / "tasks.jsonl").write_text("".join(TASKS.read_text().splitlines(keepends=True)[1:4]))
    run(model, folder / "run", DRAFTED | {"environment.dataset": str(folder / "tasks.jsonl")})
    return folder / "run"


def resumed(model: Path, drafting: Path, folder: Path, drafted: dict[str, Any] = DRAFTED) -> list[dict[str, Any]]:
    """The metrics of a run that goes on from step 3 of `drafting`, with the rollouts and evaluations that it finds."""
    shutil.rmtree(folder / "checkpoints/step_000004")
    changes = drafted | {"environment.dataset": str(drafting.parent / "tasks.jsonl")}
    train(tiny_recipe(model, folder, changes), resume=True)
    drawn = [[row["token_ids"] for row in read_lines(one / "rollouts/step_000004.jsonl")] for one in (folder, drafting)]
    assert drawn[0] == drawn[1]
    return timeless(read_lines(folder / "metrics.jsonl"))


def test_a_resumed_run_makes_the_same_drafts(model: Path, drafting: Path, tmp_path: Path) -> None:
    shutil.copytree(drafting, tmp_path / "run")
    metrics = resumed(model, drafting, tmp_path / "run")
    assert metrics == timeless(read_lines(drafting / "metrics.jsonl"))
    assert metrics[-1]["rollout/drafted_tokens"] > 0


def test_answers_that_cannot_be_read_are_named(
    model: Path, drafting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = shutil.copytree(drafting, tmp_path / "run") / "rollouts"
    (rollouts / "step_000001.jsonl").unlink()
    (rollouts / "step_000003.jsonl").write_text("{")
    metrics = resumed(model, drafting, tmp_path / "run")
    assert metrics[-1] != timeless(read_lines(drafting / "metrics.jsonl"))[-1], "fewer answers, other drafts"
    said = capsys.readouterr().err
    assert f"{rollouts} has no rollouts of step 1: no drafts are made from their answers" in said
    assert f"{rollouts / 'step_000003.jsonl'}, line 1: " in said and "no drafts are made from its answers" in said

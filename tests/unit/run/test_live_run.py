"""Models of runs that still train, and folders that two programs write: the whole of one model, or one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.load import recipe_from_mapping
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.records import SamplingParams
from octetrl.run import evaluate, generate
from octetrl.run.export import export_run
from octetrl.run.folder.layout import CHECKPOINTS
from octetrl.run.generate import generate_text, load_standing_model
from octetrl.run.tiny_model import write_tokenizer
from octetrl.run.trained_model import read_model
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError
from octetrl.trainer import checkpoint
from tests.saved_checkpoint import save_checkpoint

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 320}
SPEC = spec_from_config(preset_config("tiny") | SMALL)


def write_model(folder: Path, seed: int) -> None:
    decoder = Decoder(SPEC, precision_policy(SPEC, Fp8Config()), "train")
    decoder.random_init(seed)
    save_weights(decoder, folder)
    write_tokenizer(["one two three"], folder)


class Training:
    """A run folder with one checkpoint, in which a training run goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step = folder, 0
        (folder / CHECKPOINTS).mkdir(parents=True)
        self.next()

    def next(self) -> None:
        """Save the next step and prune the one before it."""
        self.step += 1
        save_checkpoint(self.folder / CHECKPOINTS, self.step, {}, write_more=lambda to: write_model(to, self.step))
        checkpoint.remove_hidden(checkpoint.prune(self.folder / CHECKPOINTS, keep_last=1))

    def before(self, called: Callable[..., Any], times: int) -> Callable[..., Any]:
        """`called`, with a further step before each of its first `times` calls."""
        left = [None] * times

        def after_a_step(*arguments: Any, **options: Any) -> Any:
            if left:
                left.pop()
                self.next()
            return called(*arguments, **options)

        return after_a_step


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "run")


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same_weights(folder: Path, other: Path) -> bool:
    mine, its = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    return mine.keys() == its.keys() and all(mine[name].equal(its[name]) for name in mine)


def test_an_export_takes_the_new_last_checkpoint(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "copyfile", training.before(shutil.copyfile, times=1))
    export_run(str(training.folder), str(tmp_path / "out"))
    assert same_weights(tmp_path / "out", training.folder / CHECKPOINTS / "step_000002")
    assert files_of(tmp_path) == ["out", "run"]


@pytest.mark.parametrize(("times", "asked"), [(9, ""), (1, "@1")])
def test_a_checkpoint_that_stays_pruned_is_one_line(
    times: int, asked: str, training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is faster than the export, or one step was asked for."""
    monkeypatch.setattr(shutil, "copyfile", training.before(shutil.copyfile, times))
    with pytest.raises(UserError, match=r"step_00000\d' was deleted while it was read.*checkpoint\.keep_last"):
        export_run(f"{training.folder}{asked}", str(tmp_path / "out"))
    assert files_of(tmp_path) == ["run"]


def test_generation_takes_the_new_last_checkpoint(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is pruned before its tokenizer is read, and the next one before its weights are."""
    sampling = SamplingParams(max_new_tokens=2)
    monkeypatch.setattr(generate, "load_tokenizer", training.before(generate.load_tokenizer, times=1))
    assert len(generate_text(str(training.folder), ["one"], sampling, cluster={"device": "cpu"})) == 1
    monkeypatch.setattr(generate, "build_workers", training.before(generate.build_workers, times=1))
    assert len(generate_text(str(training.folder), ["one"], sampling, cluster={"device": "cpu"})) == 1
    monkeypatch.setattr(generate, "load_tokenizer", training.before(generate.load_tokenizer, times=1))
    load_standing_model(str(training.folder), precision="bf16", cluster={"device": "cpu"}).close()
    assert training.step == 4


def test_an_evaluation_takes_the_new_last_checkpoint(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "build_run", training.before(evaluate.build_run, times=1))
    recipe = recipe_from_mapping(
        {
            "model": {"path": str(training.folder), "context_length": 64},
            "cluster": {"device": "cpu"},
            "environment": {"dataset": "chain_sum", "eval_size": 1},
            "rollout": {"max_prompt_tokens": 60, "max_new_tokens": 2},
        }
    )
    assert len(evaluate.evaluate_checkpoint(str(training.folder), recipe).groups) == 1
    assert training.step == 2


@pytest.mark.parametrize("existed", [False, True])
def test_two_exports_into_one_folder_do_not_mix(existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins while the first copies: it is refused and removes nothing."""
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        write_model(tmp_path / str(seed), seed)
    out, copyfile, refused = tmp_path / "out", shutil.copyfile, []
    if existed:
        out.mkdir()

    def first_file(source: Path, to: Path) -> None:
        monkeypatch.setattr(shutil, "copyfile", copyfile)
        copyfile(source, to)
        try:
            export_run(str(tmp_path / "2"), str(out))
        except UserError as error:
            refused.append(str(error))

    monkeypatch.setattr(shutil, "copyfile", first_file)
    export_run(str(tmp_path / "1"), str(out))
    assert len(refused) == 1 and refused[0].startswith(f"--to: '{out}' exists")
    assert same_weights(out, tmp_path / "1")
    assert files_of(out) == files_of(tmp_path / "1") and files_of(tmp_path) == ["1", "2", "out"]


def test_an_export_takes_the_new_last_checkpoint_and_keeps_an_empty_folder(training: Training, tmp_path: Path) -> None:
    """It may be a mount point."""
    (tmp_path / "out").mkdir()
    before = (tmp_path / "out").stat().st_ino
    export_run(str(training.folder), str(tmp_path / "out"))
    assert (tmp_path / "out").stat().st_ino == before and ".partial" not in files_of(tmp_path / "out")
    folders = []

    def read(folder: Path) -> None:
        folders.append(folder.name)
        raise ValueError("of the reader")

    with pytest.raises(ValueError, match="of the reader"):
        read_model(training.folder, read)
    assert folders == ["step_000001"]

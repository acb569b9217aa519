"""A model is a folder, a run, a run at a step, or a name of the hub; any other name is reported in one line."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from octetrl.config.load import dump_recipe, recipe_from_mapping
from octetrl.config.rules_shape import spec_problems
from octetrl.run.generate import CONTEXT_LENGTH, default_context_length
from octetrl.run.model_source import found_model, recipe_of_run
from octetrl.run.recipe_files import with_found_model
from octetrl.run.report import last_screen
from octetrl.run.trained_model import weights_folder
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError
from octetrl.telemetry.report_data import read_run, results
from octetrl.trainer import checkpoint
from octetrl.workers.model_shape import model_spec
from tests.saved_checkpoint import save_checkpoint


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_there_is_taken_and_local_names_never_reach_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)  # a call would raise TypeError
    Path("Qwen/Qwen3-0.6B").mkdir(parents=True)
    for name in (
        "Qwen/Qwen3-0.6B",
        "Qwen/other",
        "models/gone",
        "runs/gone",
        "gone",
        "./a/b",
        "/a/b",
        "a/b/c",
        "a\0/b",
    ):
        assert found_model(name) == Path(name)


def test_a_run_at_a_step() -> None:
    for step in (5, 40):
        Path(f"runs/mine/checkpoints/step_{step:06d}").mkdir(parents=True)
    assert found_model("runs/mine@40") == Path("runs/mine/checkpoints/step_000040")
    assert found_model("runs/mine") == Path("runs/mine")
    for wrong in ("7", "last", ""):
        with pytest.raises(
            UserError, match=f"'runs/mine@{wrong}': the run has no checkpoint of step {wrong}; it has 5, 40"
        ):
            found_model(f"runs/mine@{wrong}")


def test_a_context_that_is_left_out_is_as_long_as_the_model_allows(here: Path) -> None:
    (here / "short").mkdir()
    (here / "short" / "config.json").write_text(json.dumps(preset_config("tiny") | {"max_position_embeddings": 512}))
    lengths = {"max_prompt_tokens": 256, "max_new_tokens": 256}
    for model, rollout, length in (
        ({"path": "short"}, lengths, 512),
        ({"path": "short", "context_length": 4096}, lengths, 4096),  # which is refused
        ({"path": "short", "context_length": 600}, lengths, 600),
        ({"path": "gone"}, lengths, 4096),
        ({"preset": "qwen3-0.6b", "init": "random", "tokenizer": "short"}, {}, 4096),
    ):
        tree = {"model": model, "rollout": rollout, "environment": {"dataset": "chain_sum"}}
        recipe = with_found_model(recipe_from_mapping(tree))
        assert recipe.model.context_length == length, model
        if "path" in model and model["path"] == "short":
            spec = model_spec(recipe)
            assert bool(list(spec_problems(recipe, spec))) is (length != 512), model
    longer = {
        "model": {"path": "short"},
        "rollout": {**lengths, "max_new_tokens": 300},
        "environment": {"dataset": "c"},
    }
    recipe = with_found_model(recipe_from_mapping(longer))
    assert [problem.fields[0] for problem in spec_problems(recipe, model_spec(recipe))] == ["model.context_length"]


def test_the_best_checkpoint_of_a_run_and_of_its_report_is_one(here: Path) -> None:
    """Of equal ones the earliest; of another run's, of those without a value and of those that are gone, none."""
    folder, tree = here / "mine", {"model": {"path": "m"}, "environment": {"dataset": "chain_sum"}}
    recipe = recipe_from_mapping(tree | {"output_dir": str(folder)})
    (folder / "checkpoints").mkdir(parents=True)
    values = {5: 0.5, 10: float("nan"), 15: 0.25, 20: 0.5}
    for step, value in values.items():
        save_checkpoint(folder / "checkpoints", step, {}, metrics={"eval/accuracy": value}, run_id="ours")
    save_checkpoint(folder / "checkpoints", 25, {}, metrics={"eval/accuracy": 0.9}, run_id="theirs")
    (folder / "run.json").write_text('{"run": "ours"}')
    (folder / "config.yaml").write_text(dump_recipe(recipe))
    lines = [{"step": step, "eval/accuracy": value} for step, value in values.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert dict(results(read_run(folder)))["best"].startswith("held-out accuracy 0.500 at step 5;")
    assert found_model(f"{folder}@best").name == weights_folder(Path(f"{folder}@best")).name == "step_000005"
    assert recipe_of_run(f"{folder}@best") == folder / "config.yaml"
    assert ("", f"{folder}@best (step 5), the best of those saved") in last_screen(folder, recipe)[1]
    checkpoint.prune(folder / "checkpoints", keep_last=1, keep_best=1, best_metric="eval/accuracy", run_id="ours")
    assert found_model(f"{folder}@best").name == "step_000005"
    (folder / "config.yaml").write_text(dump_recipe(recipe_from_mapping(tree | {"checkpoint": {"best_metric": "kl"}})))
    with pytest.raises(UserError, match="@best': no checkpoint has 'kl'"):
        found_model(f"{folder}@best")


def test_a_name_of_the_hub_is_fetched_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, "*.safetensors" in allow_patterns))
        return "cache/snapshots/0123abc"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    tree = {"model": {"path": "Qwen/Qwen3-0.6B@v1"}, "environment": {"dataset": "chain_sum"}}
    recipe = with_found_model(recipe_from_mapping(tree))
    assert recipe.model.path == "cache/snapshots/0123abc", "the commit, which the run's config.yaml keeps"
    assert found_model("Qwen/Qwen3-0.6B", weights=False) == Path("cache/snapshots/0123abc")
    assert asked == [("Qwen/Qwen3-0.6B", "v1", True), ("Qwen/Qwen3-0.6B", None, False)]


def test_without_a_network_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, **options: object) -> str:
        raise LocalEntryNotFoundError("no connection\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(UserError) as error:
        found_model("Qwen/Qwen3-0.6B")
    assert "\n" not in str(error.value)
    assert "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B, then model.path=models/Qwen3-0.6B" in str(
        error.value
    )


def test_a_run_is_served_with_its_context_length(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    recipe = "model: {path: m, context_length: 320}\nenvironment: {dataset: chain_sum}\n"
    (tmp_path / "run/config.yaml").write_text(recipe + "rollout: {max_prompt_tokens: 100, max_new_tokens: 100}\n")
    assert default_context_length(str(tmp_path / "run")) == 320
    assert default_context_length(str(tmp_path / "model")) == CONTEXT_LENGTH

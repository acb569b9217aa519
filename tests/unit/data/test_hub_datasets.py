"""Data sets of the hub by their bare names: which names are the hub's, splits, columns, and the shipped recipes.

There is no network here. `hub` is a folder with the repositories' files, and a module `datasets` whose `load_dataset`
reads from it what the hub's data set would give. Where the real package is installed, it reads the same folders.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from octetrl.config.load import load_recipe, recipe_from_mapping
from octetrl.config.schema import DataSource
from octetrl.data.conversations import Conversation
from octetrl.data.mixture import read_source
from octetrl.data.rows import read_rows
from octetrl.run.environment import build_environment, build_taskset
from octetrl.system.errors import UserError
from octetrl.system.names import HubName, hub_dataset, hub_name

SUMS = {
    "train": [{"question": f"{n} + 1?", "answer": f"{n} + 1 is\n#### {n + 1}"} for n in range(20)],
    "test": [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(18, 24)],  # two are in train too
}
MATH = {"test": [{"problem": f"Half of {n}?", "solution": "...", "answer": f"\\frac{{{n}}}{{2}}"} for n in range(30)]}
AIME = {
    "train": [{"id": 60 + n, "problem": f"Twice {n}?", "solution": "...", "answer": f"{2 * n:03d}"} for n in range(30)]
}
FILES = {
    ("openai/gsm8k", "main"): SUMS,
    ("HuggingFaceH4/MATH-500", "default"): MATH,
    ("HuggingFaceH4/aime_2024", "default"): AIME,
}


@pytest.fixture
def repositories(tmp_path: Path) -> Path:
    """Folders as on the hub: JSONL files by subset, and a README.md that says which split each is."""
    for (name, subset), splits in FILES.items():
        folder = tmp_path / "hub" / name
        (folder / subset).mkdir(parents=True)
        for split, rows in splits.items():
            (folder / subset / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = [{"split": split, "path": f"{subset}/{split}.jsonl"} for split in splits]
        head = yaml.dump({"configs": [{"config_name": subset, "data_files": files}]})
        (folder / "README.md").write_text(f"---\n{head}---\n")
    return tmp_path / "hub"


@pytest.fixture
def hub(repositories: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repositories behind `load_dataset`, as with a network."""

    def load_dataset(
        path: str, name: str | None = None, split: str = "train", revision: str | None = None
    ) -> list[dict[str, Any]]:
        folder = repositories / path
        if not folder.is_dir() or revision not in (None, "main"):
            raise FileNotFoundError(f"Dataset '{path}' doesn't exist on the Hub or cannot be accessed.")
        head = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
        (config,) = head["configs"]
        if name is None and config["config_name"] != "default":
            raise ValueError(f"Config name is missing. Please pick one among ['{config['config_name']}']")
        chosen = [files["path"] for files in config["data_files"] if files["split"] == split]
        if not chosen:
            raise ValueError(f'Unknown split "{split}"')
        return [json.loads(line) for line in (folder / chosen[0]).read_text().splitlines()]

    errors = SimpleNamespace(DatasetsError=type("DatasetsError", (Exception,), {}))
    module = SimpleNamespace(load_dataset=load_dataset, exceptions=errors)
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.chdir(repositories.parent)
    return repositories


def test_only_names_that_are_no_path_are_the_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert hub_dataset("openai/gsm8k") == HubName("openai/gsm8k", None)
    assert hub_dataset("openai/gsm8k@v2") == HubName("openai/gsm8k", "v2")
    assert hub_dataset("hf:mine/tasks@v2") == HubName("mine/tasks", "v2")
    for path in ("mine/tasks", "tasks.jsonl", "other/tasks.jsonl", "data/tasks", "a/b/c", "/a/b", "./b", "x.parquet"):
        assert hub_dataset(path) is None, path
    assert hub_name("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B", None)


def test_rows_of_a_bare_name_with_subset_and_split(hub: Path) -> None:
    rows = list(read_rows("openai/gsm8k", subset="main", split="test"))
    assert [row.record for row in rows] == SUMS["test"] and rows[1].where == "openai/gsm8k[test], row 2"
    assert [row.record for row in read_rows("hf:openai/gsm8k@main", subset="main")] == SUMS["train"]
    with pytest.raises(UserError, match=r"pick one among \['main'\]") as caught:
        list(read_rows("openai/gsm8k"))
    assert "hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k" in str(caught.value)
    with pytest.raises(UserError, match="hf download openai/gsm8k --revision v9 --repo-type"):
        list(read_rows("openai/gsm8k@v9", subset="main"))


def test_the_evaluation_split_is_held_out_and_trained_on_nowhere(hub: Path) -> None:
    recipe = load_recipe("grpo_gsm8k_qwen3-0.6b_1gpu_fp8-full", ["environment.eval_size=4"])
    environment = build_environment(recipe.environment)
    taskset = build_taskset(environment, recipe.environment)
    prompts = {task.prompt.partition("\n")[0] for task in taskset.next_batch(60)}
    assert prompts == {row["question"] for row in SUMS["train"]} - {row["question"] for row in SUMS["test"]}
    held_out = taskset.held_out()
    assert len(held_out) == 4 and all(task.id.startswith("test/") for task in held_out)
    assert {task.prompt.partition("\n")[0] for task in taskset.evaluation_sets(all_tasks=True)[""]} == {
        r["question"] for r in SUMS["test"]
    }
    assert environment.score(held_out[0], f"so \\boxed{{{held_out[0].answer}}}") == 1.0
    state = json.loads(json.dumps(taskset.state()))
    build_taskset(environment, recipe.environment).restore(state)
    other = recipe.environment.model_copy(update={"eval_split": None})
    with pytest.raises(UserError, match="tasks or seed differ"):
        build_taskset(environment, other).restore(state)


@pytest.mark.parametrize(("name", "rows"), [("eval_math500", MATH["test"]), ("eval_aime24", AIME["train"])])
def test_the_recipes_for_evaluation_read_their_columns(hub: Path, name: str, rows: list[dict[str, Any]]) -> None:
    config = load_recipe(name, ["environment.eval_size=4"], training=False).environment
    environment = build_environment(config)
    tasks = build_taskset(environment, config).evaluation_sets(all_tasks=True)[""]
    assert [task.prompt.partition("\n")[0] for task in tasks] == [row["problem"] for row in rows]
    assert environment.score(tasks[5], f"\\boxed{{{rows[5]['answer']}}}") == 1.0
    assert environment.score(tasks[5], "\\boxed{77}") == 0.0


def test_conversations_of_the_hub_with_columns_inside_objects(hub: Path) -> None:
    config = DataSource(path="openai/gsm8k", subset="main", split="test", columns={"prompt": "question"})
    source = read_source("sums", config, "conversations")
    assert source.examples[0] == Conversation("18 + 1?", "#### 19") and len(source.examples) == 6
    nested = hub.parent / "nested.jsonl"
    nested.write_text(json.dumps({"task": {"text": "a?", "solution": "b"}}) + "\n")
    columns = {"prompt": "task.text", "answer": "task.solution"}
    (example,) = read_source("nested", DataSource(path=str(nested), columns=columns), "conversations").examples
    assert example == Conversation("a?", "b")
    with pytest.raises(UserError, match="no 'answer'"):
        read_source("nested", DataSource(path=str(nested), columns={**columns, "answer": "task.none"}), "conversations")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "tasks.jsonl", "eval_split": "test"}, "only a Hugging Face data set has splits"),
        ({"dataset": "tasks.jsonl", "subset": "main"}, "environment.subset: "),
        ({"dataset": "chain_sum", "kind": "reasoning_gym", "split": "test"}, "environment.split: "),
        ({"dataset": "openai/gsm8k", "eval_split": "train"}, "also the split of the training tasks"),
    ],
)
def test_splits_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe_from_mapping({"model": {"preset": "tiny", "init": "random"}, "environment": {"kind": "math", **fields}})


def test_the_real_package_reads_the_same_folders(repositories: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = str(repositories / "openai/gsm8k")
    for split, rows in SUMS.items():
        assert [row.record for row in read_rows(folder, subset="main", split=split)] == rows
    with pytest.raises(UserError, match="check path, split and subset"):
        list(read_rows(folder, subset="main", split="dev"))

"""Which files the digest of a reward or an environment covers, and what counts as a change."""

from __future__ import annotations

import linecache
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.load import recipe_from_mapping
from octetrl.environments.rewards import ExactScorer
from octetrl.environments.tasks import EvalSet, NoTasks, TaskEnvironment, Taskset
from octetrl.environments.trl_rewards import TrlRewards
from octetrl.records import Task
from octetrl.run.folder.allowed_changes import CONTENT
from octetrl.run.folder.contents import (
    NOT_COMPARED,
    Contents,
    _source,
    changed_contents,
    contents_of,
    rows_digest,
    source_files,
)
from tests.unit.environments.trl_functions import accuracy

FILES = {
    "top_47/__init__.py": "from . import shared_47\n",
    "top_47/shared_47.py": "import json\n",
    "top_47/inner/__init__.py": "",
    "top_47/inner/rewards.py": "from ..deep import one\nfrom beside_47 import two\nimport torch, octetrl.records\n",
    "top_47/deep.py": "from .inner import rewards\nfrom .... import beyond\n",
    "top_47/unused.py": "",
    "beside_47.py": "this is no Python\n",
    "space_47/of/rewards.py": "import beside_47, space_47.of.more\n",  # folders without __init__.py
    "space_47/of/more.py": "",
}


def written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(("folder", "beside"), [("own", {"beside_47"}), ("site-packages", set())])
def test_a_module_is_its_file_and_what_it_imports_from_its_package_and_beside_it(
    folder: str, beside: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / folder, monkeypatch)
    of_package = {"top_47", "top_47.shared_47", "top_47.inner", "top_47.inner.rewards", "top_47.deep"}
    assert source_files("top_47.inner.rewards").keys() == of_package | beside
    assert source_files("space_47.of.rewards").keys() == {"space_47.of.rewards", "space_47.of.more"} | beside


@pytest.mark.parametrize("module", ["math", "no_such_module_47", "octetrl.records", ""])
def test_modules_without_a_source_and_of_this_package_have_no_digest(module: str) -> None:
    assert source_files(module) == {}


def test_installed_packages_below_the_own_folder_have_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / ".venv" / "lib" / "site-packages"
    for file, text in ((tmp_path / "mine_47.py", "import theirs_47\n"), (installed / "theirs_47.py", "")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert set(source_files("mine_47")) == {"mine_47"}


def test_a_package_of_python_is_its_own_files() -> None:
    assert source_files("json").keys() == {"json", "json.decoder", "json.encoder", "json.scanner"}


def test_a_function_of_a_script_or_notebook_is_its_own_lines() -> None:
    def digest(body: str, before: str = "") -> dict[str, str]:
        """Of a function that a notebook's cell defines; linecache has the cell's lines, as IPython puts them there."""
        text = f"{before}def score(task, text):\n    {body}\n"
        linecache.cache["<cell 47>"] = (len(text), None, text.splitlines(keepends=True), "<cell 47>")
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, "<cell 47>", "exec"), names)
        return _source("given:score", {"given:score": names["score"]})

    assert digest("return 1.0").keys() == {"source"}
    assert digest("return 1.0") == digest("return 1.0", before="steps = 5\n") != digest("return 2.0")
    del linecache.cache["<cell 47>"]
    typed_in: dict[str, Any] = {"__name__": "__main__"}
    exec("def score(task, text): return 1.0", typed_in)
    score = typed_in["score"]
    for given in (score, partial(score), TrlRewards([accuracy])):
        assert _source("given:score", {"given:score": given}) == {"source": NOT_COMPARED}


def test_a_function_of_a_file_that_was_edited_meanwhile_is_not_compared(tmp_path: Path) -> None:
    """inspect reads the lines of the file as it is now, and these end in an open bracket."""
    file, names = tmp_path / "script.py", {"__name__": "__main__"}
    exec(compile("def score(task, text):\n    return 1.0\n", str(file), "exec"), names)
    file.write_text("score = max(\n")
    assert _source("given:score", {"given:score": names["score"]}) == {"source": NOT_COMPARED}


def test_a_given_environment_is_its_rows_and_its_class() -> None:
    class Sums:
        tasks = (Task("1", "1 + 1 =", "2"),)

        def score(self, task: Task, text: str) -> float:
            return float(text == task.answer)

    recipe = recipe_from_mapping({"model": {"path": "m"}, "environment": {"kind": "python", "dataset": "given:Sums"}})
    given: Any
    for given, code in ((Sums(), {"source"}), (TaskEnvironment(Sums.tasks, ExactScorer()), set())):
        found = contents_of(recipe, {"given:Sums": given}, None, {"": given}, NoTasks(), None)
        assert found["environment.dataset"] == {"rows": rows_digest(Sums.tasks)}
        assert found.get("environment.reward", {}).keys() == code and NOT_COMPARED not in str(found)


def test_held_out_rows_of_a_split_are_a_content() -> None:
    fields = {"kind": "jsonl", "dataset": "user/set", "split": "train", "eval_split": "test", "eval_size": 2}
    recipe = recipe_from_mapping({"model": {"path": "m"}, "environment": fields})
    tasks = [Task(str(n), f"{n} + 1 =", str(n + 1)) for n in range(4)]

    def contents(answer: str) -> Contents:
        held_out = [Task("test/1", "8 + 1 =", answer), Task("test/2", "9 + 1 =", "10")]
        taskset = Taskset(tasks, eval_size=2, seed=0, eval_sets={"": EvalSet(held_out, 2)})
        return contents_of(recipe, {}, None, {"": TaskEnvironment(tasks, ExactScorer())}, taskset, None)

    assert changed_contents(contents("9"), contents("9")) == {}
    assert changed_contents(contents("9"), contents("7")) == {"environment.eval_split": ["rows"]}
    assert CONTENT.fullmatch("environments.sums.eval_split")


def test_rows_differ_by_any_field_and_by_order() -> None:
    tasks = [Task("1", "a", "b", {"tests": [1]}), Task("2", "a", None, {"x": object()})]
    others = [
        [Task("1", "a", "b", {"tests": [2]}), tasks[1]],
        [Task("1", "a", "c", {"tests": [1]}), tasks[1]],
        tasks[::-1],
        tasks[:1],
    ]
    assert rows_digest(tasks) == rows_digest([tasks[0], Task("2", "a", None, {"x": object()})])
    assert len({rows_digest(tasks), *map(rows_digest, others)}) == 5


@pytest.mark.parametrize("in_folder", [True, False])
def test_the_corpus_of_the_search_is_a_content(in_folder: bool, tmp_path: Path) -> None:
    file = tmp_path / "texts" / "more" / "a.txt"
    file.parent.mkdir(parents=True)
    corpus = str(tmp_path / "texts" if in_folder else file)
    environment = {"dataset": "chain_sum", "tools": ["search"], "corpus": corpus}
    recipe = recipe_from_mapping({"model": {"path": "m"}, "environment": environment})

    def contents() -> Contents:
        return contents_of(recipe, {}, None, {"": TaskEnvironment([], ExactScorer())}, NoTasks(), None)

    file.write_text("Bern")
    before = contents()
    assert contents() == before
    file.write_text("Basel")
    assert changed_contents(before, contents()) == {"environment.corpus": ["files"]}
    assert CONTENT.fullmatch("environment.corpus")


def test_what_only_one_side_knows_is_no_change() -> None:
    saved = {"a": {"x": "1", "y": "2"}, "old": {"x": "1"}}
    assert changed_contents(saved, {"a": {"x": "1", "y": "3", "z": "4"}, "new": {"x": "1"}}) == {"a": ["y", "z"]}
    assert changed_contents(saved, {"a": {"x": "1", "y": "2"}}) == changed_contents({}, saved) == {}
    assert changed_contents(saved, {"a": {"x": NOT_COMPARED, "y": "2"}}) == {}

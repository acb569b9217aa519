"""A resumed run learns from what it began with: changed rows, code or templates are refused by name, or allowed and
kept in the run's history."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from octetrl.cli.main import run_command
from octetrl.telemetry.sinks import read_objects
from tests.e2e.tiny_run import read_lines, recipe_tree

pytestmark = pytest.mark.usefixtures("rewards_here")

SUMS = Path(__file__).with_name("sums.jsonl")
Edit = Callable[[Path], None]


def replaced(name: str, old: str, new: str) -> Edit:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return edit


ROWS = [json.loads(line) for line in SUMS.read_text().splitlines()]
PROMPT = next(row["prompt"] for row in ROWS[9:] if row["prompt"].endswith("="))
GRPO: dict[str, Any] = {
    "environment.dataset": "tasks.jsonl",
    "environment.reward": "own_reward_47:scored",
    "environment.eval_size": 0,
}
SFT: dict[str, Any] = {
    "algorithm": {"name": "sft", "conversations": "chats.jsonl", "batch_size": 2},
    "environment": {},
    "rollout": {},
    "precision": "bf16",
}


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, tasks, conversations, and a reward that imports a module beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({**row, "hint": "-"}) + "\n" for row in ROWS))
    chats = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(8)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (tmp_path / "own_reward_47.py").write_text(
        "from helped_47 import value\n\ndef scored(task, text):\n    return value(text)\n"
    )
    (tmp_path / "helped_47.py").write_text(
        "from tests.e2e.tiny_rewards import by_text\n\ndef value(text):\n    return by_text(None, text)\n"
    )
    return tmp_path


def started(place: Path, changes: dict[str, Any]) -> list[str]:
    """The command that resumes a run of one step, for another step."""
    tree = recipe_tree(place / "model", place / "run", {**changes, "steps": 1, "checkpoint.every": 1})
    (place / "r.yaml").write_text(yaml.safe_dump(tree))
    assert run_command(["train", "r.yaml"]) == 0
    return ["train", "r.yaml", "--resume", "steps=2"]


EDITS: list[tuple[str, str, Edit]] = [
    ("environment.dataset", "rows", replaced("tasks.jsonl", PROMPT, PROMPT + " ")),
    ("environment.dataset", "rows", replaced("tasks.jsonl", f'"answer": "{ROWS[0]["answer"]}"', '"answer": "1"')),
    ("environment.dataset", "rows", replaced("tasks.jsonl", '"hint": "-"', '"hint": "+"')),
    ("environment.reward", "own_reward_47", replaced("own_reward_47.py", "value(text)", "1 - value(text)")),
    ("environment.reward", "helped_47", replaced("helped_47.py", "by_text(None, text)", "1 - by_text(None, text)")),
    ("chat_template", "text", replaced("model/chat_template.jinja", "{% for", " {% for")),
]


def test_what_has_changed_is_refused_by_name_or_allowed_and_kept(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = started(place, GRPO)
    for field, part, edit in EDITS:
        shutil.copytree(place, place.parent / "before", ignore=shutil.ignore_patterns("run"))
        edit(place)
        capsys.readouterr()
        assert run_command(resume) == 2
        error = capsys.readouterr().err
        assert f": {field} ({part});" in error and f"--allow {field}" in error and error.count("\n") == 1
        if field == "environment.reward":
            assert run_command([*resume, "--allow", "environment.dataset"]) == 2
        shutil.copytree(place.parent / "before", place, dirs_exist_ok=True)
        shutil.rmtree(place.parent / "before")
    assert [row["step"] for row in read_lines(place / "run" / "metrics.jsonl")] == [1]
    for _, _, edit in EDITS[1:5]:
        edit(place)
    assert run_command([*resume, "--allow", "environment.dataset", "--allow", "environment.reward"]) == 0
    rows, reward = (line for line in read_objects(place / "run" / "history.jsonl") if line["field"] != "steps")
    assert (rows["field"], rows["step"], reward["field"]) == ("environment.dataset", 1, "environment.reward")
    assert rows["old"] != rows["new"] and reward["old"].keys() == reward["new"].keys()
    shown = f"environment.dataset: rows {rows['old']['rows'][:8]} until step 1, then rows {rows['new']['rows'][:8]}"
    assert shown in (place / "run" / "report.html").read_text()
    assert run_command(["train", "r.yaml", "--resume", "steps=3"]) == 0, "what was allowed stays so"


def test_conversations_too_and_a_run_without_digests_resumes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume = started(place, SFT)
    replaced("chats.jsonl", '"answer": "1"', '"answer": "2"')(place)
    assert run_command(resume) == 2
    assert "algorithm.conversations (rows)" in capsys.readouterr().err
    assert run_command([*resume, "--allow", "algorithm.conversations"]) == 0
    run = json.loads((place / "run" / "run.json").read_text())
    assert run.pop("contents")["algorithm.conversations"].keys() == {"rows"}
    (place / "run" / "run.json").write_text(json.dumps(run))
    assert run_command(["train", "r.yaml", "--resume", "steps=3"]) == 0
    assert "contents" in json.loads((place / "run" / "run.json").read_text())


def test_only_what_has_a_digest_is_allowed_without_a_value(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume = started(place, GRPO)
    assert run_command([*resume, "--allow", "trainer.optimizer.lr"]) == 2
    assert "FIELD=VALUE" in capsys.readouterr().err

"""Every recipe of docs/start.md passes `octetrl check`, with the files that the page shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octetrl.cli.main import run_command
from octetrl.run.tiny_model import TOOL_TEMPLATE
from tests.e2e.tiny_run import make_model
from tests.house.markdown import code_blocks
from tests.house.tree import REPO

BLOCKS = list(code_blocks((REPO / "docs/start.md").read_text(encoding="utf-8")))
FILES = {block.text.splitlines()[0].removeprefix("# "): block.text for block in BLOCKS if block.text.startswith("# ")}
RECIPES = [name for name in FILES if name.endswith(".yaml")]
ROWS = [json.loads(block.text) for block in BLOCKS if block.language == "json"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files, its rows with a hundred prompts, and a tiny model by the page's name."""
    folder = tmp_path_factory.mktemp("project")
    model = make_model(folder / "Qwen/Qwen3-0.6B", max_position_embeddings=4096)
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name, row in zip(("tasks", "chat", "pairs"), ROWS, strict=True):
        rows = [json.dumps(row).replace("17 + 25", f"{number} + 25") for number in range(100)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


def test_there_is_one_recipe_a_method() -> None:
    assert RECIPES == ["grpo.yaml", "sft.yaml", "dpo.yaml", "ppo.yaml", "tools.yaml", "game.yaml"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_passes_check(
    recipe: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    longer = ["rollout.max_prompt_tokens=1000"] if recipe == "tools.yaml" else []  # a byte is a token here
    code = run_command(["check", recipe, "cluster.device=cpu", *longer])
    shown = capsys.readouterr()
    assert code == 0 and "no problems" in shown.out, shown.err

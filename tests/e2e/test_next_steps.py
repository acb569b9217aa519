"""Every command that a run proposes at its end works, for every objective and the smallest recipe that trains it."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from octetrl.cli import serve
from octetrl.cli.main import run_command
from octetrl.config.algorithm import OBJECTIVES
from octetrl.config.load import dump_recipe, recipe_from_mapping
from octetrl.config.schema import Recipe
from octetrl.run.loop import train
from octetrl.run.report import last_screen
from tests.e2e.tiny_run import recipe_tree
from tests.objectives import objective

SAMPLED, GIVEN = ["rollouts", "eval", "serve"], ["serve", "generate", "report"]
EXECUTED = {  # all other objectives propose the commands of one of these
    **dict.fromkeys(("grpo", "ppo", "rft", "distill"), SAMPLED),
    **dict.fromkeys(("sft", "dpo"), GIVEN),
    "reward_model": ["export", "report"],
}
ROWS = {
    "conversations": [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(4)],
    "preferences": [{"prompt": f"{number} - 1 =", "chosen": "good", "rejected": "bad"} for number in range(4)],
}


def smallest(name: str, model: Path, folder: Path) -> Recipe:
    """A run of one step that names only what the objective needs: without rollouts no environment and no lengths."""
    tree = recipe_tree(model, folder / "run", {"precision": "bf16", "steps": 1, "algorithm.name": name})
    rows = ROWS.get(objective(name).learns_from)
    if rows is not None:
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree |= {"environment": {}, "rollout": {}, "model": {"path": str(model), "context_length": 64}}
        tree["algorithm"] |= {"conversations": str(path), "batch_size": 2}
    if name == "distill":
        tree["algorithm"]["teacher"] = str(model)
    return recipe_from_mapping(tree)


def proposed(folder: Path, recipe: Recipe) -> list[list[str]]:
    """The commands of the last screen, as words; a placeholder is filled in."""
    texts = [text for _, text in last_screen(folder, recipe)[1] if text.startswith("octetrl ")]
    return [shlex.split(text.partition("   ")[0].replace("TEXT", "hello"))[1:] for text in texts]


@pytest.mark.parametrize("name", EXECUTED)
def test_what_a_run_proposes_works(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "_say", lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # as soon as it serves
    recipe = smallest(name, model, tmp_path)
    train(recipe)
    folder = Path(recipe.output_dir)
    commands = proposed(folder, recipe)
    for words in commands:
        more = ["--port", "0", "--device", "cpu"] if words[0] == "serve" else []
        assert run_command([*words, *more]) == 0, (words, capsys.readouterr().err)
    assert [words[0] for words in commands] == EXECUTED[name]
    for other in set(OBJECTIVES) - set(EXECUTED):
        if name == {"rollouts": "grpo", "preferences": "dpo"}[objective(other).learns_from]:
            assert proposed(folder, smallest(other, model, tmp_path)) == commands, "which works for it too"


def test_a_run_that_keeps_no_rollouts_does_not_propose_to_show_them(model: Path, tmp_path: Path) -> None:
    recipe = recipe_from_mapping(recipe_tree(model, tmp_path, {"logging.rollouts": False}))
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 1.0}\n')
    assert [words[0] for words in proposed(tmp_path, recipe)] == ["eval", "serve", "generate"]

"""Parts of several environments: each environment's tools and system prompt are in its own prompts only."""

from __future__ import annotations

from typing import Any

import pytest

from octetrl.config.load import recipe_from_mapping
from octetrl.environments.mixed import MixedDialogues, MixedScorer
from octetrl.environments.tasks import named
from octetrl.models.families import spec_from_config
from octetrl.run.environment import build_chats, build_environments, build_scorers, build_tasks
from octetrl.run.tiny_model import TOOL_TEMPLATE, train_tokenizer
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError
from tests.unit.run.tiny_environments import TASKS

SPEC = spec_from_config(preset_config("tiny"))


def several(**datasets: str) -> Any:
    sections = {
        name: {"kind": "python", "dataset": f"tests.unit.run.tiny_environments:{one}", "eval_size": 1}
        for name, one in datasets.items()
    }
    model = {"path": "unused"}
    return recipe_from_mapping({"model": model, "environments": sections, "fp8": {}})


def test_tools_are_in_the_prompts_of_their_own_environment() -> None:
    recipe = several(plain="Plain", agent="Agent")
    tokenizer: Any = train_tokenizer(["1 + 2 ="], chat_template=TOOL_TEMPLATE)
    environments = build_environments(recipe)
    chat = build_chats(recipe, SPEC, tokenizer, environments)
    texts = {}
    for name in ("plain", "agent"):
        texts[name] = tokenizer.decode(chat.of(named(TASKS[2], name)).prompt_tokens("2 + 1 ="))
    assert "look_up" in texts["agent"] and "You look words up." in texts["agent"]
    assert "look_up" not in texts["plain"] and "You look" not in texts["plain"]
    assert "look_up" not in tokenizer.decode(chat.prompt_tokens("given conversations have no tools"))
    assert {task.environment for task in build_tasks(recipe, environments).next_batch(4)} == {"plain", "agent"}


def test_one_with_turns_makes_conversations_of_all() -> None:
    tokenizer: Any = train_tokenizer(["1 + 2 ="], chat_template=TOOL_TEMPLATE)
    for recipe, kind in ((several(plain="Plain", agent="Agent"), MixedDialogues), (several(a="Plain"), MixedScorer)):
        scorers = build_scorers(recipe, build_environments(recipe), tokenizer)
        assert scorers is not None
        scorers.close()
        assert isinstance(scorers, kind)


def test_what_a_run_cannot_use_is_refused_and_the_environment_is_named() -> None:
    recipe = several(plain="Plain", agent="Agent")
    tokenizer: Any = train_tokenizer(["1 + 2 ="])
    with pytest.raises(UserError, match=r"environments\.agent: it has tools \(look_up\)"):
        build_scorers(recipe, build_environments(recipe), tokenizer)
    with pytest.raises(UserError, match=r"environments\.a\.dataset: .*its environment is 'kitchen', but the run sets"):
        build_environments(several(a="Kitchen"))

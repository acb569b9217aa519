"""Parts of several environments: each environment's tools and system prompt are in its own prompts only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octetrl.config.environment import EnvironmentConfig
from octetrl.config.load import recipe_from_mapping
from octetrl.environments.mixed import MixedDialogues, MixedScorer
from octetrl.environments.tasks import named
from octetrl.models.families import spec_from_config
from octetrl.run.environment import (
    build_chats,
    build_environment,
    build_environments,
    build_scorers,
    build_tasks,
    build_taskset,
)
from octetrl.run.tiny_model import TOOL_TEMPLATE, train_tokenizer
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError
from tests.unit.run.tiny_environments import TASKS

SPEC = spec_from_config(preset_config("tiny"))


def several(algorithm: dict[str, Any] | None = None, **datasets: str) -> Any:
    sections = {
        name: {"kind": "python", "dataset": f"tests.unit.run.tiny_environments:{one}", "eval_size": 1}
        for name, one in datasets.items()
    }
    model = {"path": "unused"}
    return recipe_from_mapping({"model": model, "algorithm": algorithm or {}, "environments": sections, "fp8": {}})


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
    before_baseline = several({"kl_coefficient": 0.1, "kl_in": "reward_before_baseline"}, agent="Agent", own="Program")
    tokenizer = train_tokenizer(["1 + 2 ="], chat_template=TOOL_TEMPLATE)
    with pytest.raises(UserError, match=r"environments\.own: algorithm\.kl_in: .* agent may be several samples"):
        build_scorers(before_baseline, build_environments(before_baseline), tokenizer)


def test_rows_without_an_answer_need_a_reward_that_can_do_without(tmp_path: Path) -> None:
    """As soon as tasks are read, so that `octetrl check` says it too."""
    files = {"tasks": '{"prompt": "1 + 2 =", "answer": 3}\n{"prompt": "say hello"}\n', "eval": '{"prompt": "hello?"}\n'}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text(rows)

    def read(dataset: str, **changes: Any) -> None:
        fields = {"kind": "jsonl", "dataset": str(tmp_path / f"{dataset}.jsonl"), "eval_size": 0, **changes}
        config = EnvironmentConfig.model_validate(fields)
        build_taskset(build_environment(config), config)

    with pytest.raises(UserError, match=r"tasks\.jsonl:2: there is no 'answer' .*environment\.reward"):
        read("tasks")
    read("tasks", reward="tests.e2e.tiny_rewards:by_text")
    read("tasks", judge={"base_url": "http://localhost:1/v1", "model": "m"})
    read("tasks", max_failure_share=1.0)
    (tmp_path / "tasks.jsonl").write_text(files["tasks"].splitlines()[0])
    with pytest.raises(UserError, match=r"eval\.jsonl:1: there is no 'answer'"):
        read("tasks", eval_dataset=str(tmp_path / "eval.jsonl"))


def test_a_tasks_own_sampling_that_the_objective_cannot_have_is_refused_by_its_name(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "1 +", "answer": 3, "n": 8, "t": 1}\n{"prompt": "2 +", "answer": 3, "n": 1, "t": 0.5}\n'
    )
    section = {"kind": "jsonl", "dataset": str(rows), "columns": {"group_size": "n"}, "eval_size": 0}
    tree = {"model": {"path": "unused"}, "environment": section, "fp8": {}}
    distill = {"name": "distill", "teacher": "t"}
    heated = {**tree, "environment": {**section, "columns": {"temperature": "t"}}, "algorithm": distill}
    for one, task in ((tree, "'2'"), (heated, "'1'")):
        recipe = recipe_from_mapping(one)
        with pytest.raises(UserError, match=f"of task {task}"):
            build_tasks(recipe, build_environments(recipe))
    for one in ({**tree, "algorithm": {"name": "reinforce_pp"}}, {**heated, "algorithm": {"name": "grpo"}}):
        recipe = recipe_from_mapping(one)
        assert build_tasks(recipe, build_environments(recipe)).next_batch(2)

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.environment import JudgeConfig, MixedEnvironmentConfig
from octetrl.config.json_schema import recipe_json_schema
from octetrl.config.load import load_recipe, recipe_from_mapping
from octetrl.config.problems import field_names
from octetrl.config.rules_running import openai_problems
from octetrl.config.schema import OpenaiConfig, Recipe
from octetrl.config.validate import build_recipe, validate_with_spec
from octetrl.endpoint import Endpoint
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError


def recipe_with(*fields: tuple[str, Any]) -> Recipe:
    """A sound GRPO recipe with some fields set."""
    return recipe_from_mapping(plain_tree(*fields))


def plain_tree(*fields: tuple[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"path": "m"}, "environment": {"dataset": "chain_sum"}}
    for name, value in fields:
        node = tree
        *sections, last = name.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def problem_of(*fields: tuple[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        recipe_with(*fields)
    return str(caught.value)


SFT = (("algorithm.name", "sft"), ("algorithm.conversations", "c.jsonl"))

SERVER = (("engine.backend", "openai"), ("engine.openai.base_url", "http://host:8000/v1"), ("engine.openai.model", "m"))
JUDGE = {"base_url": "http://localhost:8000/v1", "model": "m"}

IMPOSSIBLE = [  # fields that the objective or the section does not have, or that are wrong by themselves
    ([("algorithm.preference_logprobs", "mean")], "grpo has no such field; it belongs to dpo, ipo"),
    ([("environment.judge", {**JUDGE, "pattern": "("})], "environment.judge.pattern: '(' is not valid"),
    ([("environment.judge", {**JUDGE, "temprature": 0.0})], "did you mean 'temperature'?"),
    ([("kl_coef", 1)], "kl_coef: unknown key; did you mean 'algorithm.kl_coefficient'?"),
    ([("resume_from_checkpoint", True)], "no field of the recipe, but --resume"),
    (
        [*SFT, ("algorithm.kl_coefficient", 0.1)],
        "sft has no such field; it belongs to every objective except sft, dpo, ipo",
    ),
    ([("evaluation.temperature", 1e300)], "evaluation.temperature: 1e+300 is out of range; it must be at most 10"),
    ([("output_dir", "runs/\udcff")], "output_dir: 'runs/\\udcff' is not UTF-8 text; rename it"),
]


@pytest.mark.parametrize(("fields", "says"), IMPOSSIBLE, ids=[says for _, says in IMPOSSIBLE])
def test_a_field_that_cannot_be_is_refused_in_one_line(fields: list[tuple[str, Any]], says: str) -> None:
    message = problem_of(*fields)
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "fields",
    [
        SFT,
        [*SFT, ("rollout.group_size", 1), ("rollout.top_p", 0.5), ("fp8.kv_cache", "dynamic")],
        [("model.path", None), ("model.preset", "tiny"), ("model.init", "random"), ("model.tokenizer", "t")],
        [("model.init", "random")],
        [("model.context_length", 2048)],
        [("algorithm.name", "reinforce_pp"), ("rollout.group_size", 1)],
        [("algorithm.corrections", ["tis", "veto", "self_normalize"])],
        [("algorithm.corrections", [])],
        [("engine.kv_cache_tokens", 2048)],
        [("trainer.minibatches", 256)],
        [*SFT, ("trainer.minibatches", 64)],
        [("evaluation.samples", 4), ("evaluation.temperature", 0.6)],
        [("environment.reward", "my_package.rewards:length")],
        [("cluster.device", "cpu"), ("cluster.trainer_cpus", 1), ("cluster.engine_cpus", 1)],
    ],
)
def test_what_can_stand_together_passes(fields: list[tuple[str, Any]]) -> None:
    recipe_with(*fields)


WRONG_VALUES = [
    ("steps", 1.0, "steps: 1.0 is not a whole number"),
    ("steps", True, "steps: true is not a whole number"),
    ("steps", 1e26, "is out of range; give a smaller number"),
    ("seed", "1", "seed: '1' is not a whole number"),
    ("model.path", 3, "model.path: 3 is not a text; put it in quotes"),
    ("fp8.train", "yes", "fp8.train: 'yes' is neither true nor false"),
    ("rollout.stop", "a", "rollout.stop: 'a' is not a list"),
    ("rollout.stop", ["a", 3], "rollout.stop[1]: 3 is not a text"),
    ("rollout.top_p", 0, "it must be above 0"),
    ("rollout.min_p", 1.5, "it must be at most 1"),
    ("trainer.optimizer.betas", [0.9], "two numbers are needed"),
    ("engine", 3, "engine: 3 is not a section"),
    ("environment.parameters", 3, "environment.parameters: 3 is not a mapping"),
    ("precision", "fp16", "choose one of bf16, fp8_rollout, fp8, fp8_full"),
    ("engine.page_size", 48, "choose one of 16, 32, 64, 128"),
    ("data.sources", {"Chat": {"path": "c"}}, "may only contain small letters"),
    ("data.sources", {"chat": "c.jsonl"}, "data.sources.chat: 'c.jsonl' is not a section"),
    ("data.sources", {"chat": {}}, "data.sources.chat.path: missing"),
    ("data.sources", {"chat": {"path": "c", "wieght": 2}}, "unknown key; did you mean 'weight'?"),
    ("environment.reward", {"a": {"function": "m:f", "onyl": "x"}}, "a.onyl: unknown key; did you mean 'only'?"),
    ("environment.reward", {"a": {"weight": 2}}, "environment.reward.a.function: missing"),
    ("environment.eval_dataset", {"a": {"dataset": "d", "k": [1], "x": 1}}, "a.x: unknown key; allowed are dataset"),
    ("data.sources", {"chat": {"path": "c", "weight": 0}}, "it must be above 0"),
    ("engine.speculation.ngrams", [], "engine.speculation.ngrams: [] has too few values; give at least 1"),
    ("engine.speculation.ngrams", [3] * 9, "has too many values; give at most 8"),
    ("engine.speculation.ngrams", [0], "engine.speculation.ngrams[0]: 0 is out of range; it must be at least 1"),
    ("output_dir", "x" * 30 + "\n", None),
]


@pytest.mark.parametrize(("name", "value", "says"), WRONG_VALUES)
def test_types_and_ranges(name: str, value: Any, says: str | None) -> None:
    if says is None:
        recipe_with((name, value))
        return
    message = problem_of((name, value))
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("modl", "did you mean 'model'?"),
        ("rollout.group_sise", "did you mean 'group_size'?"),
        ("trainer.optimizer.quux", "allowed are lr, betas"),
        ("trainer.optimizer.learning_rate", "did you mean 'trainer.optimizer.lr'?"),
        ("rollout.num_generations", "did you mean 'rollout.group_size'?"),
        ("algorithm.beta", "did you mean 'algorithm.kl_coefficient'?"),
        ("environment.weight", "weight belongs to one of several environments: environments.NAME.weight"),
        ("logging.wandb", "did you mean 'wandb_project'?"),
        ("logging.level", "allowed are console"),  # and not environment.sandbox.level
        ("total_epochs", "did you mean 'steps'?"),
        ("algorithm.epochs", "did you mean 'trainer.epochs' or 'epochs'?"),
        ("dataset", "did you mean 'environment.dataset'?"),
        ("max_new_tokens", "did you mean 'rollout.max_new_tokens' or 'evaluation.max_new_tokens'?"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest(name: str, says: str) -> None:
    assert f"{name}: unknown key" in problem_of((name, 1))
    assert says in problem_of((name, 1))


def test_a_field_found_wrong_is_not_blamed_again() -> None:
    """context_length is wrong in itself; that its default would be too short is nobody's problem."""
    message = problem_of(("model.context_length", "long"), ("rollout.max_new_tokens", 8000))
    assert "problems" not in message
    message = problem_of(("environment.dataset", None), ("environment.datset", "chain_sum"))
    assert "problems" not in message
    assert "did you mean 'dataset'?" in message


def test_evaluation_is_free_of_what_only_training_demands(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: m}\nenvironment: {dataset: d}\nrollout: {top_p: 0.9, group_size: 1}\n")
    assert load_recipe(path, training=False).rollout.top_p == 0.9
    with pytest.raises(UserError, match="2 problems"):
        load_recipe(path)


# --- with the model's shape ---------------------------------------------------------------------------------

TINY = spec_from_config(preset_config("tiny"))


@pytest.mark.parametrize(
    ("fields", "spec", "says"),
    [
        ([("fp8.rollout", True)], replace(TINY, hidden_size=120), "hidden size is 120"),
        ([("fp8.train", True)], replace(TINY, intermediate_size=500), "intermediate size is 500"),
        ([("fp8.train", True), ("fp8.bf16_first_layers", 4)], TINY, "leave no layer in FP8"),
        ([("model.context_length", 5000)], TINY, "5000 exceeds the model's 4096 positions; lower it to 4096"),
        (
            [("model.context_length", 5000), ("rollout.max_prompt_tokens", 4000), ("rollout.max_new_tokens", 200)],
            TINY,
            "lower it to 4096, and rollout.max_prompt_tokens",
        ),
    ],
)
def test_what_the_model_cannot_follow_is_refused(fields: list[tuple[str, Any]], spec: ModelSpec, says: str) -> None:
    recipe = recipe_with(*fields)
    with pytest.raises(UserError) as caught:
        validate_with_spec(recipe, replace(spec, max_positions=4096))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_whole_number_of_a_recipe_has_an_upper_limit() -> None:
    """So that a slip of the finger is refused, and not met as a full memory."""
    unlimited = []

    def look(name: str, schema: dict[str, Any]) -> None:
        for form in (schema, *schema.get("anyOf", ())):  # enumerated values are limited
            if form.get("type") == "integer" and not {"maximum", "enum"} & form.keys():
                unlimited.append(name)

    for section, schema in [("Recipe", recipe_json_schema()), *recipe_json_schema()["$defs"].items()]:
        for key, value in schema.get("properties", {}).items():
            look(f"{section}.{key}", value)
    assert unlimited == ["Recipe.seed", "EnvironmentConfig.seed", "MixedEnvironmentConfig.seed"]


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1/v1",
        "http://127.0.0.1:abc/v1",
        "http://127.0.0.1:99999/v1",
        "http://a..b/v1",
        "http://\u00e9\u00e9..x/v1",
        "http://xn--/v1",
        f"http://{'a' * 300}/v1",
    ],
)
def test_an_address_that_the_client_refuses_is_no_address(url: str) -> None:
    (problem,) = openai_problems(OpenaiConfig(base_url=url, model="m"))
    assert problem.text.startswith("engine.openai.base_url: this is not an address")
    with pytest.raises(ValueError, match="it is not an address"):
        JudgeConfig(base_url=url, model="m")
    with pytest.raises(UserError, match=r"engine.openai.base_url: this is not an address"):
        Endpoint(OpenaiConfig(base_url=url, model="m"), "engine.openai")


ENDPOINT = {"base_url": "http://localhost:8000/v1", "model": "m"}
ONE = {
    "model": {"path": "m"},
    "environment": {"kind": "jsonl", "dataset": "x.jsonl", "judge": {**ENDPOINT}},
    "engine": {"backend": "openai", "openai": ENDPOINT},
    "algorithm": {"name": "dpo", "conversations": "c.jsonl"},
    "data": {"sources": {"s": {"path": "p.jsonl", "weight": 1.0}}},
}
SEVERAL = {
    "model": {"path": "m"},
    "environments": {"a": {"kind": "jsonl", "dataset": "x", "judge": ENDPOINT}, "b": {"kind": "math", "dataset": "y"}},
}
VALUES = ["nonsense", 5, None, {}, [["a"]], "http://["]


def with_value(tree: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    tree = deepcopy(tree)
    node = tree
    *sections, last = field.split(".")
    for section in sections:
        if not isinstance(node.get(section), dict):
            node[section] = {}
        node = node[section]
    node[last] = value
    return tree


@pytest.mark.parametrize(
    ("tree", "fields"),
    [
        (ONE, [*dict.fromkeys(field_names(Recipe)), "data.sources.s", "data.sources.s.path", "engine.openai.z"]),
        (SEVERAL, [f"environments.a.{name}" for name in (*field_names(MixedEnvironmentConfig), "z")]),
    ],
)
def test_any_value_in_any_field_gives_a_recipe_or_problems(tree: dict[str, Any], fields: list[str]) -> None:
    for field in fields:
        for value in VALUES:
            recipe, problems = build_recipe(with_value(tree, field, value))
            assert recipe is not None or problems, f"{field}={value!r}"
            assert all("\n" not in one.text and "validation error" not in one.text for one in problems)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("environment.judge.base_url", "nonsense"),
        ("environment.judge.model", 5),
        ("environment.judge.template", "without the place for it"),
        ("engine.openai.base_url", 7),
        ("engine.openai.model", ["m"]),
    ],
)
def test_a_field_that_its_section_needs_is_named(field: str, value: Any) -> None:
    recipe, problems = build_recipe(with_value(ONE, field, value))
    assert recipe is None and [one.text for one in problems if one.fields == (field,)]

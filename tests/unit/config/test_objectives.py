"""The sections of the objectives: what their defaults resolve to, and what is said of a field that does not fit."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from octetrl.algorithms.table import build_algorithm
from octetrl.config.algorithm import OBJECTIVES, GrpoConfig
from octetrl.config.json_schema import recipe_json_schema
from octetrl.config.load import load_recipe, recipe_from_mapping
from octetrl.system.errors import UserError
from tests.house.tree import REPO

POLICY = {"keeps": "has_variance", "trains": "_always", "loss": "grpo_loss", "token_weighting": "token", "rewards": "G",
          "needs_proximal": True}  # fmt: skip
GIVEN = {"keeps": "_always", "trains": "_always", "loss": "sft_loss", "token_weighting": "token", "rewards": "1"}
PAIRS = {**GIVEN, "loss": "preference_loss", "token_weighting": "sequence", "needs_reference": True}
ADVANTAGES = {  # of rewards 1, 0 and 0.5
    "G": [1.0, -1.0, 0.0], "leave one out": [0.75, -0.75, 0.0], "less the mean": [0.5, -0.5, 0.0],
    "plain": [1.0, 0.0, 0.5], "1": [1.0, 1.0, 1.0], "best": [1.0, None, None],
}  # fmt: skip
RESOLVED: dict[str, dict[str, Any]] = {  # what an Algorithm is with an objective's defaults; else None, False or 0
    "grpo": POLICY,
    "dapo": POLICY,
    "dual_clip": POLICY | {"loss": "dual_clip_loss"},
    "gspo": POLICY | {"loss": "gspo_loss", "token_weighting": "sequence"},
    "gspo_token": POLICY | {"loss": "gspo_token_loss", "token_weighting": "sequence"},
    "cispo": POLICY | {"loss": "cispo_loss"},
    "sapo": POLICY | {"loss": "sapo_loss", "token_weighting": "sequence"},
    "rloo": POLICY | {"loss": "rloo_loss", "token_weighting": 1024, "rewards": "leave one out"},
    "reinforce_pp": POLICY | {"keeps": "has_reward", "rewards": "plain", "shape": "batch_normalized"},
    "reinforce_pp_baseline": POLICY | {"rewards": "less the mean", "shape": "batch_normalized"},
    "ppo": POLICY | {"keeps": "has_reward", "rewards": "plain", "shape": "ppo_advantages", "needs_values": True,
                     "returns": "ppo_returns"},
    "sft": GIVEN,
    "reward_model": GIVEN | {"reward_loss": "bradley_terry_loss"},
    "dpo": PAIRS,
    "ipo": PAIRS,
    "rft": GIVEN | {"rewards": "best"},
    "distill": GIVEN | {"loss": "grpo_loss", "shape": "teacher_advantages", "shaping_kl": "kl_of_ratio",
                        "needs_proximal": True, "needs_reference": True, "needs_teacher": True},
}  # fmt: skip


def plain(value: Any) -> Any:
    """A function's name, a partial's function's; other values as they are."""
    value = value.func if isinstance(value, partial) else value
    return getattr(value, "__name__", value)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_resolves_to_the_same_algorithm(name: str) -> None:
    algorithm = build_algorithm(OBJECTIVES[name]())
    expected = {"name": name, **RESOLVED[name]}
    assert algorithm.advantages([[1.0, 0.0, 0.5]]) == [ADVANTAGES[expected.pop("rewards")]]
    for field in fields(algorithm):
        if field.name not in ("advantages", "step_means"):
            found = plain(getattr(algorithm, field.name))
            assert (found or None) == expected.get(field.name), f"{name}: {field.name}"
    assert not algorithm.step_means


# --- fields of other objectives ---------------------------------------------------------------------------------------


def refusal(folder: Path, algorithm: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        loaded(folder, algorithm, *overrides)
    return str(caught.value).replace(f"{folder}/", "")


def loaded(folder: Path, algorithm: str, *overrides: str) -> Any:
    text = f"model: {{path: m}}\nenvironment: {{dataset: d}}\nalgorithm: {algorithm}\n"
    (folder / "recipe.yaml").write_text(text)
    return load_recipe(folder / "recipe.yaml", overrides).algorithm


REMEDY = ", or choose another algorithm.name"
SFT = "{name: sft, conversations: c}"


@pytest.mark.parametrize(
    ("algorithm", "overrides", "says"),
    [
        (
            SFT, ["algorithm.preference_logprobs=sum"],
            "command line: algorithm.preference_logprobs: sft has no such field; it belongs to dpo, ipo; remove it, or"
            " give algorithm.preference_logprobs=null where a base file has it",
        ),
        (
            "{clip_high: 0.3, tis_cap: 3, overlong: mask}", ["algorithm.name=sapo"],
            "command line: algorithm.clip_high: sapo has no such field; it belongs to every objective"
            " except sapo, sft, dpo, ipo, reward_model, rft; remove it, or give algorithm.clip_high=null",
        ),
        (
            "{clip_high: 0.3, tis_cap: 3}", ["algorithm.name=rft"],
            "command line: algorithm.clip_high, tis_cap: rft has no such fields; clip_high belongs to every objective"
            " except sapo,",
        ),
        ("{name: ipo, conversations: c, label_smoothing: 0.1}", [], "recipe.yaml: algorithm.label_smoothing: ipo has"),
        (SFT, ["algorithm.kl_coef=0.1"], "did you mean 'algorithm.kl_coefficient'?"),
        ("{}", ["algorithm.kl_coef=0.1"], "algorithm.kl_coef: unknown key; did you mean 'algorithm.kl_coefficient'?"),
        (SFT, ["algorithm.quux=1"], "allowed are name, token_weighting, constant_length, conversations, batch_size"),
        ("{}", ["algorithm.name=grop"], "algorithm.name: 'grop' is not allowed; choose one of grpo, dapo, dual_clip"),
        ("{}", ["algorithm.name=[grpo]"], 'algorithm.name: ["grpo"] is not allowed; choose one of grpo'),
        ("{name: 3, clip_high: 0.3}", [], "algorithm.name: 3 is not allowed; choose one of grpo"),
        ("3", [], "algorithm: 3 is not a section; write its fields as"),
        ("{}", ["model=/tmp"], "command line: model: '/tmp' is not a section; write model.path=/tmp"),
        ("{}", ["engine=3"], "command line: engine: 3 is not a section; write engine.FIELD=value"),
        ("{}", ["environment.parameters=3"], "is not a mapping; write environment.parameters.KEY=value"),
        ("{name: dual_clip}", ["algorithm.dual_clip=0"], "algorithm.dual_clip: 0 is out of range"),
        ("{}", ["algorithm.corrections=[tiss]"], "algorithm.corrections[0]: 'tiss' is not allowed"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(tmp_path: Path, algorithm: str, overrides: list[str], says: str) -> None:
    message = refusal(tmp_path, algorithm, *overrides)
    assert says in message and "\n" not in message
    assert message.endswith(REMEDY) or "such field" not in message


def test_a_section_without_a_name_is_grpos(tmp_path: Path) -> None:
    assert loaded(tmp_path, "{kl_coefficient: 0.1}") == GrpoConfig(kl_coefficient=0.1)
    assert recipe_from_mapping({"model": {"path": "m"}, "environment": {"dataset": "d"}}).algorithm == GrpoConfig()


# --- editors and documentation ----------------------------------------------------------------------------------------

SCHEMA = recipe_json_schema()


def form_of(node: dict[str, Any]) -> dict[str, Any]:
    """What a schema's references lead to."""
    while "$ref" in node:
        target: Any = SCHEMA
        for key in node["$ref"].removeprefix("#/").split("/"):
            target = target[key]
        node = target
    return node


def fitting(section: dict[str, Any]) -> list[str]:
    """The choices of `oneOf` that hold these keys and this name."""
    found = []
    for choice in map(form_of, SCHEMA["properties"]["algorithm"]["oneOf"]):
        named = "name" in section if "required" in choice else "name" not in section
        right = "name" not in section or choice["properties"].get("name", {}).get("const") == section["name"]
        if named and right and set(section) <= set(choice["properties"]):
            found.append(choice.get("title", "inherited"))
    return found


@pytest.mark.parametrize("path", sorted(REPO.glob("recipes/**/*.yaml")), ids=lambda path: path.stem)
def test_an_editor_takes_shipped_recipes(path: Path) -> None:
    section = yaml.safe_load(path.read_text(encoding="utf-8")).get("algorithm", {})
    assert len(fitting(section)) == 1


def test_an_editor_refuses_another_objectives_field() -> None:
    assert fitting({"name": "sft", "preference_logprobs": "mean"}) == []

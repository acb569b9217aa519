"""The sections of the objectives: their defaults, who has which field, and what is said where one does not fit."""

from __future__ import annotations

import json
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
from octetrl.config.problems import owners
from octetrl.system.errors import UserError
from tests.house.tree import REPO

# --- defaults ---------------------------------------------------------------------------------------------------------

FLAT: dict[str, Any] = {  # of all objectives, with GRPO's defaults
    "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05,
    "ratio_base": "auto", "normalize_advantages": True, "token_weighting": "token", "constant_length": 1024,
    "drop_zero_variance": True, "max_refills": 0, "overlong_buffer": 0.0, "overlong": "keep", "kl_coefficient": 0.0,
    "kl_estimator": "k3", "kl_gradient": "auto", "kl_in": "loss", "kl_target": None, "reference_every": 0,
    "entropy_coefficient": 0.0, "corrections": ["tis"], "tis_cap": 2.0, "sequence_tis_cap": 2.0,
    "token_mask_range": [0.5, 5.0], "sequence_mask_range": [0.0, 3.0], "geometric_mask_range": [0.999, 1.002],
    "veto_floor": 1e-6, "veto_by": "probability", "masked_tokens": "in_denominator", "rloo_ratio": "token",
    "discount": 1.0, "gae_lambda": 0.95, "return_lambda": None, "truncated": "terminal", "reward_center": 0.0,
    "conversations": None,
    "batch_size": 64, "preference_beta": 0.1, "preference_logprobs": "sum", "label_smoothing": 0.0, "best_of_group": 1,
    "reward_threshold": 0.0, "teacher": None, "teacher_precision": "bf16", "distillation": "sampled",
    "teacher_top_k": 64,
}  # fmt: skip
GSPO = {"clip_low": 3e-4, "clip_high": 4e-4, "token_weighting": "sequence", "corrections": ["sequence_tis"]}
IN_REWARD = {"drop_zero_variance": False, "kl_in": "reward", "kl_estimator": "k1"}
OWN: dict[str, dict[str, Any]] = {
    "dapo": {"clip_high": 0.28, "max_refills": 10, "overlong_buffer": 0.2},
    "gspo": GSPO,
    "gspo_token": GSPO,
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"token_weighting": "constant"},
    "reinforce_pp": IN_REWARD,
    "reinforce_pp_baseline": {"kl_estimator": "k2"},
    "ppo": IN_REWARD,
    "sapo": {"token_weighting": "sequence"},
}
CHOICES = ("keeps", "trains", "loss", "shape", "shaping_kl", "returns", "reward_loss")
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


def test_fields_and_defaults_are_those_of_the_one_section_before() -> None:
    assert set(OBJECTIVES) == set(RESOLVED)
    for name, section in OBJECTIVES.items():
        given = section().model_dump(mode="json")
        expected = FLAT | {"name": name} | OWN.get(name, {})
        assert given == {field: expected[field] for field in given}, name
    assert set(FLAT) == {field for section in OBJECTIVES.values() for field in section.model_fields} - {"name"}


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
        (SFT, ["algorithm.kl_coef=0.1"], "did you mean 'kl_coefficient'? It belongs to every objective except sft, "),
        ("{}", ["algorithm.kl_coef=0.1"], "algorithm.kl_coef: unknown key; did you mean 'kl_coefficient'?"),
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


def test_null_takes_away_what_a_file_underneath_gives(tmp_path: Path) -> None:
    changed = loaded(
        tmp_path, "{clip_high: 0.3, token_weighting: sequence}", "algorithm.name=rft", "algorithm.clip_high="
    )
    assert (changed.name, changed.token_weighting) == ("rft", "sequence")


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


def test_an_editor_offers_the_fields_of_the_named_objective() -> None:
    for name, section in OBJECTIVES.items():
        choice = form_of(SCHEMA["$defs"][section.__name__])
        assert list(choice["properties"]) == list(section.model_fields) and not choice["additionalProperties"]
        for field, form in choice["properties"].items():
            default = json.loads(json.dumps(section.model_fields[field].default))
            assert form_of(form)["default"] == default, f"{name}.{field}"
            assert field == "name" or form_of(form)["description"], f"{name}.{field} says nothing"
    assert fitting({"name": "sft", "preference_logprobs": "mean"}) == []


@pytest.mark.parametrize("path", sorted(REPO.glob("recipes/**/*.yaml")), ids=lambda path: path.stem)
def test_an_editor_takes_shipped_recipes(path: Path) -> None:
    section = yaml.safe_load(path.read_text(encoding="utf-8")).get("algorithm", {})
    assert len(fitting(section)) == 1


def documented_fields() -> list[str]:
    """The rows of docs/algorithms.md: each field, its default, the objectives that have another, who has it."""

    def shown(value: Any) -> str:
        return f"`{json.dumps(value)}`".replace('"', "")

    def names(listed: list[str]) -> str:
        return ", ".join(f"`{name}`" for name in listed)

    rows = []
    every = [field for section in OBJECTIVES.values() for field in section.model_fields if field != "name"]
    for field in dict.fromkeys(every):
        have = owners(field)
        by_value: dict[str, list[str]] = {}
        for name in have:
            by_value.setdefault(shown(OBJECTIVES[name].model_fields[field].default), []).append(name)
        first, *rest = by_value
        default = "; ".join([first, *(f"{names(by_value[value])} {value}" for value in rest)])
        lack = [name for name in OBJECTIVES if name not in have]
        who = names(have) if len(have) <= len(lack) else f"all but {names(lack)}"
        rows.append(f"| `{field}` | {default} | {who} |")
    return rows


def test_the_documentation_says_which_objective_has_which_field() -> None:
    text = (REPO / "docs/algorithms.md").read_text(encoding="utf-8")
    rows = documented_fields()
    start = text.index(rows[0]) if rows[0] in text else 0
    written = text[start:].split("\n\n")[0].splitlines()
    assert written == rows, "docs/algorithms.md, the table of fields, should be:\n" + "\n".join(rows)

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.config.load import PRECISIONS, dump_recipe, load_recipe, recipe_from_mapping
from octetrl.config.recipe_yaml import parse_yaml
from octetrl.config.schema import Recipe
from octetrl.system.errors import UserError
from tests.objectives import objective

BASE = "model: {path: models/m}\nenvironment: {dataset: chain_sum}\n"


def load(folder: Path, text: str, *overrides: str) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path, overrides)


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/", "")


def test_numbers_lists_and_text_have_the_types_of_the_schema(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        BASE
        + "trainer: {optimizer: {lr: 1e-6, betas: [0, 0.5], eps: 1E-9}}\nrollout: {stop: [a, 'no']}\nsteps: 1_000\n",
    )
    assert recipe.trainer.optimizer.lr == 1e-6
    assert recipe.trainer.optimizer.betas == (0.0, 0.5)
    assert recipe.trainer.optimizer.eps == 1e-9
    assert recipe.rollout.stop == ("a", "no")
    assert recipe.steps == 1000


@pytest.mark.parametrize("text", ["yes", "off", "1:30", "010", "2024-01-01", "0x10", "1e"])
def test_yaml_traps_are_texts(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, BASE + f"output_dir: {text}\n").output_dir == text


def test_null_means_that_a_field_is_not_set_and_an_empty_section_keeps_defaults(tmp_path: Path) -> None:
    """Also of a mapping, a list or a number that a base file gives; on the command line nothing after = is null too."""
    (tmp_path / "base.yaml").write_text(
        "model: {path: m}\nenvironment: {kind: math, dataset: d, columns: {prompt: q}, tools: [calculator]}\n"
        "seed: 3\nrollout: {stop: [x]}\nalgorithm: {name: dapo, clip_high: 0.5}\n"
    )
    words = ("environment.columns=null", "environment.tools=", "seed=null", "rollout.stop=", "algorithm.clip_high=")
    recipe = load(tmp_path, "extends: base.yaml\n", *words)
    assert (recipe.environment.columns, recipe.environment.tools) == ({}, ())
    assert (recipe.seed, recipe.rollout.stop, recipe.algorithm) == (0, (), objective("dapo"))
    words = ("algorithm.name=sft", "algorithm.clip_high=", "data.sources.a.path=p", "data.sources.a.columns=null")
    assert load(tmp_path, "extends: base.yaml\n", *words).data.sources["a"].columns == {}
    assert "algorithm.name" not in refusal(tmp_path, "extends: base.yaml\n", *words, "data.sources.a.path=null")
    assert load(tmp_path, BASE + "fp8:\nengine:\n") == load(tmp_path, BASE)


# --- extends ------------------------------------------------------------------------------------------------


def test_a_path_takes_the_place_of_a_preset_and_its_random_weights(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("model: {preset: tiny, init: random}\nenvironment: {dataset: chain_sum}\n")
    extending = "extends: base.yaml\nmodel: {path: models/m}\n"
    for recipe in (load(tmp_path, extending), load(tmp_path, "extends: base.yaml\n", "model.path=models/m")):
        assert (recipe.model.path, recipe.model.preset, recipe.model.init) == ("models/m", None, "pretrained")
    named = load(tmp_path, "extends: base.yaml\n", "model.init=random", "model.path=models/m")
    assert (named.model.path, named.model.init) == ("models/m", "random")
    assert "model.path: m" in refusal(tmp_path, "extends: base.yaml\nmodel: {path: m, preset: tiny}\n")


def test_extends_merges_sections_and_replaces_everything_else(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases/far.yaml").write_text(BASE + "rollout: {group_size: 4, stop: [a, b]}\nseed: 3\n")
    (tmp_path / "bases/near.yaml").write_text("extends: far.yaml\nenvironment: {parameters: {p: 1, q: 2}}\nsteps: 7\n")
    recipe = load(tmp_path, "extends: bases/near.yaml\nrollout: {stop: [c]}\nenvironment: {parameters: {r: 3}}\n")
    assert (recipe.rollout.group_size, recipe.rollout.stop) == (4, ("c",))
    assert recipe.environment.parameters == {"r": 3}
    assert (recipe.seed, recipe.steps, recipe.environment.dataset) == (3, 7, "chain_sum")


def test_another_kind_drops_what_only_the_former_reads(tmp_path: Path) -> None:
    """The kinds of files read the same fields, so a change among them keeps the held-out sets."""
    base = (
        "model: {path: m}\nenvironment: {kind: math, dataset: d.jsonl, columns: {prompt: q}, eval_dataset: e.jsonl}\n"
    )
    (tmp_path / "base.yaml").write_text(base)
    for recipe in (
        load(tmp_path, "extends: base.yaml\nenvironment: {kind: jsonl}\n"),
        load(tmp_path, "extends: base.yaml\n", "environment.kind=jsonl"),
    ):
        assert (recipe.environment.columns, recipe.environment.eval_dataset) == ({"prompt": "q"}, "e.jsonl")
    sums = load(tmp_path, "extends: base.yaml\n", "environment.kind=reasoning_gym", "environment.dataset=chain_sum")
    assert (sums.environment.columns, sums.environment.eval_dataset) == ({}, None)


def test_bases_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("extends: recipe.yaml\n")
    assert "circle" in refusal(tmp_path, "extends: other.yaml\n")
    assert refusal(tmp_path, "extends: gone.yaml\n").startswith("gone.yaml: no such file; ")
    assert "it contains a NUL" in refusal(tmp_path, 'extends: "a\\0b"\n')
    (tmp_path / "base.yaml").write_text(BASE + "rollout: {group_sise: 4}\n")
    assert refusal(tmp_path, "extends: base.yaml\n").startswith("base.yaml: rollout.group_sise: unknown key")


# --- overrides ----------------------------------------------------------------------------------------------


def test_overrides_are_yaml_and_the_last_word(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        BASE,
        "seed=1",
        "seed=2",
        "environment.parameters.max_terms=4",
        "rollout.stop=[x, y]",
        "trainer.optimizer={lr: 2e-5}",
        "rollout.system_prompt=a = b",
        "mismatch.fail_above=",
    )
    assert recipe.seed == 2
    assert recipe.environment.parameters == {"max_terms": 4}
    assert recipe.rollout.stop == ("x", "y")
    assert recipe.trainer.optimizer.lr == 2e-5
    assert recipe.rollout.system_prompt == "a = b"
    assert recipe.mismatch.fail_above is None
    text = "model: {path: m}\nenvironment: {dataset: d, parameters: {p: 1, q: 2}}\n"
    assert load(tmp_path, text, "environment.parameters.q=3").environment.parameters == {"p": 1, "q": 3}
    assert load(tmp_path, text, "environment.parameters={}").environment.parameters == {}


@pytest.mark.parametrize("override", ["seed", "=1", "a..b=1", ".=1", "rollout.stop=[a"])
def test_a_malformed_override_is_refused(tmp_path: Path, override: str) -> None:
    message = refusal(tmp_path, BASE, override)
    assert "is not section.key=value" in message or "put the value in quotes" in message


# --- precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_precision_stands_for_three_fields(tmp_path: Path, precision: str) -> None:
    recipe = load(tmp_path, BASE, f"precision={precision}")
    assert recipe.fp8.model_dump() | PRECISIONS[precision] == recipe.fp8.model_dump()
    assert recipe.precision == precision


def test_precision_gives_way_to_fields_beside_it_and_to_what_comes_later(tmp_path: Path) -> None:
    assert load(tmp_path, BASE + "fp8: {kv_cache: dynamic}\nprecision: fp8_full\n").fp8.kv_cache == "dynamic"
    for words in (["fp8.kv_cache=dynamic", "precision=fp8_full"], ["precision=fp8_full", "fp8.kv_cache=dynamic"]):
        assert load(tmp_path, BASE, *words).fp8.kv_cache == "dynamic"
    (tmp_path / "base.yaml").write_text(BASE + "fp8: {train: true, kv_cache: dynamic, ignore: ['*.o_proj']}\n")
    later = load(tmp_path, "extends: base.yaml\nprecision: bf16\n")
    assert (later.fp8.train, later.fp8.kv_cache, later.fp8.ignore) == (False, "none", ("*.o_proj",))
    (tmp_path / "base.yaml").write_text(BASE + "precision: fp8_full\n")
    assert load(tmp_path, "extends: base.yaml\nfp8: {train: false}\n").fp8.train is False
    assert load(tmp_path, "extends: base.yaml\nfp8: {train: false}\n", "precision=fp8").fp8.train is True


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "this is a list"),
        ("hello\n", "this is a str"),
        ("a: [1\n", "not YAML"),
        ("a: b: c\n", "line 1: not YAML"),
        ("seed: 1\nseed: 2\n", "line 2: the key 'seed' is given twice"),
        ("1: 2\n", "the key '1' is not a text"),
        ("a: !!python/object:os.system {}\n", "is not allowed in a recipe"),
        ("seed: !!int 'x'\n", "line 1: !!int is not allowed in a recipe"),
        ("seed: 1\n---\nseed: 2\n", "it has 2 documents"),
        ("rollout: {temperature: 1e999}\n", "1e999 is not a finite number"),
        ("[a, b]: 2\n", "is not a text"),
        ("a: &a [*a]\n", "line 1: the alias *a is not allowed in a recipe"),
        ("a: &a {b: 1}\nc: {<<: *a}\n", "line 2: the alias *a is not allowed in a recipe"),
        ("a: " + "[" * 1000, "nested too deeply"),
        ('a: "\\uD800"\n', "half of a character"),
        ('extends: ""\n', "is not the path of one recipe"),
        ("extends: [a, b]\n", "is not the path of one recipe"),
        ("a: \x00\n", "not YAML"),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    message = refusal(tmp_path, text)
    assert says in message
    assert "\n" not in message
    assert message.startswith("recipe.yaml")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone.yaml"):
        with pytest.raises(UserError, match="give the path of a YAML file"):
            load_recipe(path)
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        BASE + "rollout: {group_size: 1, temperature: hot}\nmodle: 3\nfp8: {kv_cache: calibratd}\n",
        "engine.page_size=7",
        "nonsense",
    )
    first, *lines = message.split("\n")
    assert first == "recipe.yaml: 6 problems"
    assert all(line.startswith("  ") for line in lines)
    for said in (
        "override 'nonsense'",
        "rollout.temperature: 'hot' is not a number",
        "modle: unknown key; did you mean 'model'?",
        "did you mean 'calibrated'?",
        "command line: engine.page_size: 7 is not allowed; choose one of 16, 32, 64, 128",
        "rollout.group_size: with 1 answer to a prompt, grpo",
    ):
        assert said in message


# --- dump ---------------------------------------------------------------------------------------------------

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["1e-6", "yes", "010", "~", "", " a", "a: b", "#", "1_0", "<<", "2024-01-01", "é\n\u2028x"])
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30)
@given(parameters=st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), plain_values, max_size=3))
def test_a_dumped_recipe_is_the_same_recipe(tmp_path_factory: pytest.TempPathFactory, parameters: dict) -> None:
    recipe = recipe_from_mapping(
        {
            "precision": "fp8_full",
            "model": {"path": "m"},
            "fp8": {"kv_cache": "dynamic"},
            "environment": {"dataset": "d", "parameters": parameters},
            "trainer": {"optimizer": {"lr": 1e-7}},
        }
    )
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path) == recipe


def test_a_run_keeps_the_fields_that_were_retired_since_and_a_recipe_does_not(tmp_path: Path) -> None:
    run, recipe = tmp_path / "run" / "config.yaml", tmp_path / "config.yaml"
    (run.parent / "checkpoints").mkdir(parents=True)
    for path in (run, recipe):
        path.write_text("numerics: parity\nmodel: {path: models/m}\nenvironment: {dataset: chain_sum}\n")
    assert load_recipe(run).model.path == "models/m"
    with pytest.raises(UserError, match="numerics: unknown key"):
        load_recipe(recipe)
    run.write_text(run.read_text().replace("parity", "fast"))
    with pytest.raises(UserError, match="numerics: unknown key"):
        load_recipe(run)


def test_a_mapping_made_in_code_is_checked_like_a_file() -> None:
    assert recipe_from_mapping({"model": {"path": "m"}, "precision": "fp8", "environment": {"dataset": "d"}}).fp8.train
    with pytest.raises(UserError, match=r"environment\.dataset: missing"):
        recipe_from_mapping({"model": {"path": "m"}})


def test_libyaml_reads_what_pyyaml_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = Path(__file__).parents[3] / "recipes"
    texts = [path.read_text(encoding="utf-8") for path in sorted(recipes.rglob("*.yaml"))]
    texts += ["a: [1, 'b', \"c\\n\"]\nd: {e: 1e-3}\nf:\n  - |\n    x\n  - ~\n", "", "- é\n-\n", "a: '\\t'"]
    fast = [parse_yaml(text, "it") for text in texts]
    monkeypatch.setattr("yaml.__with_libyaml__", False)
    assert len(texts) > 20 and fast == [parse_yaml(text, "it") for text in texts]

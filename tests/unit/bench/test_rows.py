"""Arms of a bench, their workloads, and their rows beside one another: ratios, work by formula, warnings."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from octetrl.bench.arms import Words, make_arm, with_layers, words_of_arms
from octetrl.bench.rows import Key, Row, compare, decode_steps, model_flops, warnings
from octetrl.bench.workload import SHORT, recorded_workload, workload_of
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.engine.metrics import EngineMetrics
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError

METRICS = EngineMetrics(
    completions=4, generated_tokens=80, prompt_tokens=8, prefilled_tokens=8, steps=25, seconds=2.0, preemptions=0,
    batch_occupancy=1.0, cache_occupancy=0.5, kv_capacity_tokens=100, kv_saturation=0.0, kv_saturation_LS=None,
    non_finite_tokens=0, tail_share=0.0, step_seconds=(), capture_seconds=0.0, session_capture_seconds=None,
    cancelled=0, idle_share=0.0,
)  # fmt: skip


def row(*words: str, seconds: float, kind: str = "embedded", workers: int = 1, **more: float) -> tuple[Key, Row]:
    of = dict(word.split("=") for word in words)
    found: Row = {
        "precision": of.get("precision", "fp8_full"),
        "workload": "8x4+4",
        "arm": " ".join(word for word in words if not word.startswith("precision")),
        "cluster/kind": kind,
        "cluster/workers": workers,
    }
    times = {f"time/{phase}": seconds for phase in ("step", "produce", "learn", "rollout")}
    return ("8x4+4", words), found | times | more


def test_precisions_are_compared_with_equal_other_overrides() -> None:
    rows = dict(
        row(f"precision={precision}", f"seed={seed}", seconds=seconds)
        for precision, seed, seconds in (("bf16", 1, 3.0), ("fp8", 1, 2.0), ("bf16", 2, 10.0), ("fp8", 2, 4.0))
    )
    compare(rows, ("step", "produce", "learn"))
    assert [one["step/step_speedup_over_bf16"] for one in rows.values()] == [1.0, 1.5, 1.0, 2.5]
    compare(rows, ("rollout",))
    assert [one["rollout/speedup_over_bf16"] for one in rows.values()] == [1.0, 1.5, 1.0, 2.5]
    (alone,) = dict([row("precision=fp8", seconds=1.0)]).items()
    compare(dict([alone]), ("step",))
    assert "step/step_speedup_over_bf16" not in alone[1]


def test_workers_are_compared_with_one_on_ray_and_with_the_embedded_one() -> None:
    rows = dict(
        [
            row("cluster.cpus=null", seconds=4.0),
            row("cluster.cpus=1", seconds=5.0, kind="ray"),
            row("cluster.cpus=2", seconds=2.5, kind="ray", workers=2),
            row("cluster.cpus=2", "seed=2", seconds=2.5, kind="ray", workers=2),
        ]
    )
    compare(rows, ("step", "learn"))
    _, one, two, other = rows.values()
    assert (one["step/efficiency"], two["step/efficiency"], two["learn/efficiency"]) == (1.0, 1.0, 1.0)
    assert one["step/over_embedded"] == pytest.approx(0.25) and "step/over_embedded" not in two
    assert "step/efficiency" not in other, "another seed is other work"


def test_roles_are_compared_with_workers_that_do_both() -> None:
    roles = {"cluster/trainers": 1, "cluster/engines": 1}
    rows = dict(
        [
            row("cluster.cpus=2", seconds=3.0, kind="ray", workers=2),
            row("cluster.trainer_cpus=1", "cluster.engine_cpus=1", seconds=2.0, kind="ray", workers=2, **roles),
        ]
    )
    compare(rows, ("step",))
    assert list(rows.values())[1]["step/speedup_over_both"] == 1.5
    assert list(warnings(list(rows.values()))) == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"time/capture": 0.1}, "captured CUDA graphs"),
        ({"cluster/trainers": 1, "time/rollout": 3.0}, "cannot be shorter"),
        ({"step/efficiency": 1.4}, "compare nothing"),
        ({"step/over_embedded": 1.4}, "compare nothing"),
        ({"rollout/digest": 1.0}, "sampled other tokens"),
    ],
)
def test_times_that_are_not_fair_are_named(more: dict[str, float], words: str) -> None:
    first, second = row("cluster.cpus=1", seconds=2.0)[1], row("cluster.cpus=2", seconds=2.0)[1] | more
    found = list(warnings([first, second]))
    assert len(found) == 1 and words in found[0] and "cluster.cpus=2" in found[0]


def test_model_flops_of_a_dense_model() -> None:
    spec = spec_from_config(preset_config("qwen3-0.6b"))
    linears = 28 * (1024 * (16 + 2 * 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072)
    by_hand = 6 * linears * 30 + 6 * 151_936 * 1024 * 12
    by_hand += 28 * int(3.5 * 4) * 16 * 128 * (10 * 11 // 2 + 20 * 21 // 2)
    assert model_flops(spec, [10, 20], 12) == by_hand


def test_decode_steps_do_not_count_prefills() -> None:
    assert decode_steps(METRICS, max_batch=4) == 20
    assert decode_steps(replace(METRICS, batch_occupancy=0.5), max_batch=4) == 40


@pytest.mark.parametrize(
    ("fields", "whole", "words"),
    [
        ([], [], [()]),
        (["precision=bf16,fp8_full"], [], [("precision=bf16",), ("precision=fp8_full",)]),
        (["a=1,2", "b=x,y"], [], [("a=1", "b=x"), ("a=1", "b=y"), ("a=2", "b=x"), ("a=2", "b=y")]),
        (["a={b: 1, c: [2, 3]},null"], [], [("a={b: 1, c: [2, 3]}",), ("a=null",)]),
        (
            ["a=1,2"],
            ["b=1 c='x y'", "d=2"],
            [("b=1", "c=x y", "a=1"), ("b=1", "c=x y", "a=2"), ("d=2", "a=1"), ("d=2", "a=2")],
        ),
    ],
)
def test_options_become_lists_of_overrides(fields: list[str], whole: list[str], words: list[Words]) -> None:
    assert words_of_arms(fields, whole) == words


@pytest.mark.parametrize("option", ["precision", "=1", "a=", "a=1,,2", "a=1,1"])
def test_what_is_no_arm_is_refused(option: str) -> None:
    with pytest.raises(UserError, match="--arms"):
        words_of_arms([option])


def test_an_arms_recipe_has_the_workloads_sizes_and_writes_nothing() -> None:
    given = ["engine.max_batch=6", "rollout.stop=[a]", "evaluation.every=1", "algorithm.overlong=mask"]
    recipe = load_recipe("bench_tiny", given)
    spec = with_layers(recipe, 1)
    workload = workload_of(recipe, "8x5+3-9", None, spec.max_positions)
    arm = make_arm("step", ("precision=bf16", "seed=2"), recipe, spec, workload, steps=3)
    rollout = arm.recipe.rollout
    assert (rollout.prompts_per_step, rollout.group_size) == (2, 4)
    assert (rollout.max_prompt_tokens, rollout.max_new_tokens) == (5, max(answer for _, answer in workload.siblings))
    assert arm.recipe.engine.max_batch == 6 and rollout.stop == () and arm.recipe.evaluation.every == 0
    assert arm.recipe.algorithm.overlong == "keep", "each answer ends at its limit, and is to be trained on"
    assert (arm.untimed, arm.recipe.steps, arm.name, arm.spec.num_layers) == (2, 5, "seed=2", 1)
    few = workload_of(recipe, "4x5+9", None, spec.max_positions)
    assert make_arm("rollout", (), recipe, spec, few, steps=1).recipe.engine.max_batch == 4, "one place an answer"


def test_an_arm_that_generates_ahead_fills_its_pipeline_first() -> None:
    ahead = ["cluster.trainer_cpus=1", "cluster.engine_cpus=1", "cluster.max_staleness=2"]
    recipe = load_recipe("bench_tiny", ahead)
    spec = with_layers(recipe, None)
    arm = make_arm("step", (), recipe, spec, workload_of(recipe, None, None, spec.max_positions), steps=3)
    assert (arm.untimed, arm.recipe.steps) == (4, 9), "batches behind the last timed step are begun"


def test_what_a_bench_cannot_run_is_refused() -> None:
    recipe = load_recipe("bench_tiny")
    with pytest.raises(UserError, match="--layers"):
        with_layers(recipe, 99)
    sft = load_recipe("demo_sft")
    with pytest.raises(UserError, match=r"algorithm\.name"):
        make_arm("step", (), sft, with_layers(recipe, 1), workload_of(recipe, None, None, 200), steps=1)


POSITIONS = 5000


def recipe(group: int = 8) -> Recipe:
    return load_recipe("bench_qwen3-8b", [f"rollout.group_size={group}"])


def test_lengths_of_a_span_are_those_of_earlier_results() -> None:
    """They drew each prompt's tokens from the vocabulary, then its answers' lengths, by one generator."""
    workload = workload_of(recipe(), "64x512+2048-4096", None, POSITIONS)
    rng = random.Random(1)
    for prompt, answers in workload.groups:
        rng.choices(range(151_936), k=512)
        assert (prompt, answers) == (512, tuple(rng.randint(2048, 4096) for _ in range(8)))
    assert workload.name == "64x512+2048-4096" and len(workload.siblings) == 64
    assert workload.tokens == workload.generated_tokens + 64 * 512


def test_fixed_and_log_normal_lengths() -> None:
    assert workload_of(recipe(), "16x4+9", None, POSITIONS).siblings == [(4, 9)] * 16
    drawn = workload_of(recipe(), "8000x4+100", 0.5, 400)
    lengths = [answer for _, answer in drawn.siblings]
    assert fmean(lengths) == pytest.approx(100, rel=0.03) and max(lengths) == 396, "cut at the model's positions"
    assert drawn.name == "8000x4+100 lognormal 0.5 grouped"


def test_without_a_workload_it_has_the_recipes_sizes() -> None:
    assert workload_of(recipe(), None, None, POSITIONS).name == "512x512+4096"


def test_keys_that_decode_steps_read() -> None:
    workload = workload_of(recipe(2), "4x5+3-7", None, POSITIONS)
    by_hand = sum(prompt + token - 1 for prompt, answer in workload.siblings for token in range(1, answer + 1))
    assert workload.live_token_steps == by_hand


def test_the_first_short_step_ends_one_answer_after_another() -> None:
    workload = workload_of(recipe(), "64x8+200", None, POSITIONS)
    stairs = [answer for answers in workload.short(0) for answer in answers]
    assert stairs == list(range(SHORT, SHORT + 64))
    assert {answer for answers in workload.short(1) for answer in answers} == {SHORT}
    few = workload_of(recipe(), "8x8+3", None, POSITIONS)
    assert few.short(0) == ((3,) * 8,), "never longer than its own length"


def test_lengths_of_a_runs_rollouts(tmp_path: Path) -> None:
    lines = [
        {"task_id": task, "prompt_token_ids": [1] * prompt, "token_ids": [2] * answer, "text": "a\u2028b"}
        for task, prompt, answer in (("a", 4, 3), ("a", 4, 9), ("b", 6, 2), ("b", 6, 5))
    ]
    file = tmp_path / "step_000003.jsonl"
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    workload = recorded_workload(file)
    assert workload.groups == ((4, (3, 9)), (6, (2, 5))) and workload.name == "4x5+5 step_000003 grouped"
    for text in ("", "[]", '{"task_id": "a"}', "[" * 100_000, json.dumps(lines[0]) + "\n" + json.dumps(lines[2] | {"token_ids": []})):  # fmt: skip  # noqa: E501
        file.write_text(text)
        if text.startswith('{"task_id": "a", "p'):
            assert recorded_workload(file).siblings == [(4, 3)], "a rollout without an answer is left out"
            continue
        with pytest.raises(UserError, match="--lengths"):
            recorded_workload(file)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:3]))
    with pytest.raises(UserError, match="--lengths"):
        recorded_workload(file)
    with pytest.raises(UserError, match="--lengths"):
        recorded_workload(tmp_path / "gone.jsonl")


@pytest.mark.parametrize(
    ("text", "sigma"),
    [
        *((text, None) for text in ("4x4", "0x4+4", "8x4+0", "8x4+9-8", "8x4+4\n", "8x4+" + "9" * 5000, "12x4+4")),
        ("8x4000+1001", None),
        ("8x4+4-8", 0.5),
        ("9999992x9+9", None),
    ],
)
def test_what_is_no_workload_is_refused_by_name(text: str, sigma: float | None) -> None:
    with pytest.raises(UserError) as refused:
        workload_of(recipe(), text, sigma, POSITIONS)
    assert str(refused.value).startswith("--workload: ") and len(str(refused.value)) < 300

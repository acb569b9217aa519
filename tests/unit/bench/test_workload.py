"""A bench's workload: lengths that are drawn, cut or read, and what decoding them reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean

import pytest

from octetrl.bench.workload import SHORT, recorded_workload, workload_of
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.system.errors import UserError

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

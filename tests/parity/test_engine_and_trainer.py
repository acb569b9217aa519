"""The engine's recorded log-prob of every token it draws is the trainer's, bit for bit, whatever happened to either."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import pytest

from octetrl.config.schema import EngineConfig, Fp8Config, ModelConfig, Recipe
from octetrl.records import GenerationRequest
from tests.objectives import objective
from tests.parity.shapes import TINY
from tests.parity.short_run import assert_equal_in_every_step, assert_learned, assert_same, short_run, worker_of
from tests.parity.sides import ONE_TENSOR, PRECISIONS, Answers, Sides, random_requests
from tests.parity.situations import IN_THE_ENGINE, check_trainer, in_the_trainer

LONGEST = 150
ALL = [(family, precision) for family in TINY for precision in PRECISIONS]
TELLING = pytest.mark.parametrize(  # linears and cache both differ between these; one family has them all
    ("family", "precision"), [case for case in ALL if case[0] == "qwen3" or case[1] in ("bf16", "fp8_full")]
)
PAGES = ("small_chunks", "next_turn", "preempted")  # written, found and computed again; all of them are small
BATCHES = ("one_by_one", "preempted")
SITUATIONS = pytest.mark.parametrize(
    ("situation", "family", "precision"),
    [
        *((situation, "qwen3", precision) for situation in IN_THE_ENGINE for precision in ("bf16", "fp8_full")),
        *((situation, "qwen3", "fp8") for situation in BATCHES),  # its cache is bf16's
        *((situation, "qwen3", "fp8_dynamic") for situation in PAGES),  # its linears are fp8_full's
        *((situation, "qwen3", precision) for situation in PAGES for precision in ("fp8_full_k", "fp8_full_v")),
        *((situation, "qwen3", "fp8_int8_k") for situation in PAGES),
        *((situation, "qwen2.5", "fp8_full") for situation in PAGES),  # its K and V are of two formats
        *((situation, "llama", "bf16") for situation in BATCHES),  # its pages are qwen3's
    ],
)


@lru_cache
def drawn(family: str, precision: str) -> tuple[Sides, list[GenerationRequest], Answers]:
    """Some requests, and what an engine left alone answers. Four siblings fill three pages of 16 each, and the cache of
    `preempted` has eleven."""
    draw = random.Random(f"{family} {precision}")
    sides = Sides(TINY[family], precision)
    asked = random_requests(draw, sides.spec, 1, prompts=(10, 12), answers=(24, 24), siblings=(4, 4), temperature=0.9)
    asked += random_requests(draw, sides.spec, 2, prompts=(1, LONGEST - 24), answers=(6, 12), temperature=0.9)
    asked += random_requests(draw, sides.spec, 1, prompts=(120, 126), answers=(18, 20), temperature=0.9)
    return sides, asked, sides.engine().generate(asked)


@SITUATIONS
def test_what_happens_in_the_engine_changes_nothing(situation: str, family: str, precision: str) -> None:
    sides, asked, answers = drawn(family, precision)
    assert IN_THE_ENGINE[situation](sides.engine, asked) == answers


@pytest.mark.parametrize("precision", ONE_TENSOR)
def test_k_or_v_alone_in_codes_has_equal_log_probs(precision: str) -> None:
    """A precision of its own: another digest, and other log-probs than those of both in codes."""
    sides, asked, answers = drawn("qwen3", precision)
    check_trainer(sides, asked, answers)
    both, _, others = drawn("qwen3", precision[:-2])
    assert sides.policy.digest != both.policy.digest and answers != others
    alone = {name: stored for name, stored in sides.policy.cache}
    assert alone == {"K": "bf16", "V": "bf16"} | {precision[-1].upper(): "fp8"}
    run = short_run(TINY["qwen3"], precision, "cpu", 2, answers=8, tokens_per_micro_batch=256)
    assert_equal_in_every_step(run)
    assert_learned(run)


@TELLING
def test_what_happens_in_the_trainer_changes_nothing(family: str, precision: str) -> None:
    sides, asked, answers = drawn(family, precision)
    for config in in_the_trainer(LONGEST).values():
        check_trainer(sides, asked, answers, **config)


@TELLING
def test_every_step_of_a_run_says_that_nothing_differs_and_runs_repeat(family: str, precision: str) -> None:
    repeats = 2 if family == "qwen3" else 1  # of another family no op differs
    runs = [short_run(TINY[family], precision, "cpu", 3, answers=8, tokens_per_micro_batch=256) for _ in range(repeats)]
    assert_equal_in_every_step(runs[0])
    assert_same(runs[0], runs[-1])
    assert_learned(runs[0])


@pytest.mark.parametrize(
    ("changes", "all_compared"),
    [({}, True), ({"ratio_base": "generator"}, False), ({"name": "rft"}, False)],
    ids=["grpo", "the generator as base", "rft"],
)
def test_several_updates_compare_log_probs_of_before_the_first(changes: dict[str, Any], all_compared: bool) -> None:
    """Objectives that need none from before the updates have them for the first minibatch alone."""
    options = {"answers": 6, "minibatches": 2, "algorithm": objective(**changes)}
    run = short_run(TINY["qwen3"], "fp8_full", "cpu", 2, **options)
    assert_equal_in_every_step(run)
    compared = [metrics["mismatch/tokens"] for metrics in run.metrics]
    drawn = len(run.tokens) * 4 * 6 / len(run.metrics)
    assert all((tokens == drawn) == all_compared and tokens >= drawn / 4 for tokens in compared), compared


@pytest.mark.parametrize(
    ("promised", "changes"),
    [
        (True, {}),
        (True, {"fp8": PRECISIONS["fp8_full"]}),
        (False, {"fp8": Fp8Config(rollout=True)}),
        (False, {"fp8": PRECISIONS["fp8_full"].model_copy(update={"kv_replay": False})}),
        (False, {"fp8": PRECISIONS["fp8_dynamic"], "engine": EngineConfig(prefix_cache="keep")}),
    ],
    ids=["bf16", "fp8_full", "fp8_rollout", "no replay", "pages of older weights"],
)
def test_equality_is_promised_only_where_both_sides_compute_the_same(promised: bool, changes: dict[str, Any]) -> None:
    model = ModelConfig(preset="tiny", init="random", context_length=64)
    worker = worker_of(Recipe(model=model, **changes), TINY["qwen3"], "cpu")
    assert worker.parity == ("promised" if promised else "measured")

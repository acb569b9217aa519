"""With adapters the engine's log-probs are the trainer's as without them, whatever happens to either side."""

from __future__ import annotations

import random

import pytest

from octetrl.config.schema import LoraConfig
from octetrl.engine.weights import weight_set, weights_digest
from tests.parity.shapes import TINY
from tests.parity.short_run import assert_equal_in_every_step, assert_learned, assert_same, short_run
from tests.parity.sides import Sides, random_requests
from tests.parity.situations import IN_THE_ENGINE, check_trainer, in_the_trainer

LORA = LoraConfig(rank=6, alpha=9.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
CASES = pytest.mark.parametrize(("family", "precision"), [("qwen3", "fp8_full"), ("qwen2.5", "fp8_dynamic")])


@CASES
def test_what_happens_in_engine_and_trainer_changes_nothing(family: str, precision: str) -> None:
    sides, draw = Sides(TINY[family], precision, lora=LORA), random.Random(1)
    asked = random_requests(draw, sides.spec, 1, prompts=(10, 12), answers=(24, 24), siblings=(4, 4), temperature=0.9)
    asked += random_requests(draw, sides.spec, 2, prompts=(1, 60), answers=(6, 12), temperature=0.9)
    asked += random_requests(draw, sides.spec, 1, prompts=(120, 126), answers=(18, 20), temperature=0.9)
    answers = sides.engine().generate(asked)
    plain = Sides(TINY[family], precision)
    assert plain.engine().generate(asked) != answers, "the adapters do something"
    for name in IN_THE_ENGINE if precision == "fp8_full" else ("one_by_one", "next_turn", "preempted"):
        assert IN_THE_ENGINE[name](sides.engine, asked) == answers, name
    in_turn = in_the_trainer(150)
    for name in in_turn if precision == "fp8_full" else ("one sequence a micro-batch", "layers run again"):
        check_trainer(sides, asked, answers, **in_turn[name])
    assert weights_digest(sides.engine_model, weight_set(sides.trainer_model, 1))


@CASES
def test_every_step_of_a_run_says_that_nothing_differs_and_runs_repeat(family: str, precision: str) -> None:
    config = {"answers": 8, "lora": LORA, "tokens_per_micro_batch": 256}
    runs = [short_run(TINY[family], precision, "cpu", 3, **config) for _ in range(2)]
    assert_equal_in_every_step(runs[0])
    assert_same(*runs)
    assert_learned(runs[0])

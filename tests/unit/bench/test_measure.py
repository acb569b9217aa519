"""The benches on a CPU: steps of a run on the workload, whose parts add up, and rows that compare the arms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octetrl.bench.arms import Arm, Verb, make_arm, with_layers, words_of_arms
from octetrl.bench.measure import Turn, in_turn, measure, take_turn
from octetrl.bench.rows import rows_of
from octetrl.bench.run import bench_run
from octetrl.bench.workload import workload_of
from octetrl.config.load import load_recipe
from octetrl.run.loop import one_step


def arms(verb: Verb, workload: str, *fields: str, changes: tuple[str, ...] = ()) -> list[Arm]:
    made = []
    for words in words_of_arms(fields):
        recipe = load_recipe("bench_tiny", [*changes, *words])
        spec = with_layers(recipe, 1)
        sizes = workload_of(recipe, workload, None, spec.max_positions)
        made.append(make_arm(verb, words, recipe, spec, sizes, steps=2))
    return made


@pytest.fixture(scope="module")
def stepped() -> list[Turn]:
    return measure(arms("step", "8x5+3-9", "precision=bf16,fp8_full"), steps=2, rounds=2)


def test_turns_go_forth_and_back(stepped: list[Turn]) -> None:
    assert [turn.arm.words[0] for turn in stepped] == [
        *("precision=bf16", "precision=fp8_full"),
        *("precision=fp8_full", "precision=bf16"),
    ]
    assert [number for number, _ in in_turn(arms("step", "8x5+3", "seed=1,2"), 3)] == [1, 1, 2, 2, 3, 3]


def test_the_parts_of_a_step_add_up_and_log_probs_are_equal(stepped: list[Turn]) -> None:
    rows = rows_of(stepped)
    assert [row["precision"] for row in rows] == ["bf16", "fp8_full"]
    for row in rows:
        parts = [float(row[f"time/{phase}"]) for phase in ("produce", "learn", "publish")]
        assert min(parts) >= 0 and sum(parts) == pytest.approx(float(row["time/step"]))
        assert float(row["step/publish_ms"]) > float(row["step/requantize_ms"]) > 0
        assert row["mismatch/max_abs_diff"] == 0.0 and row["mismatch/token_mult_prob_error"] == 1.0
        assert (row["rounds"], row["steps"], row["step/layers"], row["weights"]) == (2, 4, 1, "drawn")
        assert row["step/tokens_per_second"] == pytest.approx(stepped[0].arm.workload.tokens / float(row["time/step"]))
        assert row["mismatch/tokens"] == stepped[0].arm.workload.generated_tokens
    assert rows[0]["step/step_speedup_over_bf16"] == 1 and float(rows[1]["step/learn_speedup_over_bf16"]) > 0
    assert "step/publish_gb" not in rows[0] and float(rows[1]["step/publish_gb"]) > 0, "nothing of bf16 is FP8"


def test_an_arms_answers_repeat(stepped: list[Turn]) -> None:
    digests = {(turn.arm.words, turn.digest) for turn in stepped}
    assert len(digests) == 2 and "" not in {digest for _, digest in digests}


def test_the_answers_of_a_timed_step_have_the_workloads_lengths() -> None:
    (arm,) = arms("step", "8x5+3-19")
    with bench_run(arm) as run:
        lengths = []
        for step in (1, 2, 3):
            groups = one_step(run, step).groups
            turns = [[rollout.turns[0] for rollout in group.rollouts] for group in groups]
            lengths.append(tuple(tuple(len(turn.completion.token_ids) for turn in siblings) for siblings in turns))
            rewards = {rollout.reward for group in groups for rollout in group.rollouts}
            assert len(rewards) == 8, "every group has advantages"
    assert lengths == [arm.workload.short(0), arm.workload.short(1), tuple(own for _, own in arm.workload.groups)]


def test_generation_alone() -> None:
    plain, fp8 = rows_of(measure(arms("rollout", "8x5+6", "precision=bf16,fp8_full"), steps=1, rounds=1))
    for row in (plain, fp8):
        assert (row["rollout/generated_tokens"], row["rollout/batch_occupancy"]) == (48, 1.0)
        assert row["rollout/prefilled_tokens"] == 2 * 4, "siblings share their prompt, except its last token"
        assert row["rollout/tokens_per_second"] == pytest.approx(48 / float(row["time/rollout"]))
        assert (row["rollout/max_batch"], row["rollout/mean_length"], row["rollout/backend"]) == (8, 6, "octetrl")
        assert row["rollout/live_kv_tokens"] == pytest.approx(8 * (5 + 2.5))
    assert float(fp8["rollout/kv_bytes_per_token"]) == float(plain["rollout/kv_bytes_per_token"]) / 2
    assert float(fp8["rollout/speedup_over_bf16"]) > 0 and "time/train" not in plain


def test_learning_alone_is_the_same_work_for_every_setting() -> None:
    changes = ("trainer.tokens_per_micro_batch=32",)
    kept, remade = rows_of(measure(arms("train", "8x4+12", "trainer.weight_codes=kept,remade", changes=changes), 2, 1))
    assert kept["train/loss"] == remade["train/loss"]
    for row in (kept, remade):
        assert (row["train/tokens"], row["train/trained_tokens"], row["train/micro_batches"]) == (128, 96, 4)
        assert row["train/whole_tokens_per_second"] == pytest.approx(128 / float(row["time/train"]))
        in_parts = sum(float(row[f"train/{part}_ms"]) for part in ("gradient", "optimizer", "requantize"))
        assert in_parts / 1e3 == pytest.approx(float(row["time/train"]), rel=0.5), "medians of each"
        assert "rollout/digest" not in row
    assert (kept["train/weight_codes"], remade["train/weight_codes"]) == ("kept", "remade")


def test_a_turn_with_vllm_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    (arm,) = arms("rollout", "8x5+6")
    recipe = arm.recipe.model_copy(update={"engine": arm.recipe.engine.model_copy(update={"backend": "vllm"})})
    asked: list[Arm] = []
    monkeypatch.setattr("octetrl.bench.measure._in_fresh_process", lambda arm, steps: asked.append(arm) or turn)
    turn = take_turn(arm, 1)
    assert measure([replace(arm, recipe=recipe), arm], 1, 1)[0] is turn and [one.recipe for one in asked] == [recipe]

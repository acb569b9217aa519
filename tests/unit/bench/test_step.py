"""`octetrl bench step`: groups with advantages, phases that add up, and calibration whose cost is told apart."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from octetrl.algorithms.table import build_algorithm
from octetrl.bench.clock import MicroBatchClock, Pace
from octetrl.bench.model import find_model
from octetrl.bench.step import (
    StepArm,
    StepBench,
    StepTimes,
    StepTurn,
    build_bench_worker,
    check_memory,
    estimate_bytes,
    measure,
    rollout_groups,
)
from octetrl.bench.step_rows import calibration_rows, rows_of
from octetrl.bench.workload import LengthRange, uniform_lengths
from octetrl.cli.bench_options import with_layers
from octetrl.config.schema import LoraConfig, OptimizerConfig, TrainerConfig
from octetrl.engine.kv_cache import KVCache
from octetrl.records import Completion, FinishReason
from octetrl.system.errors import UserError
from octetrl.telemetry.metrics import MISMATCH
from octetrl.workers.worker import Worker
from tests.objectives import objective

TINY = with_layers(find_model("tiny"), 1)
WORK = uniform_lengths(2, 2, 6, LengthRange(3, 8), TINY.spec.vocab_size, seed=0)


def bench(*precisions: str) -> StepBench:
    trainer = TrainerConfig(tokens_per_micro_batch=24)
    return StepBench(TINY, precisions, WORK, 2, trainer, torch.device("cpu"), warmup_tokens=2)


# --- the workload -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "span"), [("4096", LengthRange(4096, 4096)), ("2048-4096", LengthRange(2048, 4096))])
def test_a_span_is_what_it_says(text: str, span: LengthRange) -> None:
    assert LengthRange.parse(text, "--x") == span and str(span) == text


@pytest.mark.parametrize("text", ["", "0", "5-4", "0-3", "3-", "-3", "a", "1-2-3", "1.5"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--x: .*write for example 4096 or 2048-4096"):
        LengthRange.parse(text, "--x")


def test_siblings_of_a_span_share_their_prompt() -> None:
    workload = uniform_lengths(50, 4, 6, LengthRange(3, 8), 384, seed=1)
    assert workload.name == "200x6+3-8"
    answers = [answer for _, answer in workload.siblings]
    assert len(answers) == 200 and set(answers) == {3, 4, 5, 6, 7, 8}
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert all(len(set(prompts[first : first + 4])) == 1 for first in range(0, 200, 4)) and len(set(prompts)) == 50
    assert workload == uniform_lengths(50, 4, 6, LengthRange(3, 8), 384, seed=1)
    assert len(uniform_lengths(50, 4, 6, LengthRange(5, 5), 384, seed=1).requests) == 50, (
        "equal lengths stay one request"
    )


@pytest.mark.parametrize("answers", [LengthRange(3, 5), LengthRange(4, 4)])
def test_every_group_has_advantages(answers: LengthRange) -> None:
    workload = uniform_lengths(3, 4, 6, answers, 384, seed=0)
    completions = [
        [Completion((index,) * request.sampling.max_new_tokens, (0.0,), "", FinishReason.LENGTH, 0, "")] * siblings
        for index, request in enumerate(workload.requests)
        for siblings in [request.num_siblings]
    ]
    groups = rollout_groups(workload.requests, completions, 4, random.Random(0))
    assert [len(group.rollouts) for group in groups] == [4, 4, 4]
    algorithm = build_algorithm(objective())
    for group in groups:
        assert len({rollout.turns[0].prompt_token_ids for rollout in group.rollouts}) == 1
        assert algorithm.keeps(group)
        assert all(advantage != 0 for advantage in algorithm.advantages([group.rewards])[0])


# --- what is measured ---------------------------------------------------------------------------------------


def test_precisions_alternate_learn_what_they_drew_and_leave_nothing_behind() -> None:
    def caches() -> int:
        gc.collect()
        return sum(type(thing) is KVCache for thing in gc.get_objects())

    before, alive = caches(), []
    plan = replace(bench("bf16", "fp8_full"), rounds=2, steps=2, calibration=("fused", "off", "exact"))
    turns = measure(plan, lambda number, turn: alive.append(caches()))
    assert [turn.precision for turn in turns] == ["bf16", "fp8_full", "fp8_full", "bf16"]
    assert alive == [before] * 4
    for turn in turns:
        assert len(turn.steps) == 2
        for step in turn.steps:
            assert step.mismatch == 1.0 and step.max_abs_diff == 0.0, "engine and trainer agree to the bit"
            assert step.compared_tokens > 0
            assert 0 < step.requantize <= step.publish and step.produce > 0 and step.learn > 0
            assert step.micro_batches >= 2
            assert step.kv_capacity_tokens > 0 == step.preemptions
    assert turns[0].published_bytes == 0 < turns[1].published_bytes
    assert turns[0].calibration == {} and turns[0].steps[0].calibrate == 0.0
    assert {mode: len(seconds) for mode, seconds in turns[1].calibration.items()} == {"fused": 3, "off": 3, "exact": 3}
    assert 0 < turns[1].calibration_tokens <= 48
    for row in rows_of(plan, turns):
        assert row[MISMATCH] == 1.0 and row["steps"] == 4 and row["rounds"] == 2
        assert "memory/learn_peak_gb" not in row


def test_phases_are_no_more_than_the_step() -> None:
    arm = StepArm(bench("fp8"), build_bench_worker(bench("fp8"), "fp8"))
    shares = []
    for number in range(5):
        began = time.perf_counter()
        step = arm.step(number)
        shares.append(step.total / (time.perf_counter() - began))
    assert max(shares) <= 1.0, "nothing is counted twice: quantising is publishing, not learning"
    assert max(shares) > 0.2  # a busy machine may stop one of them anywhere


def test_with_adapters_nothing_else_is_trained() -> None:
    plan = replace(bench("fp8_full"), lora=LoraConfig(rank=8))
    (turn,) = measure(plan)
    assert turn.steps[0].max_abs_diff == 0.0 and turn.steps[0].compared_tokens > 0
    assert rows_of(plan, [turn])[0]["step/lora_rank"] == 8
    trained = [
        name for name, one in build_bench_worker(plan, "fp8_full").trainer_model.named_parameters() if one.requires_grad
    ]
    assert trained and all(".lora." in name for name in trained)


def test_learning_pays_for_giving_the_cache_back(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(bench("bf16"), trainer=TrainerConfig(tokens_per_micro_batch=16))  # enough of them for a pace
    arm = StepArm(plan, build_bench_worker(plan, "bf16"))
    monkeypatch.setattr(arm.worker.engine, "sleep", lambda: time.sleep(0.25))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("octetrl.bench.step.MicroBatchClock", lambda device: MicroBatchClock(torch.device("cpu")))
    arm.bench = replace(plan, device=torch.device("cuda"))  # the worker stays where it is
    step = arm.step(0)
    assert step.learn > 0.25 and step.pace is not None and step.pace.before > 0.25


H200 = 150_700_000_000  # bytes


def for_a_gpu(trainer: TrainerConfig) -> StepBench:
    model = find_model("qwen3-8b")
    workload = uniform_lengths(2, 2, 512, LengthRange(2048, 4096), model.spec.vocab_size, seed=0)
    precisions = ("bf16", "fp8_rollout", "fp8", "fp8_full")
    return StepBench(model, precisions, workload, 2, trainer, torch.device("cuda"))


def test_what_would_not_fit_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (H200, H200))
    plan = for_a_gpu(TrainerConfig())
    with pytest.raises(UserError) as refused:
        check_memory(plan)
    assert str(refused.value) == (
        "--precision: bf16 takes about 158 GB and the GPU has 151; take --optimizer-states 8bit"
        " --master stochastic_rounding, add --offload, or lower --tokens or --layers"
    )
    narrow = OptimizerConfig(states="8bit", master="stochastic_rounding")
    attention = {"activation_checkpointing": "attention", "checkpointed_layers": 4}
    for kept in ({}, attention):
        check_memory(for_a_gpu(TrainerConfig.model_validate({"optimizer": narrow} | kept)))


def test_the_estimate_is_of_training_with_codes_that_the_engine_reads() -> None:
    plan = for_a_gpu(TrainerConfig(optimizer=OptimizerConfig(states="8bit", master="stochastic_rounding")))
    plain, rollout, fp8, full = (estimate_bytes(plan, precision) for precision in plan.precisions)
    assert plain < rollout < fp8 == full, "no KV cache is counted"
    assert plain == pytest.approx(76.0e9, rel=0.01) and full == pytest.approx(89.9e9, rel=0.01)


def test_a_mismatch_is_shown() -> None:
    (turn,) = measure(bench("fp8_rollout"))
    assert turn.steps[0].mismatch > 1.0 and turn.steps[0].max_abs_diff > 0.0, "FP8 on one side alone"


class VirtualTime:
    """A clock that only learning moves: 10 ms a token of a forward, 0.5 s more for the first, 0.7 s for the update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(time, "perf_counter", self.now)

    def now(self) -> float:
        self.seconds += 1e-9  # no span is empty
        return self.seconds

    def watch(self, worker: Worker) -> None:
        first = True

        def forward(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            nonlocal first
            self.seconds += 0.01 * inputs[0].numel() + 0.5 * first
            first = False

        def update(*_: object) -> None:
            nonlocal first
            self.seconds += 0.7
            first = True

        worker.trainer_model.register_forward_hook(lambda module, inputs, _: forward(module, inputs))
        step = worker.trainer.optimizer.step
        worker.trainer.optimizer.step = lambda lr: (update(), step(lr))[1]  # type: ignore[method-assign]


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_learning_from_a_share_takes_the_time_of_the_whole(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where enough micro-batches are learnt from to tell a steady pace. Where they are not (a quarter), what the first
    one costs besides counts as often as the share fits into the whole: an overestimate."""
    clock = VirtualTime(monkeypatch)
    plan = replace(bench("bf16"), workload=uniform_lengths(8, 2, 6, LengthRange(3, 8), TINY.spec.vocab_size, seed=0))
    learnt = []
    for of_all in (share, 1.0):
        arm = StepArm(replace(plan, learn_share=of_all), build_bench_worker(plan, "bf16"))
        clock.watch(arm.worker)
        learnt.append(arm.for_all(arm.step(0), optimizer_seconds=0.7))
    extrapolated, whole = learnt
    assert whole.learn == pytest.approx(1.2 + 0.01 * sum(map(sum, plan.workload.siblings)))
    assert (extrapolated.pace is None) == (share == 0.25)
    if extrapolated.pace is not None:
        assert extrapolated.learn == pytest.approx(whole.learn, rel=1e-6)
    else:
        assert whole.learn < extrapolated.learn < whole.learn + 0.5 * (1 / share + 1)
    assert extrapolated.micro_batches == pytest.approx(whole.micro_batches, abs=1)


def test_what_happens_once_in_a_learning_is_counted_once() -> None:
    arm = StepArm(bench("bf16"), build_bench_worker(bench("bf16"), "bf16"))
    arm._learnt_tokens, arm._all_tokens = 100, 400
    step = replace(times(6.0, 3.0, 1.0), pace=Pace(before=1.0, settling=0.5, steady=0.01))
    assert arm.for_all(step, 0.25).learn == pytest.approx(6.0), "300 tokens more, 10 ms each"
    assert arm.for_all(replace(step, pace=None), 0.25).learn == pytest.approx(0.25 + 2.75 * 4)


def test_the_clock_tells_before_settling_and_steady_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 5.0, 15.0, 20.0, 22.0, 26.0, 27.0])  # begun, then six forwards
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    clock, model = MicroBatchClock(torch.device("cpu")), torch.nn.Identity()
    with clock.marked(model):
        for _ in range(6):
            model(torch.zeros(1))
    model(torch.zeros(1))  # after the end: not marked
    tokens = [20, 10, 10, 20, 5, 7]
    assert clock.pace(tokens) == Pace(before=5.0, settling=pytest.approx(15.0 - 30 * 0.2), steady=pytest.approx(0.2))
    assert clock.pace(tokens[:5]) is None, "a forward that was no micro-batch's"


# --- from turns to rows -------------------------------------------------------------------------------------


def times(produce: float, learn: float, publish: float) -> StepTimes:
    return StepTimes(
        produce=produce,
        learn=learn,
        publish=publish,
        calibrate=0.25,
        mismatch=1.0,
        max_abs_diff=0.0,
        compared_tokens=7,
        micro_batches=3,
        preemptions=4,
        requantize=publish / 2,
        produce_peak=None,
        learn_peak=None,
        kv_capacity_tokens=640,
    )


def turn_of(
    precision: str,
    *steps: StepTimes,
    calibration: dict[str, list[float]] | None = None,
) -> StepTurn:
    return StepTurn(precision, steps, calibration or {}, 10, 0 if precision == "bf16" else 10**9, 0.5, 1.0)


def test_rows_have_shares_and_ratios() -> None:
    plan = bench("bf16", "fp8")
    turns = [turn_of("bf16", times(6.0, 3.0, 1.0)), turn_of("fp8", times(3.0, 1.5, 0.5), times(3.0, 1.5, 0.5))]
    plain, fp8 = rows_of(plan, turns)
    assert (plain["time/step"], fp8["time/step"]) == (10.0, 5.0)
    assert [plain[f"step/{phase}_share"] for phase in ("produce", "learn", "publish")] == [0.6, 0.3, 0.1]
    assert [fp8[f"step/{phase}_speedup_over_bf16"] for phase in ("step", "produce", "learn")] == [2.0, 2.0, 2.0]
    tokens = sum(map(sum, WORK.siblings))
    assert fp8["step/tokens_per_second"] == tokens / 5
    assert (fp8["step/publish_ms"], fp8["step/requantize_ms"], fp8["step/publish_gb_per_second"]) == (500, 250, 2.0)
    assert (fp8["mismatch/max_abs_diff"], fp8["mismatch/tokens"]) == (0.0, 14), "both steps' tokens were compared"
    assert (fp8["rollout/preemptions"], fp8["rollout/kv_capacity_tokens"]) == (4, 640)
    assert fp8["memory/estimate_gb"] == estimate_bytes(plan, "fp8") / 1e9
    assert (fp8["step/optimizer_states"], fp8["step/master"]) == ("float32", "float32")
    assert "step/publish_gb_per_second" not in plain, "BF16 weights are read where they lie"
    assert "step/step_speedup_over_bf16" not in rows_of(plan, turns[1:])[0]


@pytest.mark.parametrize(
    ("mode", "given", "layers"), [("none", None, 0), ("layer", None, 4), ("attention", 3, 3), ("layer", 0, 0)]
)
def test_a_row_says_how_many_layers_are_checkpointed(mode: str, given: int | None, layers: int) -> None:
    trainer = TrainerConfig.model_validate({"activation_checkpointing": mode, "checkpointed_layers": given})
    (row,) = rows_of(
        replace(bench("bf16"), model=find_model("tiny"), trainer=trainer), [turn_of("bf16", times(1, 1, 1))]
    )
    assert row["step/checkpointed_layers"] == layers


def test_calibration_is_what_it_adds_to_off_scaled_to_the_step() -> None:
    plan = replace(bench("bf16", "fp8_full"), calibration=("fused", "off"))
    calibration = {"fused": [1.25, 1.5, 1.25], "off": [1.0, 1.0, 9.0]}
    turns = [turn_of("bf16", times(1, 1, 1)), turn_of("fp8_full", times(6.0, 3.0, 1.0), calibration=calibration)]
    fused, off = calibration_rows(plan, turns)
    assert (fused["calibration"], off["calibration"]) == ("fused", "off")
    assert (fused["calibration/added_ms"], off["calibration/added_ms"]) == (250.0, 0.0)
    tokens = sum(map(sum, WORK.siblings))
    assert fused["calibration/step_share"] == pytest.approx(0.25 * tokens / 10 / 10.0)
    alone = replace(turns[1], calibration={"exact": [2.0]})
    assert "calibration/added_ms" not in calibration_rows(plan, [alone])[0]

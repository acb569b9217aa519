"""`octetrl bench step --roles`: steps of a run in a row, with equal work in all arms, and rows that compare them."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from octetrl.bench.fair_times import capture_warnings, drain_warnings
from octetrl.bench.memory import estimate
from octetrl.bench.model import find_model
from octetrl.bench.roles import InFlight, RolesArm, RolesBench, RolesTurn, digest_warnings, measure
from octetrl.bench.roles_memory import check_memory, estimated_bytes
from octetrl.bench.roles_rows import rows_of
from octetrl.bench.step import StepBench
from octetrl.bench.workload import Shape, lognormal_lengths
from octetrl.bench.workload_run import LIMITS, RandomTokens, WorkloadTasks
from octetrl.cli.bench_options import legend_of, shown, with_layers
from octetrl.cli.bench_roles import COLUMNS, LEGEND, arms_of, check_arms
from octetrl.config.cluster import ClusterConfig
from octetrl.config.schema import Recipe, TrainerConfig
from octetrl.config.worker_memory import on_each_worker
from octetrl.fp8.policy import precision_policy
from octetrl.records import Task
from octetrl.system.errors import UserError
from octetrl.telemetry.glossary import explained
from tests.unit.workers.many.thread_team import ThreadTeam

TINY = with_layers(find_model("tiny"), 1)
WORK = lognormal_lengths(Shape(16, 6, 8), 2, TINY.spec.vocab_size, 0, sigma=0.7, max_positions=64)
BOTH, TAIL = RolesArm(), RolesArm(beside_tail=True)


def apart(in_flight: InFlight = "off", max_staleness: int = 1) -> RolesArm:
    return RolesArm((1, 1), False, max_staleness, in_flight)


def bench(*arms: RolesArm, steps: int = 2, warmup: int = 3) -> RolesBench:
    trainer = TrainerConfig(tokens_per_micro_batch=32)
    step = StepBench(TINY, ("fp8_full",), WORK, 2, trainer, torch.device("cpu"), steps=steps, warmup_tokens=warmup)
    return RolesBench(step, ClusterConfig(cpus=2, cpu_threads=1), arms)


def threads(recipe: Recipe, folder: None, deadlines: Any, **how: Any) -> ThreadTeam:
    return ThreadTeam(recipe, recipe.cluster.num_workers, **how)


def test_all_arms_make_real_steps_with_equal_work() -> None:
    plan = bench(BOTH, TAIL, apart(), apart("recompute_cache"))
    check_arms(plan)
    check_memory(plan)
    turns = measure(plan, None, threads)
    assert [turn.arm for turn in turns] == list(plan.arms)
    assert len({turn.digest for turn in turns}) == 1 and digest_warnings(turns) == []
    for turn in turns:
        short, shorter, *whole = turn.lines
        assert (short["rollout/max_length"], shorter["rollout/max_length"]) == (3.0, 2.0)
        assert len(whole) == 2 + 1 and len(turn.seconds) == len(turn.timed) == 2, "each arm makes a whole step untimed"
        assert {line["train/trained_tokens"] for line in whole} == {float(WORK.generated_tokens)}
        assert [line["publish/policy_version"] for line in turn.lines] == [1.0 + n for n in range(len(turn.lines))]
    rows = both, tail, ahead, in_flight = rows_of(plan, turns)
    assert [row["arm"] for row in rows] == ["both", "both, beside tail", "1+1", "1+1, recompute_cache"]
    assert all(row["mismatch/age_0/max_abs_diff"] == 0.0 and row["mismatch/age_0/tokens"] > 0 for row in rows)
    assert [(row["cluster/trainers"], row["cluster/engines"]) for row in rows] == [(2, 2), (2, 2), (1, 1), (1, 1)]
    assert "rollout/staleness" not in both and "train/beside_tail_share" in tail and "time/publish_pause" not in tail
    assert ahead["rollout/staleness"] == 1.0 and 0.0 <= float(in_flight["rollout/staleness"]) <= 1.0
    for row in (ahead, in_flight):
        assert row["cluster/weight_buffer"] == "double"
        assert 0.0 < float(row["step/wait_for_batch_share"]) < 1.0 and float(row["step/wait_for_weights_share"]) > 0.0
        assert float(row["time/receive_weights"]) > 0.0 and float(row["publish/sent_gb_per_second"]) > 0.0
        assert float(row["time/publish_pause"]) > 0.0
    own = ("precision", "arm", "workload", "rounds", "steps", "cluster/", "step/", "memory/estimate", "rollout/digest")
    of_runs = [name for row in rows for name in row if not name.startswith((*own, "workload/", "time/startup"))]
    assert [name for name in of_runs if explained(name) is None] == [], "the names of a run's metrics"
    assert not [one for one in threading.enumerate() if one.name == "produce" and one.is_alive()]


def test_without_short_steps_the_pipeline_fills_with_whole_ones() -> None:
    plan = bench(apart(max_staleness=2), steps=1, warmup=0)
    (turn,) = measure(plan, None, threads)
    assert {line["train/trained_tokens"] for line in turn.lines} == {float(WORK.generated_tokens)}
    assert len(turn.lines) == 3 and len(turn.timed) == 1
    assert turn.startup_seconds > sum(turn.seconds) / 100


def test_tasks_are_new_in_every_step_and_the_same_in_every_run() -> None:
    tasks, chat = WorkloadTasks(WORK, 2, (4,)), RandomTokens(TINY.spec.vocab_size, 7)
    batches = [tasks.next_batch(8) for _ in range(3)]
    prompts = [[chat.prompt_tokens(task.prompt) for task in batch] for batch in batches]
    assert len({prompt for batch in prompts for prompt in batch}) == 24
    assert {len(prompt) for batch in prompts for prompt in batch} == {6}
    again = WorkloadTasks(WORK, 2, (4,))
    again.restore({"batch": 2})
    assert again.next_batch(8) == batches[2] and again.state() == tasks.state()
    assert chat.first_prompt_tokens(batches[0][0].prompt, 4) == prompts[0][0][:4]

    def limits(batch: list[Task]) -> list[tuple[int, int]]:
        return [task.metadata[LIMITS] for task in batch]

    lengths = [answer for _, answer in WORK.siblings]
    assert [one for pair in limits(batches[1]) for one in pair] == lengths and limits(batches[2]) == limits(batches[1])
    assert [one for pair in limits(batches[0]) for one in pair] == [min(4, answer) for answer in lengths]


def turn_of(arm: RolesArm, seconds: tuple[float, ...], *lines: dict[str, float], digest: str = "a") -> RolesTurn:
    return RolesTurn("bf16", arm, lines, seconds, "double" if arm.roles else "", digest, 9.0)


def test_rows_have_means_and_the_largest_differences() -> None:
    first = {"mismatch/max_abs_diff": 0.5, "mismatch/tokens": 5.0}
    stale = {"rollout/on_policy_share": 0.0, "mismatch/max_abs_diff": 7.0, "mismatch/tokens": 9.0}
    mixed = {"rollout/on_policy_share": 0.5, "mismatch/age_0/max_abs_diff": 0.25, "mismatch/age_0/tokens": 4.0} | first
    turns = [
        turn_of(BOTH, (4.0, 8.0), first, {"time/train": 1.0, "loss": 1.0}, {"time/train": 2.0}),
        turn_of(apart(), (2.0,), first, stale | {"time/wait_for_batch": 0.5}, digest="b"),
        turn_of(apart(), (4.0,), first, mixed),
    ]
    both, ahead = rows_of(bench(BOTH, apart()), turns)
    assert (both["time/step"], both["time/train"], both["steps"]) == (6.0, 1.5, 2) and "loss" not in both
    assert (ahead["time/step"], ahead["rounds"], ahead["step/speedup_over_both"]) == (3.0, 2, 2.0)
    assert (ahead["time/wait_for_batch"], ahead["step/wait_for_batch_share"]) == (0.25, 0.25 / 3.0)
    assert (ahead["mismatch/max_abs_diff"], ahead["rollout/on_policy_share"]) == (7.0, 0.25)
    assert (ahead["mismatch/age_0/max_abs_diff"], ahead["mismatch/age_0/tokens"]) == (0.5, 14.0)
    assert both["step/samples_per_second"] == 16 / 6.0
    assert digest_warnings(turns) == ["warning: bf16: 1+1 sampled other tokens or log-probs than both (b, not a)"]


def test_the_arms_of_the_options() -> None:
    def arms(cpus: int = 2, beside_tail: bool = False, **given: Any) -> Any:
        return arms_of(
            given.get("roles"),
            given.get("max_staleness"),
            given.get("in_flight"),
            cluster=ClusterConfig(cpus=cpus),
            workers=given.get("workers"),
            beside_tail=beside_tail,
        )

    assert arms() is None
    assert arms(roles="1+1") == (BOTH, apart())
    assert arms(roles="1+1", beside_tail=True, in_flight="off,keep_cache", max_staleness=3) == (
        *(BOTH, TAIL),
        *(apart(max_staleness=3), apart("keep_cache", 3)),
    )
    assert arms(roles="1+1", max_staleness=0) == (BOTH, apart(max_staleness=0))
    assert arms(cpus=5, roles="2+3")[1].roles == (2, 3)
    turns = [replace(turn_of(arm, (1.0,)), precision="fp8") for arm in arms(roles="1+1", in_flight="off,keep_cache")]
    assert [turn.arm.name for turn in turns] == ["both", "1+1", "1+1, keep_cache"]


def test_what_a_run_would_refuse_is_refused() -> None:
    with pytest.raises(UserError, match=r"^--weights-in-flight: fp8_full has a calibrated KV cache.*recompute_cache$"):
        check_arms(bench(BOTH, apart("keep_cache")))
    shards = bench(BOTH, TAIL)
    with pytest.raises(
        UserError, match=r"^--learn-beside-tail: --gradients: sharded adds.*, or leave --learn-beside-tail out$"
    ):
        check_arms(replace(shards, cluster=shards.cluster.model_copy(update={"gradients": "sharded"})))
    shared = bench(BOTH, apart())
    with pytest.raises(UserError, match=r"^--tensor-parallel: workers that only train .*; leave it out$"):
        check_arms(replace(shared, cluster=shared.cluster.model_copy(update={"tensor_parallel": 2})))


def test_an_arm_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octetrl.bench.roles_memory.available_host_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"^--roles: both in fp8_full takes about 1 GB, and there are 0; give more"):
        check_memory(bench(BOTH))
    monkeypatch.setattr("octetrl.bench.roles_memory.available_host_bytes", lambda: None)
    check_memory(bench(BOTH))


def test_every_arm_makes_a_whole_untimed_step_and_its_pipeline_is_full_until_the_last_timed_one() -> None:
    plan = bench(BOTH, steps=4)
    for arm, untimed, whole in ((BOTH, 3, 7), (TAIL, 3, 7), (apart(max_staleness=0), 3, 7), (apart(), 3, 8)):
        assert (plan.untimed(arm), plan.recipe("bf16", arm).steps) == (untimed, whole), arm.name
    ahead = apart(max_staleness=3)
    assert (plan.untimed(ahead), plan.recipe("bf16", ahead).steps) == (5, 12), "3 batches after the last step"
    assert bench(BOTH, warmup=0).untimed(BOTH) == 1


def test_rows_have_the_largest_memory_and_all_tokens() -> None:
    plan = bench(BOTH, apart())
    lines: list[dict[str, float]] = [{"memory/peak_gb": 1.0}, {"memory/peak_gb": 3.0}]
    three = replace(plan, cluster=plan.cluster.model_copy(update={"cpus": 3}))
    wide = replace(turn_of(RolesArm((1, 2), False, 1), (1.0, 1.0), *lines), weight_buffer="single")
    both, row = rows_of(three, [turn_of(BOTH, (1.0, 1.0), *lines), wide])
    assert (both["memory/peak_gb"], row["memory/peak_gb"]) == (3.0, 3.0)
    assert row["step/tokens_per_second"] == sum(prompt + answer for prompt, answer in WORK.siblings)
    assert (row["cluster/trainers"], row["cluster/engines"], both["cluster/trainers"]) == (1, 2, 3)
    assert (row["cluster/weight_buffer"], both["cluster/weight_buffer"]) == ("single", "")


def test_a_turn_says_where_weights_arrive() -> None:
    plan = bench(apart(), steps=1, warmup=0)
    in_place = plan.cluster.model_copy(update={"weight_buffer": "single"})
    (turn,) = measure(replace(plan, cluster=in_place), None, threads)
    assert turn.weight_buffer == "single"


def test_the_estimate_has_what_only_the_engine_reads() -> None:
    """Codes of weights that are trained in BF16."""
    plan = bench(BOTH)
    recipe, spec = plan.recipe("fp8_rollout", BOTH), TINY.spec
    policy = precision_policy(spec, recipe.fp8)
    trainer = estimate(recipe, spec, policy, on_gpu=False, engine=False)
    alone = on_each_worker(recipe, trainer, None).training_bytes
    assert estimated_bytes(plan, "fp8_rollout", BOTH) > alone


def test_times_that_compare_nothing_have_a_warning() -> None:
    names = ("precision", "arm")
    quick, slow = {"time/capture": 0.1, "time/rollout": 2.0}, {"time/capture": 1.0, "time/rollout": 5.0}
    turns = [turn_of(BOTH, (10.0,), slow), turn_of(apart(), (4.0,), slow), turn_of(apart("keep_cache"), (6.0,), quick)]
    rows = rows_of(bench(BOTH, apart()), turns)
    assert [row["time/capture"] for row in rows] == [1.0, 1.0, 0.1]
    assert list(capture_warnings(rows, names, "repeat it")) == [
        "warning: bf16, both: 10% of its timed steps captured CUDA graphs; new sizes compile once; repeat it",
        "warning: bf16, 1+1: 25% of its timed steps captured CUDA graphs; new sizes compile once; repeat it",
    ]
    (line,) = drain_warnings(rows)
    assert line.startswith("warning: bf16, 1+1: a step of 4.00 s cannot be shorter than the 5.00 s of its own")
    assert line.endswith("give more --steps or longer answers")
    assert not list(capture_warnings(rows_of(bench(BOTH), [turn_of(BOTH, (1.0,), {})]), names, "")), "not on a CPU"


def test_the_legend_explains_the_columns_that_are_shown() -> None:
    assert "peak" in legend_of(LEGEND, COLUMNS) and "beside tail" in legend_of(LEGEND, COLUMNS)
    without = legend_of(LEGEND, shown(COLUMNS, [{"time/step": 1.0, "time/train": 1.0, "time/startup": 1.0}]))
    assert "generate, train: " in without and "start: " in without
    assert "peak" not in without and "beside tail" not in without and "capture" not in without

"""`octetrl bench step` on several workers: what they sample does not depend on their number, and rows compare them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from octetrl.bench.cluster import ClusterBench, ClusterSteps, ClusterTimes, ClusterTurn, measure
from octetrl.bench.cluster_memory import check_memory, estimated_bytes
from octetrl.bench.cluster_rows import rows_of
from octetrl.bench.model import find_model
from octetrl.bench.on_workers import EMBEDDED, digest_warnings
from octetrl.bench.step import StepArm, StepBench, build_bench_worker
from octetrl.bench.workload import LengthRange, uniform_lengths
from octetrl.cli.bench_cluster import check_tail, counts_of
from octetrl.cli.bench_options import with_layers
from octetrl.config.cluster import ClusterConfig
from octetrl.config.schema import OptimizerConfig, Recipe, TrainerConfig
from octetrl.engine.session import Session
from octetrl.records import Completion, GenerationRequest
from octetrl.system.errors import UserError
from octetrl.telemetry.console import Console
from octetrl.telemetry.metrics import MISMATCH
from octetrl.workers.local import LocalWorkers
from octetrl.workers.many import workers
from tests.unit.workers.many.thread_team import ThreadTeam

TINY = with_layers(find_model("tiny"), 1)
WORK = uniform_lengths(4, 2, 6, LengthRange(3, 8), TINY.spec.vocab_size, seed=0)


def bench(*counts: int, precision: str = "fp8_full") -> ClusterBench:
    trainer = TrainerConfig(tokens_per_micro_batch=24)
    step = StepBench(TINY, (precision,), WORK, 2, trainer, torch.device("cpu"), warmup_tokens=2)
    return ClusterBench(step, ClusterConfig(cpus=max(*counts, 1), cpu_threads=1), counts)


def threads(recipe: Recipe, folder: None, deadlines: Any, **how: Any) -> ThreadTeam:
    return ThreadTeam(recipe, recipe.cluster.num_workers, **how)


def test_any_number_of_workers_samples_the_same_and_is_compared_with_one() -> None:
    plan = bench(EMBEDDED, 1, 2)
    turns = measure(plan, None, threads)
    assert [turn.workers for turn in turns] == [0, 1, 2]
    assert len({turn.digest for turn in turns}) == 1 and not list(digest_warnings(turns))
    for turn in turns:
        (step,) = turn.steps
        assert step.mismatch == 1.0 and step.max_abs_diff == 0.0
        assert step.compared_tokens == WORK.generated_tokens
        assert step.produce > 0 and step.learn > 0 and step.micro_batches >= 4
        assert step.publish > step.gather and (step.gather > 0) == (step.received_bytes > 0) == (turn.workers == 2)
        assert (step.link_gb_per_second > 0) == (turn.workers == 2)
    embedded, one, two = rows_of(plan, turns)
    assert one["step/efficiency"] == 1.0 and "step/efficiency" not in embedded
    assert one["step/over_embedded"] == pytest.approx(one["time/step"] / embedded["time/step"] - 1)
    assert two["step/efficiency"] == pytest.approx(one["time/step"] / two["time/step"] / 2)
    assert two["step/tokens_per_second_per_worker"] * 2 == two["step/tokens_per_second"]
    assert {"memory/peak_gb/worker_0", "memory/peak_gb/worker_1"} <= two.keys()
    assert [row["cluster/kind"] for row in (embedded, one, two)] == ["embedded", "ray", "ray"]
    assert two[MISMATCH] == 1.0 and "publish/gather_ms" not in one


@pytest.mark.parametrize("on_workers", [False, True])
def test_the_answers_of_the_warm_up_end_one_after_another(on_workers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the warm-up's batch has every size on its way to the end."""
    step = replace(bench(1).step, workload=uniform_lengths(2, 2, 6, LengthRange(8, 8), TINY.spec.vocab_size, seed=0))
    worker = build_bench_worker(step, "bf16")
    generate, lengths = worker.generate, list[int]()

    def recorded(requests: list[GenerationRequest], *given: Any, **rest: Any) -> list[list[Completion]]:
        completions = generate(requests, *given, **rest)
        lengths.extend(len(one.token_ids) for siblings in completions for one in siblings)
        return completions

    monkeypatch.setattr(worker, "generate", recorded)
    if on_workers:
        ClusterSteps(step, LocalWorkers(worker, Console("quiet", 1)), 1, worker.recipe).warm_up()
    else:
        StepArm(step, worker).warm_up()
    assert lengths == [2, 3, 4, 5]


def test_learning_beside_the_tail_samples_and_measures_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of groups in one request, and of siblings with a request each."""
    advance = Session._advance

    def slowly(self: Session) -> Any:
        time.sleep(0.01)  # so that short answers are reported before the last one has ended
        return advance(self)

    monkeypatch.setattr(Session, "_advance", slowly)
    monkeypatch.setattr(workers, "LINGER_SECONDS", 0.0)
    plan = bench(1, 2)
    singles = [
        replace(one, id=f"{one.id} {sibling}", first_sibling=sibling, num_siblings=1)
        for one in WORK.requests
        for sibling in range(one.num_siblings)
    ]
    for requests in (WORK.requests, tuple(singles)):
        work = replace(WORK, requests=requests)
        step = replace(plan.step, learn_beside_tail=True, workload=work)
        one, two = measure(replace(plan, step=step), None, threads)
        assert one.digest == two.digest
        (waited,), (streamed,) = one.steps, two.steps
        assert streamed.mismatch == 1.0 and streamed.max_abs_diff == 0.0
        assert streamed.compared_tokens == waited.compared_tokens == WORK.generated_tokens
        assert waited.beside_tail_share == 0.0 < streamed.beside_tail_share < 1.0, "the last group is not beside it"
        assert rows_of(plan, [two])[0]["step/beside_tail_share"] == streamed.beside_tail_share


def test_learning_beside_the_tail_needs_several_workers() -> None:
    plan = bench(1)
    with pytest.raises(UserError, match="--learn-beside-tail: one worker samples and trains in turns"):
        check_tail(replace(plan, step=replace(plan.step, learn_beside_tail=True)))
    plan = bench(2)
    shards = replace(plan, cluster=plan.cluster.model_copy(update={"gradients": "sharded"}))
    with pytest.raises(UserError, match=r"--learn-beside-tail: --gradients: sharded adds"):
        check_tail(replace(shards, step=replace(plan.step, learn_beside_tail=True)))


def test_what_a_worker_receives_is_the_rows_of_the_others() -> None:
    (turn,) = measure(bench(2, precision="bf16"), None, threads)
    linears = sum(linear.num_weights for _, linear in TINY.spec.linears())
    held = 2 * TINY.spec.num_parameters
    assert turn.steps[0].received_bytes <= held
    assert turn.steps[0].received_bytes >= 2 * linears / 4, "about half, in blocks of 128 rows"


def times(produce: float, learn: float, gather: float = 0.0) -> ClusterTimes:
    received, link = (1e9, 16.0) if gather else (0.0, 0.0)
    return ClusterTimes(
        produce=produce,
        learn=learn,
        publish=0.5,
        calibrate=0.0,
        mismatch=1.0,
        max_abs_diff=0.0,
        compared_tokens=7,
        micro_batches=8,
        preemptions=0.0,
        gather=gather,
        received_bytes=received,
        link_gb_per_second=link,
    )


def test_rows_name_a_worker_that_samples_something_else() -> None:
    plan = bench(1, 2)
    turns = [
        ClusterTurn("bf16", 1, (times(4.0, 3.5),), (10.0,), 0, "a", 1.0),
        ClusterTurn("bf16", 2, (times(2.0, 2.0, 0.25), times(2.0, 2.0, 0.25)), (5.0, 6.0), 0, "b", 1.0),
    ]
    one, two = rows_of(plan, turns)
    assert (one["time/step"], two["time/step"], two["step/efficiency"]) == (8.0, 4.5, 8.0 / 9.0)
    assert (two["produce/efficiency"], two["learn/efficiency"]) == (1.0, 0.875)
    assert (two["step/publish_gb_per_second"], two["publish/gather_gb_per_second"]) == (2.0, 4.0)
    assert two["publish/link_gb_per_second"] == 16.0 and "publish/link_gb_per_second" not in one
    assert (two["memory/peak_gb"], two["memory/peak_gb/worker_0"], one["memory/peak_gb"]) == (6.0, 5.0, 10.0)
    (warning,) = digest_warnings(turns)
    assert warning == ("warning: bf16: 2 workers sampled other tokens or log-probs than 1 worker (b, not a)")


@pytest.mark.parametrize(
    ("given", "most", "counts"),
    [(None, 1, (0, 1)), (None, 2, (0, 1, 2)), (None, 6, (0, 1, 2, 4, 6)), ("2,embedded", 2, (2, 0))],
)
def test_numbers_of_workers(given: str | None, most: int, counts: tuple[int, ...]) -> None:
    assert counts_of(given, ClusterConfig(cpus=most)) == counts


@pytest.mark.parametrize("given", ["3", "0", "", "1,,2", "embeded", "²", "1,1"])
def test_other_numbers_of_workers_are_refused(given: str) -> None:
    with pytest.raises(UserError, match=r"^--workers: '"):
        counts_of(given, ClusterConfig(gpus=2))


H200 = 150_700_000_000  # bytes


def test_a_number_of_workers_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-8B with float32 states takes 158 GB on one GPU; on two, each has half of the states."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (H200, H200))
    model = find_model("qwen3-8b")
    trainer = TrainerConfig(optimizer=OptimizerConfig(states="float32"))
    work = uniform_lengths(2, 2, 512, LengthRange(2048, 4096), model.spec.vocab_size, seed=0)
    step = StepBench(model, ("bf16",), work, 2, trainer, torch.device("cuda"))
    plan = ClusterBench(step, ClusterConfig(gpus=2), (1, 2))
    one, two = estimated_bytes(plan, "bf16", 1), estimated_bytes(plan, "bf16", 2)
    assert one - two == pytest.approx(6.0 * model.spec.num_parameters, rel=1e-3), "of 12 bytes a weight"
    with pytest.raises(UserError, match=r"--workers: 1 in bf16 takes about 158 GB, and there are 151; leave 1 out of"):
        check_memory(plan)
    check_memory(replace(plan, counts=(2,)))

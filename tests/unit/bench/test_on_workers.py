"""`octetrl bench rollout`, `train` and `step` on several workers: the same work on any number of them, and rows that
compare them. The workers are threads; tests/e2e/test_ray_run.py runs `bench step` on Ray."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octetrl.bench import cluster, cluster_rollout, cluster_train, on_workers
from octetrl.bench.cluster_memory import estimated_bytes
from octetrl.bench.cluster_rows import rows_of as step_rows
from octetrl.bench.mix import Mix
from octetrl.bench.model import BenchModel, find_model
from octetrl.bench.on_workers import EMBEDDED, check_cut, compare_workers, digest_warnings
from octetrl.bench.rollout import Bench, warm_up
from octetrl.bench.step import StepBench
from octetrl.bench.train import TrainBench
from octetrl.bench.turns import Row
from octetrl.bench.workload import LengthRange, Shape, Workload, lognormal_lengths, uniform_lengths
from octetrl.cli.bench_cluster import check_codes, cluster_of, columns_of, counts_of, noise_warnings
from octetrl.cli.bench_on_workers import micro_batches_of
from octetrl.cli.bench_options import with_layers
from octetrl.cli.main import run_command
from octetrl.config.cluster import ClusterConfig
from octetrl.config.limits import MOST_CPUS, MOST_GPUS
from octetrl.config.memory import CPU_PROCESS
from octetrl.config.schema import Recipe, TrainerConfig
from octetrl.system.errors import UserError
from tests.grid import smallest_shape
from tests.unit.workers.many.thread_team import ThreadTeam

TINY = with_layers(find_model("tiny"), 1)
ALL = (EMBEDDED, 1, 2)
TWO = ClusterConfig(cpus=2, cpu_threads=1)
CPU = torch.device("cpu")


def threads(recipe: Recipe, folder: None, deadlines: Any, **how: Any) -> ThreadTeam:
    return ThreadTeam(recipe, recipe.cluster.num_workers, **how)


def test_times_that_compare_nothing_are_said_to_be_so() -> None:
    assert noise_warnings([{"step/efficiency": 1.1, "step/over_embedded": 0.5}, {"precision": "bf16"}]) == []
    for row in ({"learn/efficiency": 3.276}, {"step/over_embedded": 12.061}):
        (line,) = noise_warnings([{"step/efficiency": 1.0}, row])
        assert line.startswith("warning: such times compare nothing") and "--rounds" in line


def test_a_table_has_no_column_that_says_nothing() -> None:
    plain, beside = columns_of(beside_tail=False), columns_of(beside_tail=True)
    assert set(plain) ^ set(beside) == {"learn/efficiency", "step/beside_tail_share"}
    assert "step/beside_tail_share" in beside


def test_any_number_of_workers_draws_the_same_lengths_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    warm: list[int] = []
    short = Workload.short
    monkeypatch.setattr(Workload, "short", lambda workload, tokens: warm.append(tokens) or short(workload, tokens))
    work = lognormal_lengths(Shape(8, 6, 5), 2, TINY.spec.vocab_size, 0, sigma=0.7, max_positions=64)
    bench = Bench(TINY, ("fp8_full",), (work,), CPU, warmup_tokens=2, max_batch=3)
    plan = cluster_rollout.ClusterRollout(bench, TWO, ALL)
    turns = cluster_rollout.measure(plan, None, threads)
    assert [turn.workers for turn in turns] == [0, 1, 2]
    assert warm == [2, 2, 2], "every size of batch, if answers end one after another"
    alone: Any = SimpleNamespace(engine=SimpleNamespace(generate=lambda requests: None))
    warm_up(alone, work, 5)
    assert warm == [2, 2, 2, 5], "and so without workers"
    assert len({turn.digest for turn in turns}) == 1 and not list(digest_warnings(turns))
    embedded, one, two = cluster_rollout.rows_of(plan, turns)
    for row in (embedded, one, two):
        assert row["rollout/generated_tokens"] == work.generated_tokens
        assert row["rollout/tokens_per_second"] == pytest.approx(work.generated_tokens / row["time/rollout"])
        assert 0.0 <= row["rollout/idle_share"] < 1.0 and 0.0 <= row["rollout/tail_share"] <= 1.0
    assert two["rollout/tokens_per_second_per_worker"] * 2 == two["rollout/tokens_per_second"]
    assert two["rollout/efficiency"] == pytest.approx(one["time/rollout"] / two["time/rollout"] / 2)
    assert [row["cluster/kind"] for row in (embedded, one, two)] == ["embedded", "ray", "ray"]
    assert {"memory/peak_gb/worker_0", "memory/peak_gb/worker_1"} <= two.keys()


def test_any_number_of_workers_trains_on_the_same_micro_batches() -> None:
    bench = TrainBench(
        model=TINY,
        precisions=("fp8_full",),
        mix=Mix(LengthRange(6, 12)),
        trainer=TrainerConfig(tokens_per_micro_batch=32),
        device=CPU,
        micro_batches=4,
        steps=2,
    )
    plan = cluster_train.ClusterTrain(bench, TWO, ALL)
    turns = cluster_train.measure(plan, None, threads)
    embedded, one, two = cluster_train.rows_of(plan, turns)
    assert embedded["train/loss"] == one["train/loss"]
    assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-2), (
        "the first update rounds some codes otherwise"
    )
    for row in (embedded, one, two):
        assert row["train/tokens"] == 4 * 32 and row["steps"] == 2
        assert row["train/tokens_per_second"] == pytest.approx(4 * 32 / row["time/train"])
    assert two["train/efficiency"] == pytest.approx(one["time/train"] / two["time/train"] / 2)
    assert two["train/requantize_ms"] > two["train/gather_ms"] > 0 and "train/gather_ms" not in one
    assert estimated_bytes(plan, "fp8_full", 2) < estimated_bytes(plan, "fp8_full", 1)


def test_workers_that_share_a_model_sample_what_one_samples() -> None:
    model = BenchModel("small", smallest_shape("qwen3", 2), None)
    work = uniform_lengths(2, 2, 6, LengthRange(3, 5), model.spec.vocab_size, seed=0)
    step = StepBench(model, ("fp8_full",), work, 2, TrainerConfig(tokens_per_micro_batch=64), CPU, warmup_tokens=0)
    shared = TWO.model_copy(update={"tensor_parallel": 2})
    check_cut(shared, model)
    plan = cluster.ClusterBench(step, shared, counts_of(None, shared))
    turns = cluster.measure(plan, None, threads)
    assert [turn.workers for turn in turns] == [0, 1, 2] and not list(digest_warnings(turns))
    embedded, one, two = step_rows(plan, turns)
    assert [row["cluster/tensor_parallel"] for row in (embedded, one, two)] == [1, 1, 2]
    assert two["mismatch/max_abs_diff"] == 0.0 and two["step/efficiency"] > 0
    whole, cut = (estimated_bytes(plan, "fp8_full", count) - CPU_PROCESS for count in (1, 2))
    assert cut < 0.85 * whole


def test_rows_compare_with_one_worker_or_else_with_the_embedded_one() -> None:
    def rows(*counts: int) -> dict[tuple[str, int], Row]:
        made: dict[tuple[str, int], Row] = {("bf16", count): {"time/train": 8.0 / max(1, count)} for count in counts}
        compare_workers(made, ("train",))
        return made

    assert rows(0, 1, 4)["bf16", 4]["train/efficiency"] == rows(0, 4)["bf16", 4]["train/efficiency"] == 1.0
    assert rows(0, 1)["bf16", 1]["train/over_embedded"] == 0.0
    assert "train/efficiency" not in rows(2)["bf16", 2] and "train/efficiency" not in rows(0)["bf16", 0]


def refused(*arguments: Any, tensor_parallel: int = 1, **options: bool) -> str:
    with pytest.raises(UserError) as error:
        cluster_of(*arguments, tensor_parallel, refused={f"--{name}": given for name, given in options.items()})
    return str(error.value)


def test_options_that_do_not_fit_are_refused_in_one_line() -> None:
    assert refused(None, None, None, "local", None, tensor_parallel=2).startswith(
        "--tensor-parallel: it is for workers"
    )
    assert refused(None, 3, None, "local", None, tensor_parallel=2) == (
        "--tensor-parallel: 3 workers do not make groups of 2; give a multiple as --cpus"
    )
    assert refused(None, MOST_CPUS + 1, None, "local", None) == (
        "--cpus: 4097 is out of range; it must be at most 4,096"
    )
    assert refused(MOST_GPUS + 1, None, None, "local", None).startswith("--gpus: 65537 is out of range")
    assert cluster_of(MOST_GPUS, None, None, "local", None, refused={}) == ClusterConfig(gpus=MOST_GPUS)
    assert cluster_of(None, MOST_CPUS, None, "local", None, refused={}) == ClusterConfig(cpus=MOST_CPUS)
    assert refused(2, None, None, "local", None, profile=True).startswith("--profile: it is for the embedded worker")
    four = ClusterConfig(cpus=4, tensor_parallel=2)
    assert counts_of(None, four) == (0, 1, 2, 4)
    with pytest.raises(UserError, match=r"--workers: 3 workers do not make groups of --tensor-parallel 2"):
        counts_of("embedded,3", four)
    with pytest.raises(UserError, match=r"--tensor-parallel: 2, but .*KV heads|--tensor-parallel: 2, but .*; use 1"):
        check_cut(four, BenchModel("tiny", replace(TINY.spec, num_kv_heads=1), None))
    remade = TrainerConfig(weight_codes="remade")
    check_codes((0, 2), four, remade)  # one group has whole rows
    with pytest.raises(UserError, match="--weight-codes: remade"):
        check_codes((0, 4), four, remade)


def test_every_worker_has_micro_batches() -> None:
    assert micro_batches_of(None, None) == 2 and micro_batches_of(3, TWO) == 3
    assert micro_batches_of(None, TWO) == 8
    with pytest.raises(UserError, match=r"--micro-batches: 1 leaves some of 2 workers without work; give at least 2"):
        micro_batches_of(1, TWO)


@pytest.mark.parametrize(
    ("verb", "module", "options", "told"),
    [
        (
            "rollout",
            cluster_rollout,
            ["--lengths", "lognormal", "--requests", "8"],
            "lognormal 0.7 grouped  bf16, 2 ",
        ),
        ("train", cluster_train, ["--layers", "1", "--steps", "1", "--rounds", "1"], "bf16, 2 workers: "),
    ],
    ids=["rollout", "train"],
)
def test_the_commands_print_and_write_a_row_for_each_number_of_workers(
    verb: str,
    module: Any,
    options: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measure = module.measure
    monkeypatch.setattr(on_workers, "connected", lambda _: nullcontext())  # no Ray
    monkeypatch.setattr(module, "measure", lambda plan, say: measure(plan, say, threads))
    on_two = ["--cpus", "2", "--workers", "embedded,2", "--precision", "bf16", *options]
    assert run_command(["bench", verb, *on_two, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    warned = [line for line in shown.err.splitlines() if "such times compare nothing" not in line]  # on a busy machine
    assert told in shown.out and not warned
    (written,) = tmp_path.glob(f"{verb}_tiny*_2_cpus.json")
    embedded, two = json.loads(written.read_text())["rows"]
    assert (embedded["cluster/kind"], two["cluster/kind"], two["cluster/workers"]) == ("embedded", "ray", 2)
    assert two[f"{verb}/efficiency"] == pytest.approx(embedded[f"time/{verb}"] / two[f"time/{verb}"] / 2)

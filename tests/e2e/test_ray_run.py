"""A run on Ray is that of as many threads, bit for bit, also when a worker dies; and it leaves nothing behind.

One Ray serves the tests of this file. test_faults.py kills runs that have their own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from safetensors.torch import load_file

from tests.e2e.installed_ray import ray  # isort: skip: the imports of octetrl.workers.ray_* need it

from octetrl.cli.main import run_command
from octetrl.config.cluster import ClusterConfig, DeadlineConfig
from octetrl.environments.reward_workers import RewardRound
from octetrl.models.weight_files import SINGLE
from octetrl.records import Completion
from octetrl.run import loop
from octetrl.run.build import build_run
from octetrl.run.export import export_run
from octetrl.run.folder.journal import Journal
from octetrl.run.loop import one_step, train
from octetrl.run.state import Run, StepResult
from octetrl.system.errors import UserError
from octetrl.workers.ray_address import LocalRay, address_to_join, local_rays
from octetrl.workers.ray_cluster import RayCluster, connect, reserve_nodes
from octetrl.workers.status import STATUS_FILE
from octetrl.workers.team import Deadlines, WorkerLost
from tests.e2e import tiny_agents
from tests.e2e.test_agents import agents
from tests.e2e.tiny_run import make_model, read_lines, run, tiny_recipe
from tests.grid import WIDE
from tests.unit.backends.vllm_double import build_worker_with_double
from tests.unit.workers.paused_worker import build_paused_worker, pause_file
from tests.unit.workers.test_tail import CHANGES as OF_A_TAIL
from tests.unit.workers.thread_team import run_on, steps_of, unspread

TWO: dict[str, Any] = {"cluster.device": "auto", "cluster.cpus": 2, "cluster.cpu_threads": 1}
JOINED = TWO | {"cluster.address": "auto"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # also on a busy machine; a start takes 10 s on a free one


@pytest.fixture(scope="module")
def running() -> Iterator[RayCluster]:
    before = signal.getsignal(signal.SIGTERM)
    cluster = connect(ClusterConfig(cpus=2), None)
    assert signal.getsignal(signal.SIGTERM) is before, "Ray's prints a stack of C++"
    yield cluster
    cluster.close()
    assert cluster.folder is not None and not cluster.folder.exists()


def pids_of(folder: Path) -> list[int]:
    """By rank; none before the workers are there."""
    try:
        return [int(worker["pid"]) for worker in json.loads((folder / STATUS_FILE).read_text())["workers"]]
    except FileNotFoundError:
        return []


def num_lines(folder: Path) -> int:
    """How many steps have written their metrics, to the end of their line."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(found: Callable[[], bool], seconds: float = 600.0) -> None:
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def test_a_worker_that_dies_changes_nothing(
    running: RayCluster,
    finished: Callable[[str], Path],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    changes = JOINED | {"checkpoint.every": 1, "cluster.max_restarts": 3}

    def kill_one() -> None:
        wait_for((folder / STATUS_FILE).exists)
        assert run_command(["status", str(folder)]) == 0
        doomed = pids_of(folder)[1]
        wait_for(lambda: num_lines(folder) > 0)
        os.kill(doomed, signal.SIGKILL)  # a worker of step 2, or of what follows it

    def step_after_the_kill(run: Run, step: int, journal: Journal) -> StepResult:
        if step == 3:
            assert killed.result(600.0) is None  # the run does not end before
        return one_step(run, step, journal)

    monkeypatch.setattr(loop, "one_step", step_after_the_kill)
    with ThreadPoolExecutor(1) as threads:
        killed = threads.submit(kill_one)
        train(tiny_recipe(model, folder, changes))
        killed.result()
    lines = read_lines(folder / "metrics.jsonl")
    with run_on(2, model, tmp_path / "threads") as threads:
        _, expected = steps_of(threads, 3)
    assert unspread([{name: line[name] for name in line if name != "step"} for line in lines]) == expected
    assert {"time/train/worker_0", "time/train/worker_1", "time/rollout/slowest"} <= lines[-1].keys()
    assert all(line["publish/link_gb_per_second"] > 0 and line["publish/gb_per_second"] > 0 for line in lines)
    first = "rollouts/step_000001.jsonl"
    assert (folder / first).read_bytes() == (finished("fp8_full") / first).read_bytes()
    shown = capsys.readouterr()
    assert "worker 0 (host" in shown.out and "CPU): " in shown.out and "GB, process" in shown.out
    assert "worker 1 (host" in shown.err and "its process died" in shown.err
    assert not (folder / STATUS_FILE).exists() and (folder / "logs" / "worker_1.log").exists()


def test_a_run_that_draws_ahead_takes_every_task_once_when_a_worker_dies(
    running: RayCluster, finished: Callable[[str], Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that draws, while it draws ahead. Of the one that trains, see test_ahead_faults.py."""
    folder = tmp_path / "run"
    roles = {"cluster.cpus": None, "cluster.trainer_cpus": 1, "cluster.engine_cpus": 1, "cluster.max_staleness": 2}
    changes = JOINED | roles | {"checkpoint.every": 1, "cluster.max_restarts": 3}

    def kill_the_engine() -> None:
        """While a step runs, or what follows it."""
        wait_for(lambda: num_lines(folder) > 0)
        os.kill(pids_of(folder)[1], signal.SIGKILL)

    def step_after_the_kill(run: Run, step: int, journal: Journal) -> StepResult:
        if step == 3:
            assert killed.result(600.0) is None  # the run does not end before
        return one_step(run, step, journal)

    monkeypatch.setattr(loop, "one_step", step_after_the_kill)
    with ThreadPoolExecutor(1) as threads:
        killed = threads.submit(kill_the_engine)
        train(tiny_recipe(model, folder, changes))
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0.0 <= line["rollout/staleness"] <= 2.0 and line["publish/sent_gb"] > 0 for line in lines)
    assert {"time/send_weights", "time/train/worker_0"} <= lines[-1].keys()
    first = "rollouts/step_000001.jsonl"
    assert (folder / first).read_bytes() == (finished("fp8_full") / first).read_bytes()
    for step in (1, 2, 3):
        name = f"rollouts/step_{step:06}.jsonl"
        mine, expected = (
            [row["task_id"] for row in map(json.loads, (run / name).read_text().splitlines())]
            for run in (folder, finished("fp8_full"))
        )
        assert mine == expected


def test_a_worker_that_dies_under_agents_changes_nothing(
    running: RayCluster, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step 2, while the other agents wait for answers. Which of parallel calls arrives first changes nothing."""
    folder, said, lost = tmp_path / "run", tiny_agents.said, list[int]()

    async def said_and_killed(client: AsyncOpenAI, messages: list[Any], **options: Any) -> str:
        text = await said(client, messages, **options)
        if num_lines(folder) and not lost:
            lost.append(pids_of(folder)[1])
            os.kill(lost[0], signal.SIGKILL)
        return text

    changes = agents("Caller", steps=2)
    recipe = tiny_recipe(model, folder, changes | JOINED | {"checkpoint.every": 1})
    with run_on(2, model, tmp_path / "threads", **changes) as threads:
        _, expected = steps_of(threads, 2)
    monkeypatch.setattr(tiny_agents, "said", said_and_killed)
    with pytest.raises(WorkerLost, match=r"step 2: worker 1 .*\n.* the last checkpoint is step 1, in"):
        train(recipe)
    train(recipe, resume=True)
    lines = read_lines(folder / "metrics.jsonl")
    found = unspread([{name: line[name] for name in line if name != "step"} for line in lines])
    assert [without_clock(line) for line in found] == [without_clock(line) for line in expected]
    rows = [row for step in (1, 2) for row in read_lines(folder / f"rollouts/step_{step:06d}.jsonl")]
    assert len(rows) == 16 and all(row["status"] == "scored" and row["reward"] > 0 for row in rows)


def without_clock(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "agent/engine_share"}


def test_agents_that_sample_ahead_are_trained_as_they_sampled(running: RayCluster, model: Path, tmp_path: Path) -> None:
    roles = {"cluster.cpus": None, "cluster.trainer_cpus": 1, "cluster.engine_cpus": 1, "cluster.max_staleness": 1}
    lines = run(model, tmp_path / "run", agents("Caller", steps=2) | JOINED | roles)
    assert lines[0]["mismatch/max_abs_diff"] == 0.0 and lines[0]["rollout/on_policy_share"] == 1
    assert lines[1]["rollout/on_policy_share"] < 1
    for row in (row for step in (1, 2) for row in read_lines(tmp_path / f"run/rollouts/step_{step:06d}.jsonl")):
        assert row["status"] == "scored" and sum("turn" in call for call in row["calls"]) == 4
        assert row["metrics"]["agent/sampled_tokens"] == len(row["token_ids"])


def test_a_worker_that_stalls_ends_the_step_and_is_named(
    running: RayCluster, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    live = build_run(tiny_recipe(model, folder, JOINED | {"cluster.cpus": 1}))
    team = live.workers._team
    try:
        live.workers.calibrate([[1, 2, 3]])
        (folder / "logs" / "worker_0.log").open("a").write("the last words\n")
        stopped = pids_of(folder)[0]
        os.kill(stopped, signal.SIGSTOP)
        lost = r"worker 0 \(host .*, CPU\) was lost in phase"
        monkeypatch.setattr(team, "_deadlines", Deadlines(DeadlineConfig(least_seconds=0.5)))
        with pytest.raises(WorkerLost, match=rf"{lost} state after \d+\.\d s: the limit is 0 s \(cluster\.deadlines\)"):
            team.ask_one(0, "state", "state")
        monkeypatch.setattr(team, "_deadlines", Deadlines(DeadlineConfig(silent_seconds=3.0)))
        with pytest.raises(WorkerLost, match=rf"{lost} .* s: it has been silent for \d+\.\d s; it printed:") as error:
            live.workers.calibrate([[1, 2, 3]])
        assert str(error.value).endswith("\n    the last words")
    finally:
        live.close()
    wait_for(lambda: not Path("/proc", str(stopped)).exists())


def test_a_run_learns_beside_its_tail(
    running: RayCluster, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It samples what one process samples that waits for the last answer, and both sides have equal log-probs."""
    folder, advance = tmp_path / "beside", RewardRound._advance

    def advance_while_workers_pause(self: RewardRound) -> None:
        pause_file(folder).touch()
        while not self.is_done:
            advance(self, waits=True)
        pause_file(folder).unlink()

    changes = OF_A_TAIL | {"steps": 1}
    train(tiny_recipe(model, tmp_path / "waits", changes))
    monkeypatch.setattr("octetrl.workers.build_workers.build_worker", build_paused_worker)
    monkeypatch.setattr("octetrl.workers.tail.TAIL_SHARE", 1.5)
    monkeypatch.setattr("octetrl.workers.sampler.LINGER_SECONDS", 0.0)
    monkeypatch.setattr(RewardRound, "advance", advance_while_workers_pause)
    train(tiny_recipe(model, folder, changes | JOINED | {"rollout.learn_beside_tail": True, "steps": 2}))
    lines = read_lines(folder / "metrics.jsonl")
    assert [(line["step"], line["mismatch/max_abs_diff"]) for line in lines] == [(1, 0.0), (2, 0.0)]
    assert all(line["train/beside_tail_share"] > 0 and line["rollout/moved_answers"] > 0 for line in lines)
    first = "rollouts/step_000001.jsonl"
    assert (folder / first).read_bytes() == (tmp_path / "waits" / first).read_bytes()


@pytest.mark.parametrize("size", [1, 2], ids=["each", "together"])
def test_two_workers_with_vllm(size: int, running: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is a double, which the workers' processes import: one each, or one that shares the model between them."""
    monkeypatch.setattr("octetrl.workers.build_workers.build_worker", build_worker_with_double)
    monkeypatch.setattr("octetrl.config.rules_shape.BLOCK", 1)  # the tiny model has fewer rows
    model = make_model(tmp_path / "model", tie_word_embeddings=False, **(WIDE if size > 1 else {}))
    changes = JOINED | {"engine.max_batch": 4, "cluster.tensor_parallel": size}
    recipe = tiny_recipe(model, tmp_path / "run", changes)
    run = build_run(recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": "vllm"})}))
    try:
        (groups,), (line,) = steps_of(run, 1)
        assert line["publish/policy_version"] == 1.0 and "mismatch/unequal_tokens" not in line
        answers = [turn.completion for group in groups for one in group.rollouts for turn in one.turns]
        assert len({one.token_ids for one in answers}) > len(answers) // 2
        assert all(logprob == -0.25 * (token % 16) - 0.125 for one in answers for token, logprob in said(one))
    finally:
        run.close()


def said(answer: Completion) -> Iterator[tuple[int, float]]:
    return zip(answer.token_ids, answer.logprobs, strict=True)


def test_generate_draws_on_two_workers_what_one_draws(
    running: RayCluster, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for where in (["--device", "cpu"], ["--cpus", "2", "--address", "auto"]):
        assert run_command(["generate", str(model), "-p", "1 + 2 =", "-n", "4", "--max-new-tokens", "6", *where]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and printed[0].count("--- prompt") == 4


def test_the_bench_of_a_step_compares_numbers_of_workers_and_roles(
    running: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apart = "cluster.trainer_cpus=1 cluster.engine_cpus=1 cluster.max_staleness=1 cluster.address=auto"
    two = "cluster.cpus=2 cluster.address=auto"
    arms = ["cluster.cpus=null", two, apart, f"{apart} cluster.weights_in_flight=recompute_cache"]
    words = [word for arm in arms for word in ("--arm", arm)]
    assert run_command(["bench", "step", *words, "--layers", "1", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    warned = [line for line in shown.err.splitlines() if "cannot be shorter than" not in line]  # of so short steps
    assert not warned and "…" not in shown.out and "compare nothing" not in shown.out
    embedded, both, *rows = json.loads((tmp_path / "step_tiny_1_layers.json").read_text())["rows"]
    assert (embedded["cluster/kind"], both["cluster/kind"], both["cluster/workers"]) == ("embedded", "ray", 2)
    assert {row["rollout/digest"] for row in (embedded, *rows)} == {both["rollout/digest"]}
    assert both["mismatch/max_abs_diff"] == 0.0 and both["step/efficiency"] > 0
    assert both["publish/gather_ms"] > 0 and both["publish/link_gb_per_second"] > 0
    assert both["time/step"] == pytest.approx(sum(both[f"time/{part}"] for part in ("produce", "learn", "publish")))
    assert all(row["mismatch/age_0/max_abs_diff"] == 0.0 and row["step/speedup_over_both"] > 0 for row in rows)
    assert rows[0]["rollout/staleness"] == 1.0 and rows[0]["time/publish_pause"] > 0 and "time/produce" not in rows[0]
    assert [row["cluster/weights_in_flight"] for row in rows] == ["off", "recompute_cache"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cluster.gpus": 2, "cluster.cpus": None},
            r"cluster\.gpus: 2 GPUs were asked for, the Ray cluster has 0; use cluster\.cpus=2 instead, remove it",
        ),
        ({"critic.path": "gone", "algorithm.name": "ppo", "cluster.cpus": 1}, "critic.path: .*'gone'"),  # by the worker
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(
    changes: dict[str, Any], message: str, running: RayCluster, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        train(tiny_recipe(model, tmp_path / "run", JOINED | {"cluster.deadlines.machines_seconds": 0.0} | changes))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_machines_whose_gpus_are_taken_are_not_awaited(running: RayCluster) -> None:
    soon = DeadlineConfig(machines_seconds=1.0)
    with pytest.raises(UserError, match=r"cluster\.nodes: .* no 2 machines with 4 free GPUs each "):
        reserve_nodes(ClusterConfig(address="auto", nodes=2, gpus_per_node=4, deadlines=soon))


def test_workers_that_share_a_model_save_what_one_worker_goes_on_from(running: RayCluster, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", **WIDE)
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    changes = {"checkpoint.every": 1, "rollout.max_new_tokens": 6}
    train(tiny_recipe(model, shared, changes | JOINED | {"cluster.tensor_parallel": 2, "steps": 1}))
    train(tiny_recipe(model, alone, changes | {"steps": 1}))
    (ours,), (theirs,) = read_lines(shared / "metrics.jsonl"), read_lines(alone / "metrics.jsonl")
    assert ours["mismatch/max_abs_diff"] == theirs["mismatch/max_abs_diff"] == 0.0
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.01)
    first = "rollouts/step_000001.jsonl"
    assert (shared / first).read_bytes() == (alone / first).read_bytes()
    one, other = (load_file(export_run(str(run), str(run / "export")) / SINGLE) for run in (shared, alone))
    assert one.keys() == other.keys()
    assert all(one[name].shape == weight.shape for name, weight in other.items())
    train(tiny_recipe(model, shared, changes | {"steps": 2}), resume=True)  # one process, which has the whole model
    line = read_lines(shared / "metrics.jsonl")[-1]
    assert (line["step"], line["mismatch/max_abs_diff"]) == (2, 0.0)


def test_the_ray_of_a_run_is_not_joined_by_another(running: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = ray.get_runtime_context().gcs_address
    assert LocalRay(address, is_of_a_run=True) in set(local_rays())
    for given in (address, f"127.0.0.1:{address.rpartition(':')[2]}"):
        with pytest.raises(UserError, match=r"belongs to another run of octetrl, which ends it; start one with"):
            address_to_join(given, lambda: None)
    monkeypatch.setattr("octetrl.workers.ray_address._OF_A_RUN", re.compile("nothing"))
    assert address_to_join(address, lambda: None) == address  # it does speak Ray's protocol


def test_nothing_answers_at_the_address(model: Path, tmp_path: Path) -> None:
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(UserError, match=r"no Ray answers at 127\.0\.0\.1:1 .*refused.*; start one with `ray start"):
        train(tiny_recipe(model, tmp_path / "run", TWO | {"cluster.address": "127.0.0.1:1"}))

"""Producing ahead of learning: runs of few steps on threads. test_ahead_clock.py has the order of events."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.config.worker_memory import sent_bytes
from octetrl.engine.session import Session
from octetrl.records import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, SessionEvent, Task, Turn
from octetrl.rollout.collect import CollectedBatch, collect_batch
from octetrl.rollout.samples import versions_by_token
from octetrl.run.ahead import Ahead
from octetrl.run.device import random_state
from octetrl.run.evaluate import evaluate
from octetrl.run.folder.journal import Journal
from octetrl.run.loop import _write_samples, one_step
from octetrl.run.resume import Cursor
from octetrl.run.state import BufferedBatch, DataPlace, Run
from octetrl.system.errors import UserError
from octetrl.telemetry.eval_report import EvalReport
from octetrl.telemetry.glossary import explained
from octetrl.telemetry.rollouts import RolloutFiles
from octetrl.telemetry.sinks import Sinks
from octetrl.workers.hosted_session import _Adopt
from octetrl.workers.transfer import _beside, weight_tensors
from tests.e2e.test_agents import agents
from tests.e2e.test_evaluation import DRAWING
from tests.e2e.test_turns import TALK
from tests.e2e.tiny_run import make_model
from tests.unit.workers.thread_team import run_on, steps_of, team_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


def by_task(drawn: list[tuple[RolloutGroup, ...]]) -> list[list[str]]:
    return [[group.task.id for group in groups] for groups in drawn]


@pytest.mark.parametrize("changes", [{}, {**TALK, "precision": "fp8"}], ids=["answers", "conversations"])
def test_one_version_ahead_repeats_its_bits_and_takes_the_same_tasks(
    changes: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    changes = changes | {"steps": 3}
    with run_on(1, model, tmp_path, **changes) as run:
        synchronous, _ = steps_of(run, 3)
    runs = []
    for buffer in ("double", "single"):
        with run_on(1, model, tmp_path, engines=1, ahead=1, buffer=buffer, **changes) as run:
            receiver = team_of(run).workers[1]._receiver
            assert (receiver._waiting is None) == (buffer == "single")
            runs.append(steps_of(run, 3))
    drawn, lines = runs[0]
    assert runs[0] == runs[1], "also with weights that arrive in place"
    assert by_task(drawn) == by_task(synchronous)
    assert drawn[:1] == synchronous[:1]  # with the weights that the run began with
    assert [line["rollout/staleness"] for line in lines] == [0.0, 1.0, 1.0]
    assert [line["rollout/on_policy_share"] for line in lines] == [1.0, 0.0, 0.0]
    versions = [
        {turn.completion.policy_version for group in step for one in group.rollouts for turn in one.turns}
        for step in drawn
    ]
    assert versions == [{0}, {0}, {1}]
    assert lines[0]["mismatch/max_abs_diff"] == 0.0


def test_a_resumed_run_draws_again_what_was_not_learnt(model: Path, tmp_path: Path) -> None:
    with run_on(1, model, tmp_path, steps=5) as run:
        expected = by_task(steps_of(run, 5)[0])
    with run_on(1, model, tmp_path, engines=1, ahead=2, steps=5) as run:
        one_step(run, 1)
        one_step(run, 2)
        assert isinstance(run.method, Ahead)
        with run.method._changed:  # by now the tasks of a later step are taken
            run.method._changed.wait_for(lambda: 3 in run.method._buffer, 30.0)
        assert run.taskset.state() != run.method.place(run).taskset
        cursor = Cursor.of(run, 2)
    with run_on(1, model, tmp_path, engines=1, ahead=2, steps=5) as resumed:
        cursor.put_into(resumed, has_changed=False)
        drawn = [tuple(one_step(resumed, step).groups) for step in (3, 4, 5)]
    assert by_task(drawn) == expected[2:]


def test_saved_batches_that_are_too_old_by_now_are_drawn_again_and_counted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batch(version: int, groups: int) -> BufferedBatch:
        turn = Turn((1,), Completion((5,), (-0.5,), "a", FinishReason.LENGTH, version, "d"))
        task = Task("t", "p")
        group = RolloutGroup(task, (Rollout(task, (turn,), RolloutStatus.SCORED, 1.0),))
        return BufferedBatch((group,) * groups, (group,), {}, {}, DataPlace({"position": groups}, {}, None))

    restored: list[Any] = []
    monkeypatch.setattr(DataPlace, "put_into", lambda place, *_: restored.append(place.taskset["position"]))
    with run_on(1, model, tmp_path, engines=1, ahead=1, precision="bf16", steps=9) as run:
        notes: list[str] = []
        monkeypatch.setattr(run.console, "note", notes.append)
        run.workers.policy_version = 6
        ahead = run.method
        assert isinstance(ahead, Ahead)
        ahead.put_back(run, [batch(5, 2), batch(6, 3), batch(6, 4), batch(8, 5)], 6)  # 9 when the last would be learnt
        assert set(ahead._buffer) == {7, 8} and ahead._first == 9 and restored == [2, 3]
        assert notes == ["9 saved groups are older than 1 versions: sampled again"]
        ahead._too_old, left = 0, ahead._too_old
        ahead._buffer.clear()
        ahead.put_back(run, [batch(6, 2)], 6)
        assert (left, ahead._too_old, len(notes)) == (9, 0, 1)


def test_how_many_groups_were_too_old_is_told_with_the_next_step(model: Path, tmp_path: Path) -> None:
    with run_on(1, model, tmp_path, engines=1, ahead=1, precision="bf16", steps=2) as run:
        assert isinstance(run.method, Ahead)
        run.method._too_old = 4
        lines = [one_step(run, step).metrics for step in (1, 2)]
    assert lines[0]["rollout/too_old_groups"] == 4.0 and "rollout/too_old_groups" not in lines[1]
    assert explained("rollout/too_old_groups")


def test_an_evaluation_sees_the_last_version_alone_and_leaves_the_times_of_steps(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch after the first is drawn while the evaluation waits for it."""
    reports = []

    def evaluated(run: Run) -> EvalReport:
        assert isinstance(run.method, Ahead) and not run.method._draws
        reports.append(evaluate(run))
        return reports[-1]

    monkeypatch.setattr("octetrl.run.loop.evaluate", evaluated)
    took: list[float] = []  # seconds of each batch
    changes = {"precision": "bf16", "steps": 3, "evaluation.every": 1, "environment.reward": None, **DRAWING}
    with run_on(1, model, tmp_path, engines=1, ahead=1, **changes) as run:

        def collect(*given: Any, **options: Any) -> CollectedBatch:
            until, ahead = time.monotonic() + 60.0, run.method
            assert isinstance(ahead, Ahead)
            while given[-2].step > 1 and not ahead._pauses and time.monotonic() < until:
                time.sleep(0.002)
            began = time.perf_counter()
            collected = collect_batch(*given, **options)
            took.append(time.perf_counter() - began)
            return collected

        monkeypatch.setattr("octetrl.run.ahead.collect_batch", collect)
        results = [one_step(run, step) for step in (1, 2, 3)]
        lines = [one.metrics for one in results]
        state = random_state()
        _write_samples(run, 1, results[-1], Sinks(tmp_path))
        assert results[-1].groups and results[-1].evaluated and random_state() == state, (
            "tasks of the user's are read no more"
        )
    for step, report in enumerate(reports, 1):
        rollouts = [rollout for group in report.groups for rollout in group.rollouts]
        assert {turn.completion.policy_version for rollout in rollouts for turn in rollout.turns} == {step}
    assert [line["rollout/staleness"] for line in lines] == [0.0, 1.0, 1.0]
    for line, seconds in zip(lines, took, strict=True):
        assert 0.0 < line["time/rollout/worker_1"] <= line["time/rollout"] <= seconds, "each step: of its own batch"
        assert "time/rollout/worker_0" not in line and line["time/rollout/slowest"] == 1.0, "worker 0 only trains"
        assert 0.0 < line["time/reward_slowest"] <= seconds
    assert all(line["time/wait_to_evaluate"] > 0.0 for line in lines) and explained("time/wait_to_evaluate")


def test_weights_may_be_in_flight_from_a_resumed_step_on(model: Path, tmp_path: Path) -> None:
    """And in flight no longer: the batches of a checkpoint are then of a run with the other setting."""
    with run_on(1, model, tmp_path, engines=1, ahead=1, steps=3) as run:
        one_step(run, 1)
        assert isinstance(run.method, Ahead) and run.workers.layout.by_version, (
            "its versions may have several KV scales"
        )
        batches = run.method.batches_after(1, waits=True)
        assert "time/publish_pause" in batches[0].metrics
    with run_on(1, model, tmp_path, engines=1, ahead=1, in_flight="recompute_cache", steps=2) as run:
        assert isinstance(run.method, Ahead)
        run.method.put_back(run, batches, 1)
        line = one_step(run, 2).metrics
    assert line["time/publish_pause"] != batches[0].metrics["time/publish_pause"]


def test_a_run_that_ends_early_closes_what_it_draws(model: Path, tmp_path: Path) -> None:
    with run_on(1, model, tmp_path, engines=1, ahead=1, precision="bf16", steps=50) as run:
        one_step(run, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "produce" and thread.is_alive()]
    assert all(worker._session is None for worker in team_of(run).workers)


def test_no_room_for_waiting_weights_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(UserError, match=r"cluster.weight_buffer: .* second buffer, 0.4 GB; use single"):
        _beside([torch.empty(100_000_000, device="meta")])


@pytest.mark.parametrize(
    ("ahead", "free", "doubles"),
    [(0, (1 << 40,), False), (1, (1 << 40,), True), (1, (0,), False), (1, (1 << 40, 0), False)],
    ids=["not ahead", "room", "no room", "one of two has no room"],
)
def test_a_second_buffer_is_allocated_before_the_cache_if_all_have_room(
    ahead: int, free: tuple[int, ...], doubles: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache takes most of what is free when a session first opens."""
    rooms, stops = iter(free), list[str]()

    @contextmanager
    def between_batches() -> Iterator[dict[str, float]]:
        stops.append("begins")
        yield {}
        stops.append("ends")

    monkeypatch.setattr("octetrl.workers.transfer.available_host_bytes", lambda: next(rooms))
    with run_on(1, model, tmp_path, engines=len(free), ahead=ahead, precision="fp8") as run:
        for worker in team_of(run).workers[1:]:
            waiting = worker._receiver._waiting
            assert (waiting is not None) == doubles and worker._policy.engine._cache is None
            if waiting is not None:
                own = weight_tensors(worker._policy)
                assert [(one.shape, one.dtype) for one in waiting] == [(one.shape, one.dtype) for one in own]
                sent = sent_bytes(run.config, worker._policy.spec, worker._policy.policy.precisions())
                assert sent == pytest.approx(sum(one.nbytes for one in own), rel=0.01), "what `octetrl check` says"
        run.workers.between_batches = between_batches
        metrics = run.workers.publish(0).metrics
        sent, seconds = metrics["publish/sent_gb"], metrics["time/receive_weights"]
        assert sent > 0.0 and metrics["publish/sent_gb_per_second"] == pytest.approx(sent / seconds)
        assert (run.workers.pause_seconds > 0.0) == (not doubles), "with a second buffer they wait for `adopt`"
    assert stops == ([] if doubles else ["begins", "ends"]), "weights arrive in place only while no batch is generated"


def test_an_error_while_drawing_is_raised_by_the_step_that_waits(model: Path, tmp_path: Path) -> None:
    with run_on(1, model, tmp_path, engines=1, ahead=1, precision="bf16", steps=4) as run:
        one_step(run, 1)

        def fail(n: int) -> Any:
            raise RuntimeError("no more tasks")

        run.taskset.next_batch = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="no more tasks"):
            for step in (2, 3, 4):
                one_step(run, step)


def test_the_cache_is_replayed_with_the_scales_of_drawing(model: Path, tmp_path: Path) -> None:
    with run_on(1, model, tmp_path, engines=1, ahead=1, steps=3) as run:
        lines = [one_step(run, step).metrics for step in (1, 2, 3)]
        assert all(line["time/publish_pause"] > 0.0 for line in lines), "of the weights last taken before its batch"
        trainer, engine = (one._policy for one in team_of(run).workers)
        assert set(trainer.earlier_scales) == {2, 3}
        scales = {version: trainer.earlier_scales[version].scale_LS for version in (2, 3)}
        assert trainer.replay(2).kv_scale_LS is scales[2] and trainer.replay(3).kv_scale_LS is scales[3]
        assert engine.kv_scales.policy_version in (1, 2)
        assert not scales[2].equal(scales[3])


def steps_in_flight(
    how: str, buffer: str, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> tuple[list[tuple[RolloutGroup, ...]], list[dict[str, Any]]]:
    """Three steps. From the second batch on, the engine takes new weights after the sixth forward."""
    with run_on(1, model, folder, engines=1, ahead=1, in_flight=how, buffer=buffer, **changes) as run:
        engine = team_of(run).workers[1]
        step_of_session, publish = Session.events, run.workers.publish
        drawing: dict[str, Any] = {"session": None, "batch": 0, "forwards": 0}

        def wait_until(is_so: Callable[[], bool]) -> None:
            until = time.monotonic() + 60.0
            while not is_so():
                assert time.monotonic() < until, f"what the other thread waits for did not come: {drawing}"
                time.sleep(0.002)

        def events(session: Session, wait_seconds: float = 0.0) -> list[SessionEvent]:
            """From the second batch on, the sixth forward waits for the weights of the step that trains beside it."""
            if drawing["session"] is not session:
                drawing.update(session=session, forwards=0, batch=drawing["batch"] + 1)
            drawing["forwards"] += 1
            if drawing["forwards"] == 6 and drawing["batch"] > 1:
                wait_until(lambda: any(isinstance(one, _Adopt) for one in engine._session._commands))
            return step_of_session(session, wait_seconds)

        def publish_beside_a_batch(policy_version: int) -> Any:
            """Before the last step, weights wait for the sixth forward of the batch after the one that was learnt."""
            if 0 < policy_version < 3:  # 0: calibration
                wait_until(lambda: drawing["batch"] == policy_version + 1 and drawing["forwards"] >= 6)
            return publish(policy_version)

        by_version = run.workers.layout.by_version
        assert by_version == (changes["precision"] == "fp8_full"), "a micro-batch has one set of KV scales"
        run.workers.publish = publish_beside_a_batch  # type: ignore[method-assign]
        with monkeypatch.context() as patches:
            patches.setattr(Session, "events", events)
            return steps_of(run, 3, Journal(RolloutFiles(folder / "rollouts")))


@pytest.mark.parametrize(
    ("how", "precision"), [("recompute_cache", "fp8"), ("recompute_cache", "fp8_full"), ("keep_cache", "bf16")]
)
@pytest.mark.parametrize("kind", [{}, TALK, agents("Caller")], ids=["answers", "conversations", "agents"])
def test_weights_in_flight_reach_half_an_answer(
    how: str, precision: str, kind: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later turn of a conversation arrives by the clock, so two runs may differ in their tokens of old weights."""
    changes = {**kind, "precision": precision, "steps": 3}
    drawn, lines = steps_in_flight(how, "double", model, tmp_path / "double", monkeypatch, changes)
    assert_each_token_has_its_version(how, drawn, lines, tmp_path / "double")
    if precision == "fp8_full":
        in_place = steps_in_flight("keep_cache", "single", model, tmp_path / "single", monkeypatch, changes)
        assert_each_token_has_its_version("recompute_cache", *in_place, tmp_path / "single")
        message = "in place, after the same forwards; a calibrated cache cannot be kept"
        assert kind or in_place == (drawn, lines), message


def assert_each_token_has_its_version(
    how: str, drawn: list[tuple[RolloutGroup, ...]], lines: list[dict[str, Any]], folder: Path
) -> None:
    """From the second step on, answers have tokens of both versions, and metrics and files tell which."""
    assert lines[0]["rollout/staleness"] == 0.0
    for step, line in enumerate(lines[1:], 2):
        versions = [
            version
            for group in drawn[step - 1]
            for rollout in group.rollouts
            for turn in rollout.turns
            for version in versions_by_token(turn.completion)
        ]
        assert set(versions) == {step - 2, step - 1}
        stale = versions.count(step - 2)
        assert line["rollout/staleness"] == pytest.approx(stale / len(versions))
        assert line["rollout/on_policy_share"] == pytest.approx(1 - stale / len(versions))
        assert line["mismatch/age_1/tokens"] == stale and line["mismatch/age_1/max_abs_diff"] > 0.0
        assert (line["mismatch/age_0/max_abs_diff"] == 0.0) == (how == "recompute_cache")
        assert explained("mismatch/age_1/gen_kl") and explained("time/publish_pause")
        rows = [json.loads(row) for row in (folder / "rollouts" / f"step_{step:06}.jsonl").read_text().splitlines()]
        begins = [row["policy_versions"] for row in rows if "policy_versions" in row]
        assert begins and all({version for _, version in one} == {step - 2, step - 1} for one in begins)

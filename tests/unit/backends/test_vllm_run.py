"""Training steps whose rollouts come from vLLM's adapter over a double, on one worker and on several.

The double's log-probs are no model's, so nothing is learnt and mismatch is large. Its tokens follow from the seeds
alone, so every number of workers draws the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octetrl.engine.engine import Engine
from octetrl.records import RolloutGroup
from octetrl.run.build import build_run
from octetrl.run.evaluate import evaluate
from octetrl.run.loop import one_step
from octetrl.run.state import Run
from octetrl.workers.worker import Worker
from octetrl.workers.workers import WorkersDiffer
from tests.e2e.conftest import rewards_here  # noqa: F401 (a fixture)
from tests.e2e.test_turns import TALK
from tests.e2e.tiny_run import make_model, tiny_recipe
from tests.gpu import vllm_smoke
from tests.grid import WIDE
from tests.parity.short_run import worker_of
from tests.unit.backends.vllm_double import CountingDouble, build_double
from tests.unit.workers.thread_team import assert_a_wrong_worker_is_named, run_on, steps_of, team_of

pytestmark = pytest.mark.usefixtures("rewards_here")

CASES: dict[str, dict[str, Any]] = {"answers": {}, "turns": TALK, "fp8 rollout": {"precision": "fp8_rollout"}}
SPREAD = {"trainer.tokens_per_micro_batch": 64, "rollout.prompts_per_step": 4, "engine.max_batch": 4}


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on the CPU sleep while they train, as those on a GPU do."""
    monkeypatch.setattr("octetrl.workers.build_engine.build_vllm", build_double)
    monkeypatch.setattr("octetrl.config.rules_shape.BLOCK", 1)  # the tiny model has fewer rows
    monkeypatch.setattr(Worker, "free_cache", lambda worker: worker.engine.sleep())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", tie_word_embeddings=False)


def double_of(worker: Worker) -> CountingDouble:
    double = worker.engine._vllm.engine  # type: ignore[attr-defined]
    assert isinstance(double, CountingDouble)
    return double


def tokens(groups: tuple[RolloutGroup, ...]) -> list[tuple[int, ...]]:
    return [turn.completion.token_ids for group in groups for one in group.rollouts for turn in one.turns]


def versions(groups: tuple[RolloutGroup, ...]) -> set[int]:
    return {turn.completion.policy_version for group in groups for one in group.rollouts for turn in one.turns}


@pytest.mark.parametrize("precision", vllm_smoke.PRECISIONS)
def test_the_gpu_test_compares_the_digest_in_every_precision(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 2, "vocab_size": 200}
    worker = worker_of(vllm_smoke.recipe_of(precision), replace(vllm_smoke.SPEC, **sizes), "cpu")  # type: ignore[arg-type]
    worker.publish(0)
    assert vllm_smoke.same_as_ours(worker) == vllm_smoke.digest_of_ours(worker)
    monkeypatch.setattr(worker.engine, "weights_digest", lambda *, covers_all: "another")
    with pytest.raises(AssertionError, match="other bytes than our own engine"):
        vllm_smoke.same_as_ours(worker)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[tuple[RolloutGroup, ...]]]:
    """What two steps of one worker draw, by the case."""

    @cache
    def drawn(case: str) -> list[tuple[RolloutGroup, ...]]:
        with run_on(0, model, tmp_path_factory.mktemp("alone"), backend="vllm", **(SPREAD | CASES[case])) as run:
            return steps_of(run, 2)[0]

    return drawn


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_steps_and_an_evaluation(changes: dict[str, Any], model: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(model, tmp_path / "run", {"steps": 3, **changes})
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": "vllm"})})
    run = build_run(recipe)
    try:
        drawn, lines = steps_of(run, 2)
        report = evaluate(run)
    finally:
        run.close()
    double = double_of(run.workers.worker)  # type: ignore[attr-defined]
    for step, groups in enumerate(drawn):
        turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
        assert versions(groups) == {step}
        assert len({turn.completion.token_ids for turn in turns}) > len(turns) // 2, "siblings have seeds of their own"
        if changes is TALK:
            assert any(len(rollout.turns) > 1 for group in groups for rollout in group.rollouts)
    assert all("mismatch/unequal_tokens" not in line and line["mismatch/tokens"] > 0 for line in lines)
    assert lines[-1]["publish/policy_version"] == 2.0
    assert not double.requests and double.sleeps >= 3, "as it starts, and for each update"
    held = {t.completion.policy_version for g in report.groups for r in g.rollouts for t in r.turns}
    assert held == {2}


def workers_of(run: Run) -> list[Worker]:
    return [hosted._policy for hosted in team_of(run).workers]


def drawing_of(run: Run) -> set[int]:
    return {worker for worker, verb in team_of(run).begun if verb == "submit"}


def assert_a_failure_of_one_vllm_ends_the_run(run: Run, double: CountingDouble) -> None:
    """Its step in a rollout, and its copy of the weights in a publish."""

    def dies(*_: Any) -> Any:
        raise RuntimeError("vLLM's core has died")

    for part, work in (("step", lambda: one_step(run, 3)), ("apply_model", lambda: run.workers.publish(3))):
        setattr(double, part, dies)
        with pytest.raises(RuntimeError, match="vLLM's core has died"):
            work()
        delattr(double, part)


@pytest.mark.parametrize("case", ["answers", "turns"])
def test_several_workers_draw_what_one_draws(
    case: str, alone: Callable[[str], list[tuple[RolloutGroup, ...]]], model: Path, tmp_path: Path
) -> None:
    expected = alone(case)
    with run_on(2, model, tmp_path, backend="vllm", **(SPREAD | CASES[case])) as run:
        drawn, lines = steps_of(run, 2)
        assert drawn == expected and drawing_of(run) == {0, 1}
        assert [versions(groups) for groups in drawn] == [{0}, {1}]
        assert lines[-1]["publish/policy_version"] == 2.0
        doubles = [double_of(worker) for worker in workers_of(run)]
        assert all(double.sleeps >= 3 and not double.requests for double in doubles)
        for worker in workers_of(run):
            worker.engine.wake()
        scales, others = (dict(double.model.named_buffers()) for double in doubles)
        assert scales and all(float(one) == float(others[name]) for name, one in scales.items())
        assert all(float(one) != 1.0 for name, one in scales.items() if "q_scale" not in name), "calibrated, in each"
        assert_a_failure_of_one_vllm_ends_the_run(run, doubles[1])
        held = workers_of(run)[1].engine
        held.weights_digest = lambda **_: "0" * 64  # type: ignore[method-assign]
        with pytest.raises(WorkersDiffer, match="worker 0 and worker 1 hold different weights"):
            run.workers.publish(2)


@pytest.mark.parametrize(
    ("changes", "ahead"),
    [({}, 0), (CASES["fp8 rollout"], 0), ({"precision": "bf16"}, 1)],
    ids=["fp8", "fp8 rollout", "bf16, one step ahead"],
)
def test_workers_that_only_generate(
    changes: dict[str, Any],
    ahead: int,
    alone: Callable[[str], list[tuple[RolloutGroup, ...]]],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The digest of their vLLM is that of the trainers, which have our engine and no vLLM."""
    expected = [tokens(groups) for groups in alone("answers")]
    reported = lambda *, trained, generating: {"rollout/fused": 1.0} if generating is not None else {}  # noqa: E731
    monkeypatch.setattr("octetrl.workers.worker.path_metrics", reported)
    with run_on(1, model, tmp_path, engines=2, ahead=ahead, backend="vllm", **(SPREAD | changes)) as run:
        drawn, lines = steps_of(run, 2)
        assert [tokens(groups) for groups in drawn] == expected
        assert [versions(groups) for groups in drawn] == ([{0}, {0}] if ahead else [{0}, {1}])
        trainer, *others = workers_of(run)
        assert isinstance(trainer.engine, Engine) and drawing_of(run) == {1, 2}
        assert all("mismatch/unequal_tokens" not in line for line in lines), "no equality is expected of vLLM"
        assert [double_of(worker).sleeps for worker in others] == [1, 1], "as they start, and never for an update"
        assert [double_of(worker).prefix_resets for worker in others] == [1 if ahead else 2] * 2, "at each update"
        assert not any("rollout/fused" in line for line in lines), "no worker generates with our kernels"


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 4), (CASES["turns"], 2), (CASES["fp8 rollout"], 2)],
    ids=["two groups", "turns", "fp8 rollout"],
)
def test_workers_that_share_a_model_have_one_vllm_in_step(changes: dict[str, Any], count: int, tmp_path: Path) -> None:
    """Its forwards meet on all ranks (`CountingDouble`), and it draws what one worker draws."""
    model = make_model(tmp_path / "model", tie_word_embeddings=False, **WIDE)
    drawn: list[list[list[tuple[int, ...]]]] = []
    for workers in (0, count):
        spread = SPREAD | changes
        with run_on(workers, model, tmp_path / str(workers), size=2, backend="vllm", **spread) as run:
            groups, lines = steps_of(run, 2)
            drawn.append([tokens(one) for one in groups])
            if not workers:
                continue
            assert [versions(one) for one in groups] == [{0}, {1}]
            assert drawing_of(run) == set(range(0, count, 2)), "only leaders are asked"
            assert lines[-1]["publish/policy_version"] == 2.0
            doubles = [double_of(worker) for worker in workers_of(run)]
            assert all(double.sleeps >= 3 and not double.requests for double in doubles)
    assert drawn[0] == drawn[1]


def test_what_a_workers_vllm_holds_is_compared_with_what_was_sent(model: Path, tmp_path: Path) -> None:
    with run_on(1, model, tmp_path, engines=2, backend="vllm", precision="bf16") as run:
        assert_a_wrong_worker_is_named(run)

"""Any number of workers, some of which may share a model, draws the same tokens and log-probs bit for bit, with metrics
equal up to rounding."""

from __future__ import annotations

import threading
from array import array
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.fp8.non_finite import NonFiniteError
from octetrl.records import EarlierAnswer, GenerationRequest, SamplingParams, SessionEvent
from octetrl.run.loop import one_step
from octetrl.system.errors import UserError
from octetrl.workers.sampler import BACKLOG_SECONDS, SCORING_SECONDS, ManySampler
from octetrl.workers.team import WorkerLost
from octetrl.workers.workers import WorkersDiffer
from tests.e2e.test_turns import TALK
from tests.unit.workers.thread_team import assert_same_measures, run_on, steps_of, team_of

pytestmark = pytest.mark.usefixtures("rewards_here")

LEARNING = {"rollout.prompts_per_step": 4, "rollout.stop": ["e", "a", "1"], "steps": 1}
CONVERSATIONS = {**TALK, "rollout.prompts_per_step": 3, "precision": "fp8", "trainer.optimizer.lr": 0.0, "steps": 1}
LR_0 = {"trainer.optimizer.lr": 0.0, "precision": "bf16", "engine.max_batch": 2, "steps": 3}


@pytest.mark.parametrize(
    ("changes", "count", "size"),
    [
        (LEARNING, 2, 1),
        (LEARNING, 3, 1),
        (LR_0, 4, 1),
        (CONVERSATIONS, 2, 1),
        ({"steps": 1}, 4, 2),
        ({**CONVERSATIONS, "rollout.prompts_per_step": 2, "precision": "bf16", "steps": 2}, 2, 2),
    ],
    ids=["learning of two", "learning", "lr 0", "conversations", "groups", "conversations of a group"],
)
def test_any_number_of_workers_draws_the_same_and_measures_the_same(
    changes: dict[str, Any], count: int, size: int, model: Path, wide: Path, tmp_path: Path
) -> None:
    """`size`: of the groups of workers that share one model, of which only the first are asked."""
    changes = changes | {"trainer.tokens_per_micro_batch": 64}  # several for each worker
    model = model if size == 1 else wide
    with run_on(0, model, tmp_path, **changes) as run:
        expected, lines = steps_of(run, changes["steps"])
    with run_on(count, model, tmp_path, size=size, **changes) as run:
        drawn, shared = steps_of(run, changes["steps"])
        team = team_of(run)
    assert drawn == expected
    for line, mine in zip(lines, shared, strict=True):
        assert_same_measures(mine, line)
        assert mine["mismatch/max_abs_diff"] == 0.0
    assert {worker for worker, verb in team.begun if verb == "submit"} == set(range(0, count, size))


def test_workers_that_share_every_micro_batch_learn_as_one_does(model: Path, tmp_path: Path) -> None:
    """In FP8, with equal log-probs, over two steps. A step is one micro-batch here, on which one worker would wait."""
    changes = {**LEARNING, "steps": 2, "trainer.tokens_per_micro_batch": 4096, "trainer.optimizer.lr": 1e-4}
    with run_on(0, model, tmp_path, **changes) as run:
        _, lines = steps_of(run, 2)
    with run_on(2, model, tmp_path, **changes, **{"cluster.context_parallel": "auto"}) as run:
        given, deal = list[Any](), run.workers._parts
        run.workers._parts = lambda batch: given.append(deal(batch)) or given[-1]  # type: ignore[method-assign]
        _, shared = steps_of(run, 2)
    for parts in given:
        (first,), (second,) = (part.minibatches[0] for (part,) in parts)
        assert first.shared == second.shared is not None and (first.reports, second.reports) == (True, False)
    for line, mine in zip(lines, shared, strict=True):
        assert (mine["mismatch/max_abs_diff"], mine["mismatch/tokens"]) == (0.0, line["mismatch/tokens"])
    assert_same_measures(shared[0], lines[0])


@pytest.mark.parametrize("engines", [0, 2], ids=["all", "separate"])
def test_every_worker_that_generates_remembers_earlier_answers(engines: int, model: Path, tmp_path: Path) -> None:
    drafts: dict[str, Any] = {"engine.speculation": {"name": "ngram"}, "engine.max_batch": 8, "precision": "bf16"}
    with run_on(2 if not engines else 1, model, tmp_path, engines=engines, **drafts) as run:
        run.workers.remember([EarlierAnswer((1, 2), array("i", [3, 4])), EarlierAnswer((1, 2), (5,))])
        team = team_of(run)
        for worker in team.workers[-2:]:
            (answers,) = worker._policy.engine.draft_source._answers.values()
            assert [answer.tokens() for answer in answers] == [[3, 4], [5]]


@pytest.mark.parametrize("size", [1, 2])
def test_a_request_that_cannot_be_served_and_one_that_is_cancelled(
    size: int, model: Path, wide: Path, tmp_path: Path
) -> None:
    sampling = SamplingParams(max_new_tokens=40)
    running = run_on(2, model if size == 1 else wide, tmp_path, size=size, precision="bf16")
    with running as run, run.workers.session() as session:
        with pytest.raises(UserError, match="the prompt has no tokens"):
            session.submit(GenerationRequest("empty", (), sampling))
        for name in ("kept", "dropped"):
            session.submit(GenerationRequest(name, (5, 6, 7), sampling, num_siblings=4, seed=1), streams=True)
        with pytest.raises(UserError, match="a request with this id is not finished yet"):
            session.submit(GenerationRequest("kept", (5, 6, 7), sampling))
        events = list(session.events(5.0))
        session.cancel("dropped")
        while session.has_work:
            later = session.events(5.0)
            assert not any(event.request_id == "dropped" for event in later)
            events += later
        for sibling in range(4):
            mine = [event for event in events if event.request_id == "kept" and event.sibling == sibling]
            assert mine[-1].completion is not None
            assert sum((event.token_ids for event in mine), ()) == mine[-1].completion.token_ids


@pytest.mark.parametrize(("precision", "changed"), [("fp8", "codes"), ("fp8", "norm"), ("bf16", "norm")])
def test_a_worker_with_other_weights_is_named(precision: str, changed: str, model: Path, tmp_path: Path) -> None:
    with run_on(3, model, tmp_path, precision=precision) as run:
        engine = team_of(run).workers[1]._policy.engine_model
        if changed == "codes":
            *_, (_, linear) = engine.float8_linears()
            held = linear.codes
        else:
            held = next(tensor for name, tensor in engine.named_parameters() if "norm" in name).detach()
        held.view(torch.uint8).flatten()[0] ^= 1  # both sides of worker 1 read this
        with pytest.raises(WorkersDiffer, match="publish: worker 1 holds other weights than most workers"):
            run.workers.publish(0)
        with pytest.raises(WorkersDiffer, match=r"worker 0 and worker 1 hold different weights \(digests a+ and b+\)"):
            run.workers._check_equal(["a" * 64, "b" * 64], 0)  # nobody knows whose are wrong


def test_a_worker_that_accepts_no_request_is_lost_at_the_limit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"cluster.deadlines.least_seconds": 2.0}
    released = threading.Event()
    with run_on(2, model, tmp_path, precision="bf16", **limits) as run, run.workers.session() as session:
        late = team_of(run).workers[1]
        monkeypatch.setattr(late, "submit", lambda *_: released.wait(60.0))
        for name in ("one", "other"):
            session.submit(GenerationRequest(name, (5, 6, 7), SamplingParams(max_new_tokens=4)))
        try:
            with pytest.raises(WorkerLost, match=r"worker 1 was lost in phase submit: .* the limit is 2 s"):
                session.events(60.0)
        finally:
            released.set()


@pytest.mark.parametrize(
    ("count", "fails", "error", "state"),
    [
        (2, "octetrl.trainer.shared_weights.SharedWeights.renew", NonFiniteError, (False, 0)),  # codes are not those
        (0, "octetrl.workers.worker.mismatch_of", KeyboardInterrupt, (True, 1)),  # must not be saved as step 0's
    ],
)
def test_what_an_error_leaves_is_known(
    count: int,
    fails: str,
    error: type[BaseException],
    state: tuple[bool, int],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the weights are whole, and which version they are."""

    def fail(*_: Any, **__: Any) -> None:
        raise error("a weight")

    with run_on(count, model, tmp_path, **{} if count else {"precision": "bf16"}) as run:
        monkeypatch.setattr(fails, fail)
        with pytest.raises(error):
            one_step(run, 1)
        assert (run.workers.weights_are_whole, run.workers.policy_version) == state


def test_a_backlog_of_rewards_is_looked_after_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call gives a reward process one answer, so a tenth of a second between two calls would be ten answers a
    second."""
    waits: list[float] = []

    class Session:
        """Samples nothing, five times."""

        @property
        def has_work(self) -> bool:
            return len(waits) < 5

        def events(self, wait_seconds: float) -> list[SessionEvent]:
            waits.append(wait_seconds)
            return []

    sampler = object.__new__(ManySampler)
    monkeypatch.setattr(sampler, "session", lambda *_, **__: nullcontext(Session()))
    answers = iter([True, True, False, None, True])
    sampler.generate([], None, lambda _: next(answers))
    assert waits == [SCORING_SECONDS, BACKLOG_SECONDS, BACKLOG_SECONDS, SCORING_SECONDS, SCORING_SECONDS]
    waits.clear()
    sampler.generate([])
    assert waits == [1.0] * 5

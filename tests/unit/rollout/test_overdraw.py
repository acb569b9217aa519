"""Over-drawing: which groups are kept follows from their answers; none is skipped, doubled or put back twice."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.config.validate_environment import refuse_for_turns
from octetrl.config.validate_overdraw import overdrawn
from octetrl.environments.base import Taskset
from octetrl.environments.score import Score
from octetrl.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    RolloutStatus,
    SamplingParams,
    SessionEvent,
    Task,
)
from octetrl.rollout.collect import collect_batch
from octetrl.rollout.collected import CollectedBatch
from octetrl.rollout.collection_settings import CollectionSettings
from octetrl.rollout.expected_lengths import ExpectedLengths
from octetrl.rollout.overdraw import Race, _lost
from octetrl.run.evaluate import evaluate
from octetrl.run.loop import train
from octetrl.run.resume import Cursor
from octetrl.system.errors import UserError
from octetrl.telemetry.step_lines import PUT_BACK, StepLines
from tests.e2e.tiny_run import make_model, read_lines, tiny_recipe
from tests.unit.workers.many.thread_team import run_on, steps_of

PROMPTS, SIBLINGS, LONGEST = 4, 2, 20


def length_of(request: GenerationRequest, sibling: int) -> int:
    return random.Random(f"{request.seed} {sibling}").choice((1, 2, 3, 3, 5, 8, LONGEST))


class Session:
    """Draws a token of each running answer in a call of `events`, with room for so many answers."""

    def __init__(self, room: int, order: random.Random) -> None:
        self.room, self.order = room, order
        self.requests: dict[str, GenerationRequest] = {}
        self.lengths: dict[tuple[str, int], int] = {}  # of unfinished answers
        self.running: list[tuple[str, int]] = []
        self.drawn = 0

    @property
    def has_work(self) -> bool:
        return bool(self.lengths)

    def submit(self, request: GenerationRequest, *, streams: bool = False) -> None:
        self.requests[request.id] = request
        self.lengths |= {(request.id, sibling): 0 for sibling in range(request.num_siblings)}

    def cancel(self, request_id: str) -> None:
        for key in [key for key in self.lengths if key[0] == request_id]:
            del self.lengths[key]
        self.running = [key for key in self.running if key in self.lengths]

    def events(self, wait_seconds: float = 0.0) -> list[SessionEvent]:
        waiting = [key for key in self.lengths if key not in self.running]
        self.order.shuffle(waiting)
        self.running += waiting[: self.room - len(self.running)]
        events = []
        for key in list(self.running):
            self.lengths[key] += 1
            self.drawn += 1
            tokens = self.lengths[key]
            if tokens == length_of(self.requests[key[0]], key[1]):
                del self.lengths[key]
                self.running.remove(key)
                completion = Completion((5,) * tokens, (-1.0,) * tokens, "text", FinishReason.STOP, 0, "digest")
                events.append(SessionEvent(key[0], key[1], (), (), completion))
        self.order.shuffle(events)
        return events

    def answer_lengths(self) -> dict[str, int]:
        names = dict.fromkeys((name for name, _ in self.lengths), 0)
        return {name: max(n for (of, _), n in self.lengths.items() if of == name) for name in names}


class Workers:
    def __init__(self, room: int, seed: int = 0) -> None:
        self.opened = Session(room, random.Random(seed))

    @contextmanager
    def session(self, _: object = None) -> Iterator[Session]:
        yield self.opened


class Scores:
    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        return [Score(RolloutStatus.SCORED, 1.0, None) for _ in completions]


class Chat:
    def of(self, task: Task) -> Chat:
        return self

    def prompt_tokens(self, prompt: str, limit: int | None = None) -> tuple[int, ...]:
        return (1,) * (9 if prompt.endswith("7") else 2)


def tasks(number: int = 17) -> Taskset:
    return Taskset([Task(str(i), f"question {i}") for i in range(number)], eval_size=2, seed=1)


def collect(source: Taskset, step: int, room: int, seed: int = 0, *, long_steps: bool = False) -> CollectedBatch:
    sampling = SamplingParams(max_new_tokens=LONGEST)
    collection = CollectionSettings(
        Chat(),
        sampling,
        SIBLINGS,
        8,
        seed=5,
        step=step,
        prompts=PROMPTS,
        overdraw=1.5,
        long_steps=long_steps,
    )
    return collect_batch(source, lambda group: True, Scores(), Workers(room, seed), collection)  # type: ignore[arg-type]


def longest(group: Any) -> int:
    return max((len(one.turns[0].completion.token_ids) for one in group.rollouts if one.turns), default=0)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans())
def test_nothing_is_skipped_doubled_or_put_back_twice_over_steps_and_kills(data: st.DataObject, together: bool) -> None:
    steps = data.draw(st.integers(1, 9))
    whole, source = tasks(), tasks()
    learnt: list[str] = []
    before: tuple[Task, ...] = ()
    for step in range(1, steps + 1):
        expected = collect(whole, step, room=100, long_steps=together)
        state = json.loads(json.dumps(source.state()))
        if data.draw(st.booleans()):  # killed within the step, after its draw
            source.next_batch(6)
        if data.draw(st.booleans()):
            source = tasks()
            source.restore(state)
        else:
            source.restore(state)
        room, order = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 9))
        found = collect(source, step, room, order, long_steps=together)
        assert (found.groups, found.put_back, found.metrics) == (expected.groups, expected.put_back, expected.metrics)
        names = [group.task.id for group in found.groups]
        again = PROMPTS if len(before) >= PROMPTS else 0 if together else len(before)
        assert len(names) == PROMPTS and names[:again] == [task.id for task in before[:again]], "they come first"
        assert found.metrics["rollout/drawn_again_groups"] == again
        assert len(found.put_back) == (0 if again == PROMPTS else 2)
        before = before[again:] + found.put_back
        learnt += names
    drawn = [task.id for task in tasks().next_batch(len(learnt) + len(before))]
    assert Counter(learnt) + Counter(task.id for task in before) == Counter(drawn)


def test_of_the_new_groups_the_shortest_are_kept_and_the_rest_is_not_drawn_to_its_end() -> None:
    source, every = tasks(), tasks()
    collected = collect(source, 1, room=100)
    sampling = SamplingParams(max_new_tokens=LONGEST)
    plain = CollectionSettings(Chat(), sampling, SIBLINGS, 8, seed=5, step=1, prompts=6)  # type: ignore[arg-type]
    assert collected.metrics["rollout/put_back_groups"] == 2 and source.num_put_back == 2
    kept = [longest(group) for group in collected.groups]
    lost = {task.id for task in collected.put_back}
    times, tokens = {}, 0
    for place, task in enumerate(every.next_batch(6)):
        from octetrl.rollout.first_requests import request_of

        request = request_of(task, place, plain, ExpectedLengths())
        is_request = isinstance(request, GenerationRequest)
        lengths = [length_of(request, one) for one in range(SIBLINGS)] if is_request else [0]
        times[task.id], tokens = max(lengths), tokens + sum(lengths)
    assert max(kept) == collected.metrics["rollout/longest_kept_answer"] <= min(times[name] for name in lost)
    assert sorted(kept) == sorted(times.values())[:4]
    workers = Workers(100)
    collect_batch(tasks(), lambda group: True, Scores(), workers, plain_overdrawn())  # type: ignore[arg-type]
    assert workers.opened.drawn < tokens, "groups that can't be kept are stopped"
    assert workers.opened.drawn <= 2 * 6 * max(kept), "no answer grows past the longest that is kept"


def test_a_group_that_ended_in_part_is_stopped_by_the_longest_of_its_answers() -> None:
    """Room for one answer at a time: an ended sibling alone may show that its group can't be kept."""
    opened = Session(1, random.Random(0))
    request = GenerationRequest("slow", (1,), SamplingParams(max_new_tokens=LONGEST), SIBLINGS, seed=1)
    opened.requests["slow"], opened.lengths["slow", 1] = request, 0  # sibling 0 has ended, sibling 1 waits
    race = Race(range(2), 1)
    race.end(0, 4)
    for ended, is_lost in ((3, False), (4, False), (5, True)):  # an equal time is decided by the place
        answer = Completion((5,) * ended, (-1.0,) * ended, "", FinishReason.STOP, 0, "digest")
        assert list(_lost(opened, race, {"slow": 1}, {1: {0: answer}})) == ([1] if is_lost else [])
    opened.lengths["slow", 1] = 4
    assert list(_lost(opened, race, {"slow": 1}, {1: {}})) == [1], "an unfinished one has one more at least"


def test_groups_that_were_put_back_are_expected_to_be_long_and_restarts_are_counted() -> None:
    class Restarting(Scores):
        restarts = 3

        def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
            self.restarts = 5
            return super().score(completions)

    settings, source, expected = plain_overdrawn(), tasks(), ExpectedLengths()
    collected = collect_batch(source, lambda group: True, Restarting(), Workers(100), settings, expected)  # type: ignore[arg-type]
    bound = collected.metrics["rollout/longest_kept_answer"]
    assert collected.metrics["rollout/reward_restarts"] == 2
    assert [expected.estimate(task, 2) for task in collected.put_back] == [bound, bound]
    again = Workers(100)
    collect_batch(source, lambda group: True, Scores(), again, replace(settings, step=2), expected)  # type: ignore[arg-type]
    hints = [request.expected_tokens for request in again.opened.requests.values()]
    assert hints[:2] == [bound, bound], "so they start first"


def test_prompts_that_are_too_long_take_no_groups_place() -> None:
    source = Taskset(
        [Task(str(i), f"question {i}7" if i % 2 else f"question {i}0") for i in range(12)], eval_size=0, seed=1
    )
    drawn = 6
    collected = collect(source, 1, room=100)
    first = Taskset(
        [Task(str(i), f"question {i}7" if i % 2 else f"question {i}0") for i in range(12)], eval_size=0, seed=1
    )
    answerable = [task for task in first.next_batch(drawn) if not task.prompt.endswith("7")]
    assert 0 < len(answerable) <= PROMPTS
    answered = {group.task.id for group in collected.groups if longest(group)}
    assert answered == {task.id for task in answerable}, "all that can be learnt from are kept"
    assert len(collected.groups) == PROMPTS and len(collected.put_back) == drawn - PROMPTS
    assert collected.metrics["rollout/longest_kept_answer"] == max(longest(group) for group in collected.groups)


def plain_overdrawn() -> CollectionSettings:
    sampling = SamplingParams(max_new_tokens=LONGEST)
    return CollectionSettings(
        Chat(),
        sampling,
        SIBLINGS,
        8,
        seed=5,
        step=1,
        prompts=PROMPTS,
        overdraw=1.5,  # type: ignore[arg-type]
    )


def test_a_race_is_lost_when_it_cannot_be_won() -> None:
    race = Race(range(2, 6), 2)
    race.end(0, 99)  # it does not race
    race.end(4, 7)
    assert race.bound == float("inf") and not race.is_lost(5, 1000)
    race.end(2, 9)
    assert race.bound == 9 and race.is_lost(3, 9) and not race.is_lost(3, 8) and not race.is_lost(0, 1000)
    race.end(3, 9)
    assert race.losers == [3, 5], "of equal groups the later one"
    race.end(5, 2)
    assert race.bound == 7 and race.losers == [2, 3]


def test_more_put_back_than_a_step_needs_are_drawn_alone() -> None:
    source = tasks()
    batch = source.next_batch(6)
    source.put_back(batch[:5])
    collected = collect(source, 2, room=3)
    assert [group.task for group in collected.groups] == batch[:4] and collected.put_back == ()
    assert source.num_put_back == 1 and "rollout/longest_kept_answer" not in collected.metrics


# --- runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


CHANGES: dict[str, Any] = {"rollout.overdraw": 1.5, "steps": 3, "precision": "bf16", "rollout.prompts_per_step": 3}


def test_several_workers_keep_what_one_keeps_and_evaluation_keeps_all(model: Path, tmp_path: Path) -> None:
    with run_on(0, model, tmp_path / "one", **CHANGES) as run:
        expected, lines = steps_of(run, 3)
        state = Cursor.of(run, 3).taskset
        assert state["put_back"], "one of four groups is put back"
        report = evaluate(run)
        assert len(report.groups) == 4 and Cursor.of(run, 3).taskset == state
    with run_on(2, model, tmp_path / "two", **CHANGES) as run:
        found, _ = steps_of(run, 3)
        assert Cursor.of(run, 3).taskset == state
    assert found == expected
    assert [line["rollout/put_back_groups"] for line in lines] == [1, 1, 1]
    assert [line["mismatch/token_mult_prob_error"] for line in lines] == [1, 1, 1]
    tasks_of = [[group.task.id for group in groups] for groups in expected]
    assert all(len(one) == 3 for one in tasks_of) and len({name for one in tasks_of for name in one}) == 9


def test_a_resumed_run_puts_back_the_same(model: Path, tmp_path: Path) -> None:
    changes = CHANGES | {"checkpoint.every": 2}
    train(tiny_recipe(model, tmp_path / "whole", changes))
    train(tiny_recipe(model, tmp_path / "cut", changes | {"steps": 2}))
    text = (tmp_path / "cut" / PUT_BACK).read_text()
    (tmp_path / "cut" / PUT_BACK).write_text(
        text + '{"step": 3, "task_ids": ["of a killed step"]}\nx\n[1]\n{"a": 1}\n{"st'
    )
    train(tiny_recipe(model, tmp_path / "cut", changes), resume=True)
    assert (tmp_path / "cut" / PUT_BACK).read_text() == (tmp_path / "whole" / PUT_BACK).read_text()
    whole, cut = (
        [path.read_bytes() for path in sorted((tmp_path / name / "rollouts").iterdir())] for name in ("whole", "cut")
    )
    assert whole == cut
    lines = read_lines(tmp_path / "whole" / PUT_BACK)
    assert [line["step"] for line in lines] == [1, 2, 3] and all(len(line["task_ids"]) == 1 for line in lines)


def test_a_full_disk_and_odd_names_are_no_surprise(tmp_path: Path) -> None:
    file = StepLines(tmp_path / PUT_BACK)
    assert not file.path.exists()
    file.write(1, task_ids=["a\nb", "\udc80"])
    assert StepLines(file.path, 1).path.read_text().count("\n") == 1
    for step in ('"1"', "null", "[1]", "1.5", "{}"):  # lines of something else
        with file.path.open("a") as lines:
            lines.write(f'{{"step": {step}, "task_ids": []}}\n')
    with file.path.open("a") as lines:
        lines.write('{"step": 1, "task_ids": []}')  # its end was not written
    text = StepLines(file.path, 1).path.read_text()
    assert text.count("\n") == 1 and text.endswith("\n")


def test_rounding_draws_no_prompt_less() -> None:
    assert 100 * 1.15 < 115 and overdrawn(100, 1.15) == 115


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout.prompts_per_step": 1}, r"rollout.overdraw: 1.5 of 1 prompts is no prompt more"),
        ({"algorithm.name": "dapo"}, r"algorithm.max_refills: 10 draws until enough groups are kept"),
        ({"rollout.overdraw": 1.6}, r"rollout.overdraw"),
        (
            {"rollout.overdraw": 1, "rollout.overdraw_return": "long_step"},
            r"rollout.overdraw_return: it has no effect while rollout.overdraw is 1",
        ),
        (
            {"cluster.trainer_cpus": 1, "cluster.engine_cpus": 1, "cluster.max_staleness": 1},
            r"with cluster.max_staleness: 1 that step is already drawn",
        ),
    ],
)
def test_what_cannot_be_over_drawn_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        tiny_recipe(tmp_path, tmp_path / "run", CHANGES | changes)


def test_conversations_are_refused(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, tmp_path / "run", CHANGES)
    with pytest.raises(UserError, match=r"rollout.overdraw: 1.5 compares lengths of single answers"):
        refuse_for_turns(recipe)

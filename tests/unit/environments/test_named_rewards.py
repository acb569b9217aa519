"""Several rewards by name: their sum, None, groups, failures, and what `octetrl.log` records."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy
import pytest

import octetrl
from octetrl.config.environment import EnvironmentConfig
from octetrl.environments.named_rewards import LimitedCalls, NamedReward, NamedRewards, RewardsInRun, _Call
from octetrl.environments.python_object import named_reward, rewards_in_run
from octetrl.environments.reward_workers import FunctionRewards, RewardWorkers
from octetrl.environments.scoring import RoundAtTheEnd, Score, Scorer, begin_round
from octetrl.environments.trl_rewards import TrlRewards
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError

TASKS = [Task("a", "say a", "a"), Task("b", "say b", "b")]
ERROR, SCORED = RolloutStatus.REWARD_ERROR, RolloutStatus.SCORED


def right(task: Task, text: str) -> float:
    octetrl.log("letters", len(text))
    return float(text == task.answer)


def short(task: Task, text: str) -> float | None:
    return 1.0 / len(text) if text else None


async def later(task: Task, text: str) -> float:
    await asyncio.sleep(0.01)
    return 2.0


def ranked(task: Task, texts: Sequence[str]) -> list[float]:
    """The rank by length; what it adds to a text does not depend on the order of the texts."""
    return [float(sum(len(other) < len(text) for other in texts)) for text in texts]


async def longest(task: Task, texts: Sequence[str]) -> list[float | None]:
    return [1.0 if len(text) == max(map(len, texts)) else None for text in texts]


PARTS = (NamedReward("right", right), NamedReward("short", short, 0.5), NamedReward("later", later, 0.0))
GROUP = (NamedReward("rank", ranked, 0.1), NamedReward("longest", longest, -1.0))


def workers(scorer: Scorer) -> RewardWorkers:
    return RewardWorkers(scorer, timeout_seconds=30.0, processes=2)


def in_a_thread(scorer: Scorer) -> FunctionRewards:
    return FunctionRewards(scorer, timeout_seconds=30.0, at_once=2)


@pytest.mark.parametrize("build", [workers, in_a_thread])
def test_the_reward_is_the_weighted_sum_of_what_applies(build: Any) -> None:
    scorer = build(NamedRewards(PARTS))
    try:
        scores = scorer.score([(TASKS[0], "a"), (TASKS[0], "bbbb"), (TASKS[1], "")])
    finally:
        scorer.close()
    assert [score.reward for score in scores] == [1.5, 0.125, 0.0]
    assert scores[1].components == {"right": 0.0, "short": 0.25, "later": 2.0}
    assert scores[2].components == {"right": 0.0, "later": 2.0}  # short gave None
    assert [score.metrics for score in scores] == [{"letters": 1.0}, {"letters": 4.0}, {"letters": 0.0}]


def test_without_a_reward_that_applies_there_is_none() -> None:
    (score,) = in_a_thread(NamedRewards(PARTS[1:2])).score([(TASKS[0], "")])
    assert (score.status, score.reward) == (ERROR, None) and "None" in (score.detail or "")


def test_none_is_none_of_completions_and_groups_together() -> None:
    """Neither a completion's own functions nor a group's decide alone, and a 0 is never made of nothing."""

    def long(task: Task, texts: Sequence[str]) -> list[float | None]:
        octetrl.log("texts", len(texts))
        return [2.0 if len(text) > 2 else None for text in texts]

    own = NamedRewards((NamedReward("short", lambda task, text: 1.0 if len(text) < 2 else None),), before_others=True)
    parts = [NamedReward("long", long, 0.5)]
    for first, expected in ((own, [1.0, None, 1.0]), (NamedRewards((), before_others=True), [None, None, 1.0])):
        scorer = RewardsInRun(in_a_thread(first), parts, timeout_seconds=30.0)
        scores = scorer.score([(TASKS[0], "a"), (TASKS[0], "aa"), (TASKS[0], "aaa")])
        assert [score.reward for score in scores] == expected
        assert [score.status for score in scores] == [ERROR if reward is None else SCORED for reward in expected]
        assert scores[2].metrics == {"texts": 3.0}
        scorer.close()


def test_components_stand_in_the_recipes_order_whichever_function_ends_first() -> None:
    def late(task: Task, texts: Sequence[str]) -> list[float]:
        time.sleep(0.1)
        return [1.0] * len(texts)

    scorer = grouped([NamedReward("late", late), NamedReward("rank", ranked)])
    (score,) = scorer.score([(TASKS[0], "a")])
    assert list(score.components) == ["right", "late", "rank"]
    scorer.close()


@pytest.mark.parametrize("value", [float("nan"), "1", [1.0]])
def test_what_is_no_number_is_an_error_with_the_rewards_name(value: Any) -> None:
    (score,) = in_a_thread(NamedRewards((NamedReward("odd", lambda task, text: value),))).score([(TASKS[0], "x")])
    assert (score.status, score.reward) == (ERROR, None) and "'odd'" in (score.detail or "")


def grouped(parts: Sequence[NamedReward], seconds: float = 30.0) -> RewardsInRun:
    return RewardsInRun(in_a_thread(NamedRewards(PARTS[:1])), parts, timeout_seconds=seconds)


def test_a_group_is_scored_together_in_any_order_of_its_completions() -> None:
    texts = {(0, 0): "a", (0, 1): "aaa", (0, 2): "aa", (1, 0): "b", (1, 1): "bbbbb"}
    expected = {(0, 0): 1.0 + 0.0, (0, 1): 0.2 - 1.0, (0, 2): 0.1, (1, 0): 1.0, (1, 1): 0.1 - 1.0}
    scorer = grouped(GROUP)
    for seed in range(3):
        with begin_round(scorer) as scoring:
            for key in random.Random(seed).sample(sorted(texts), len(texts)):
                scoring.submit(key, TASKS[key[0]], texts[key])
                scoring.advance()
            assert scoring.so_far() == {}
            scores = scoring.finish()
        assert {key: round(score.reward or 0.0, 9) for key, score in scores.items()} == expected
        assert scores[0, 1].components == {"right": 0.0, "rank": 2.0, "longest": 1.0}
        assert "longest" not in scores[0, 0].components
    flat = scorer.score([(TASKS[place], texts[place, sibling]) for place, sibling in sorted(texts)])
    assert [score.reward for score in flat] == pytest.approx(list(expected.values()))
    scorer.close()


def test_a_group_whose_function_fails_has_no_reward_and_the_others_have_theirs() -> None:
    def picky(task: Task, texts: Sequence[str]) -> list[float]:
        if task.id == "a":
            raise RuntimeError("no luck")
        return [0.0] * (len(texts) - (task.answer == "c"))

    scorer = grouped([NamedReward("picky", picky)])
    third = Task("c", "say c", "c")
    scores = scorer.score([(TASKS[0], "a"), (TASKS[0], "b"), (TASKS[1], "b"), (third, "c")])
    assert [score.status for score in scores] == [ERROR, ERROR, SCORED, ERROR]
    assert [score.reward for score in scores] == [None, None, 1.0, None]
    assert "no luck" in (scores[0].detail or "") and "returned 0 values for 1" in (scores[3].detail or "")
    scorer.close()


def test_a_group_whose_function_hangs_is_a_time_out() -> None:
    scorer = grouped([NamedReward("slow", lambda task, texts: time.sleep(5))], seconds=0.2)
    (score,) = scorer.score([(TASKS[0], "a")])
    assert (score.status, score.reward) == (RolloutStatus.REWARD_TIMEOUT, None)
    scorer.close()


def test_a_sum_beyond_what_a_reward_may_be_is_an_error() -> None:
    scorer = grouped([NamedReward("huge", lambda task, texts: [1e18] * len(texts), 10.0)])
    assert [score.status for score in scorer.score([(TASKS[0], "a"), (TASKS[1], "b")])] == [ERROR, ERROR]
    scorer.close()


def test_a_completion_that_failed_alone_keeps_its_failure() -> None:
    def fails(task: Task, text: str) -> float:
        raise ValueError(text)

    inner = in_a_thread(NamedRewards((NamedReward("fails", fails),)))
    scorer = RewardsInRun(inner, [NamedReward("rank", ranked)], timeout_seconds=30.0)
    (score,) = scorer.score([(TASKS[0], "x")])
    assert isinstance(score, Score) and (score.status, score.reward) == (ERROR, None)
    scorer.close()


def doubled(prompts: list[str], completions: list[str], level: list[int], **columns: Any) -> list[float]:
    assert prompts == ["say a"] * len(completions) and "other" in columns
    return [2.0 * len(text) + place for text, place in zip(completions, level, strict=True)]


@pytest.mark.parametrize("group", [True, False])
def test_functions_of_trls_form_get_our_texts_whatever_columns_a_row_has(group: bool) -> None:
    task = Task("a", "say a", "a", {"completions": "zzz", "prompts": "?", "level": 3, "other": 0})
    if group:
        scorer: Any = grouped([NamedReward("doubled", doubled)])
    else:
        scorer = in_a_thread(NamedRewards((NamedReward("doubled", TrlRewards([doubled])),)))
    scores = scorer.score([(task, "xx"), (task, "xxx")])
    assert [score.components["doubled"] for score in scores] == [7.0, 9.0]
    scorer.close()


@pytest.mark.parametrize("values", [{0: 1.0}, {1.0}, b"x", "x", 1.0, iter([1.0])])
def test_a_group_gets_a_list_of_values(values: Any) -> None:
    scorer = grouped([NamedReward("odd", lambda task, texts: values)])
    (score,) = scorer.score([(TASKS[0], "a")])
    assert (score.status, score.reward) == (ERROR, None)
    scorer.close()


def test_a_group_that_changes_its_task_changes_a_copy() -> None:
    def changes(task: Task, texts: list[str]) -> Any:
        task.metadata["seen"] = True  # type: ignore[index]
        return numpy.ones(len(texts))

    task, scorer = Task("a", "say a", "a"), grouped([NamedReward("changes", changes)])
    (score,) = scorer.score([(task, "a")])
    assert score.reward == 2.0 and not task.metadata
    scorer.close()


class Client:
    """Holds on to the event loop of its first call, as a client with open connections does."""

    loop: Any = None

    async def __call__(self, task: Task, text: str) -> float:
        Client.loop = Client.loop or asyncio.get_running_loop()
        return float(Client.loop is asyncio.get_running_loop())


def test_async_functions_of_a_process_share_one_event_loop() -> None:
    with RewardWorkers(Client(), timeout_seconds=30.0, processes=1) as scorer:
        assert [score.reward for score in scorer.score([(TASKS[0], "a")] * 3)] == [1.0] * 3


def test_after_an_error_nothing_of_the_other_functions_goes_on(recwarn: pytest.WarningsRecorder) -> None:
    """Neither what waits beside a function that fails later, nor what had not begun when one failed at once."""
    went_on: list[str] = []

    async def slow(task: Task, text: str) -> float:
        await asyncio.sleep(0.2)
        went_on.append(text)
        return 1.0

    async def fails_later(task: Task, text: str) -> float:
        await asyncio.sleep(0)
        raise ValueError(text)

    def fails(task: Task, text: str) -> float:
        raise ValueError(text)

    for last in (fails_later, fails):
        rewards = NamedRewards((NamedReward("slow", slow), NamedReward("last", last)))
        with pytest.raises(ValueError, match=r"^x$"):  # in the main thread, whose loop goes on
            rewards(TASKS[0], "x")
    assert NamedRewards((NamedReward("slow", slow),))(TASKS[0], "y") == 1.0
    assert went_on == ["y"] and not recwarn.list


def test_log_needs_a_rollout_a_name_and_a_number() -> None:
    with pytest.raises(UserError):
        octetrl.log("letters", 1.0)
    for name, value in (("Bad name", 1.0), ("letters", float("inf")), ("letters", "x")):
        given: tuple[str, Any] = (name, value)

        def bad(task: Task, text: str, given: tuple[str, Any] = given) -> float:
            octetrl.log(*given)
            return 1.0

        (score,) = in_a_thread(bad).score([(TASKS[0], "x")])
        assert (score.status, score.reward) == (ERROR, None)


# --- functions with limits, in the run's process


class Gauge:
    """An async judge that counts its calls at once."""

    def __init__(self) -> None:
        self.now = self.most = self.calls = 0

    async def __call__(self, task: Task, text: str) -> float | None:
        self.now, self.calls = self.now + 1, self.calls + 1
        self.most = max(self.most, self.now)
        octetrl.log("asked", len(text))
        try:
            await asyncio.sleep(0.01 if text != "hangs" else 60)
        finally:
            self.now -= 1
        if text == "fails":
            raise ConnectionError("429")
        return None if text == "none" else float(len(text))


def limited(part: NamedReward, groups: Sequence[NamedReward] = (), seconds: float = 30.0) -> RewardsInRun:
    inner = in_a_thread(NamedRewards(PARTS[:1], before_others=True))
    return RewardsInRun(inner, groups, limited=[part], timeout_seconds=seconds)


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (3, 3), (None, 12)])
def test_so_many_calls_are_made_at_once(most: int | None, expected: int) -> None:
    gauge = Gauge()
    scorer = limited(NamedReward("judge", gauge, 0.5, max_concurrent=most, per_minute=None if most else 1000))
    scores = scorer.score([(TASKS[0], "a" * (1 + number)) for number in range(12)])
    assert [score.reward for score in scores] == [(number == 0) + 0.5 * (1 + number) for number in range(12)]
    assert (gauge.most, gauge.calls) == (expected, 12)
    assert scores[3].components == {"right": 0.0, "judge": 4.0} and scores[3].metrics["asked"] == 4
    scorer.close()


def test_a_call_that_fails_or_hangs_is_no_reward_of_its_completion_alone() -> None:
    """Its time begins with the call and not with its wait: all others have theirs."""
    scorer = limited(NamedReward("judge", Gauge(), max_concurrent=1), GROUP[:1], seconds=0.3)
    texts = ["fails", "none", "hangs", *["bb"] * 3]
    scores = scorer.score([(TASKS[0], text) for text in texts])
    timeout = RolloutStatus.REWARD_TIMEOUT
    assert [score.status for score in scores] == [ERROR, SCORED, timeout, SCORED, SCORED, SCORED]
    assert "judge" in (scores[0].detail or "") and "429" in (scores[0].detail or "")
    assert scores[1].components == {"right": 0.0, "rank": 3.0} and scores[3].components["judge"] == 2.0
    scorer.close()


def test_calls_a_minute_are_limited_in_any_minute() -> None:
    now, begun = [0.0], []
    part = NamedReward("judge", lambda task, text: begun.append(now[0]) or 1.0, per_minute=3)
    calls = LimitedCalls(timeout_seconds=30.0, clock=lambda: now[0])
    for number in range(10):
        calls.add(_Call(part, (number, 0), TASKS[0], ("x",)))
    ended = 0
    while not calls.is_done:
        ended += len(list(calls.advance(0.01)))
        now[0] += 7.0
    assert ended == len(begun) == 10
    assert all(sum(start <= each < start + 60 for each in begun) <= 3 for start in begun)
    assert begun[-1] < 60 * 4  # and no slower than that
    calls.close()


def test_scores_are_known_early_unless_a_group_follows() -> None:
    for groups in ((), GROUP[:1]):
        scorer = limited(NamedReward("judge", short, max_concurrent=2), groups)
        scorer._scorer = _Known()
        with begin_round(scorer) as scoring:
            scoring.submit((0, 0), TASKS[0], "aa")
            until = time.monotonic() + 5
            while not scoring.is_done and time.monotonic() < until:
                scoring.advance()
            early = scoring.so_far()
            final = scoring.finish()
        assert early == ({} if groups else final) and final[0, 0].components["judge"] == 0.5
        scorer.close()


class _Known(RoundAtTheEnd):
    """A scorer whose scores are there at once."""

    def __init__(self) -> None:
        super().__init__(self)

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        return [Score(SCORED, 0.0) for _ in completions]

    def begin(self) -> _Known:
        return self

    def so_far(self) -> dict[Any, Score]:
        return dict.fromkeys(self._completions, Score(SCORED, 0.0))

    def close(self) -> None:
        pass


def test_the_recipe_says_where_a_function_runs() -> None:
    where = "tests.unit.environments.test_named_rewards"
    fields = {
        "plain": {"function": f"{where}:right"},
        "judge": {"function": f"{where}:later", "max_concurrent": 4, "weight": 2.0},
        "rank": {"function": f"{where}:ranked", "of": "group", "per_minute": 60, "only": "evaluation"},
    }
    config = EnvironmentConfig.model_validate({"reward": fields})
    of_groups, of_completions = rewards_in_run(config, {})
    assert [(part.name, part.weight, part.per_minute) for part in of_groups] == [("rank", 0.0, 60)]
    assert [(part.name, part.weight, part.max_concurrent) for part in of_completions] == [("judge", 2.0, 4)]
    assert config.reward is not None and len(named_reward(config.reward, {}).parts) == 1  # type: ignore[attr-defined]
    wrong = EnvironmentConfig.model_validate({"reward": {"x": {"function": f"{where}:workers", "per_minute": 1}}})
    with pytest.raises(UserError, match=r"environment\.reward\.x"):
        rewards_in_run(wrong, {})

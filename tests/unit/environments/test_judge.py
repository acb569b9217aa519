"""A judge behind an endpoint: what it is asked, what becomes of each answer, and that no failure is a reward."""

from __future__ import annotations

import pickle
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import ValidationError

from octetrl.config.environment import JudgeConfig
from octetrl.environments.judge import Judge
from octetrl.environments.scoring import Score
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError
from tests.unit.environments.judge_double import Double, judge_double

TASK = Task(id="0", prompt="3 + 4 = {answer}", answer="7")
ERROR, TIMEOUT, SCORED = RolloutStatus.REWARD_ERROR, RolloutStatus.REWARD_TIMEOUT, RolloutStatus.SCORED


def judge_of(double: Double, **fields: Any) -> Judge:
    fields = {"base_url": double.url, "model": "m", "backoff_seconds": 0.01, **fields}
    return Judge(JudgeConfig(**fields))


def scored(*answers: Any, text: str = "7", **fields: Any) -> tuple[Score, Double]:
    with judge_double(*answers) as double:
        judge = judge_of(double, **fields)
        (score,) = judge.score([(TASK, text)])
        judge.close()
    return score, double


def test_the_judge_is_asked_about_prompt_answer_and_completion() -> None:
    score, double = scored("Score: 8", text="It is {prompt}.", template="Q {prompt} A {answer} C {completion}")
    assert score == Score(SCORED, 0.8)
    ((path, body, headers),) = double.asked
    assert path == "/v1/chat/completions" and body["model"] == "m" and body["temperature"] == 0
    assert body["messages"] == [{"role": "user", "content": "Q 3 + 4 = {answer} A 7 C It is {prompt}."}]
    assert "Authorization" not in headers


@pytest.mark.parametrize(
    ("reply", "fields", "reward"),
    [
        ("Good.\n**Score:** 7/10", {}, 0.7),
        ("Score: 2? No.\nscore = 9.5", {}, 0.95),
        ("<think>Score: 1</think>Score: 10", {}, 1.0),
        ("[[3]]", {"pattern": r"\[\[(\d)\]\]", "lowest": 1.0, "highest": 5.0}, 0.5),
        ('{"score": 1} so {"why": {"score": 4}} ok', {"json_key": "score", "highest": 4.0}, 1.0),
        ('{ no {"score": "3"}', {"json_key": "score", "highest": 4.0}, 0.75),
    ],
)
def test_the_score_is_the_last_in_the_reply(reply: str, fields: dict[str, Any], reward: float) -> None:
    assert scored(reply, **fields)[0] == Score(SCORED, pytest.approx(reward))


@pytest.mark.parametrize(
    ("answer", "fields", "said"),
    [
        ("I like it.", {}, "no score in the reply, which ends 'I like it.'"),
        ("Score: 11", {}, "the score 11 is not from 0 to 10"),
        ('{"score": true}', {"json_key": "score"}, "no score in the reply"),
        ('{"score": 1e999}', {"json_key": "score"}, "no score in the reply"),
        ({"choices": []}, {}, "the answer holds no message"),
        ({"choices": [{"message": {"content": None}}]}, {}, "the answer holds no message"),
        ({"choices": [{"message": {"content": "So"}, "finish_reason": "length"}]}, {}, "cut at judge.max_tokens"),
        ((200, "[1]", {}), {}, "not a JSON object: [1]"),
        ((200, '{"a":' + "[" * 200_000, {}), {}, "not JSON"),
        ((302, "", {"Location": "http://there/v1"}), {}, "status 302 to http://there/v1"),
        ((404, '{"error": "no such\nmodel"}', {}), {}, 'status 404: {"error": "no such model"}'),
    ],
)
def test_a_failure_is_a_status_with_its_reason_and_no_reward(answer: Any, fields: dict[str, Any], said: str) -> None:
    score, _ = scored(answer, **fields)
    assert (score.status, score.reward) == (ERROR, None)
    assert said in (score.detail or "") and "\n" not in (score.detail or "")


def test_failures_that_may_pass_are_tried_again_and_others_once() -> None:
    began = time.monotonic()
    score, double = scored((503, "busy", {}), (429, "slow down", {"Retry-After": "0.3"}), "Score: 5")
    assert score == Score(SCORED, 0.5) and len(double.asked) == 3 and time.monotonic() - began >= 0.3
    assert [len(scored((status, "no", {}))[1].asked) for status in (400, 404)] == [1, 1]


def test_an_endpoint_that_hangs_is_a_timeout_and_one_that_is_not_there_an_error() -> None:
    score, double = scored(5.0, timeout_seconds=0.5, retries=1)
    assert (score.status, score.reward) == (TIMEOUT, None) and "no answer in" in (score.detail or "")
    assert len(double.asked) == 2
    assert scored(5.0, "Score: 5", timeout_seconds=0.7)[0] == Score(SCORED, 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"  # nobody listens, and nobody else can take it
        (score,) = Judge(JudgeConfig(base_url=url, model="m", retries=1, backoff_seconds=0.0)).score([(TASK, "7")])
    assert (score.status, score.reward) == (ERROR, None) and "ConnectError" in (score.detail or "")


def test_many_are_asked_at_once_up_to_the_limit_and_waiting_for_a_turn_is_no_timeout() -> None:
    two = threading.Barrier(2)  # the first waits for a second one

    def with_another(body: object) -> str:
        two.wait(60.0)
        return "Score: 1"

    with judge_double(with_another, with_another, "Score: 1") as double:
        judge = judge_of(double, concurrency=4)
        assert [score.reward for score in judge.score([(TASK, str(n)) for n in range(20)])] == [0.1] * 20
        assert 2 <= double.most <= 4 and len(double.asked) == 20
        double.answers[:] = [{"choices": [{"message": {"content": "?"}}]}]
        mixed = judge.score([(TASK, "new"), (TASK, "3"), (TASK, "new")])
        assert [score.reward for score in mixed] == [None, 0.1, None]
        judge.close()
    with judge_double(0.2) as double:
        judge = judge_of(double, concurrency=1, timeout_seconds=2.0, retries=0, pattern=r"(0\.\d+)")
        with ThreadPoolExecutor(12) as threads:  # as rewards of many conversations call it
            assert list(threads.map(lambda n: judge(TASK, str(n)), range(12))) == [pytest.approx(0.02)] * 12


def test_equal_completions_are_judged_once_by_a_greedy_judge() -> None:
    with judge_double("Score: 1", "Score: 2", "Score: 3") as double:
        judge = judge_of(double, concurrency=1)
        assert [score.reward for score in judge.score([(TASK, "a"), (TASK, "b"), (TASK, "a")])] == [0.1, 0.2, 0.1]
        assert judge(TASK, "a") == 0.1 and len(double.asked) == 2
        drawn = judge_of(double, temperature=1.0)
        assert len(drawn.score([(TASK, "a"), (TASK, "a")])) == 2 and len(double.asked) == 4
        assert judge.score([]) == []
        double.answers[:] = ["hm", "Score: 3"]
        assert [judge.score([(TASK, "c")])[0].reward for _ in range(2)] == [None, 0.3], "a failure is not remembered"


def test_the_key_comes_from_the_environment_and_is_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    score, double = scored((401, "wrong key sk-secret", {}), api_key_variable="JUDGE_KEY")
    assert double.asked[0][2]["Authorization"] == "Bearer sk-secret"
    assert "wrong key ***" in (score.detail or "")
    judge = judge_of(double, api_key_variable="JUDGE_KEY")
    assert b"secret" not in pickle.dumps(judge)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match="JUDGE_KEY is not set"):
        judge_of(double, api_key_variable="JUDGE_KEY")


@pytest.mark.parametrize(
    ("answer", "fields", "reward"),
    [
        ({"data": [{"data": [[-1.5]]}]}, {}, -1.5),
        ({"data": [{"data": [2]}]}, {}, 2.0),
        ({"score": 0.25}, {"value_at": "score", "path": "/reward"}, 0.25),
    ],
)
def test_a_reward_model_gives_a_number(answer: dict[str, Any], fields: dict[str, Any], reward: float) -> None:
    score, double = scored(answer, kind="reward_model", **fields)
    assert score == Score(SCORED, reward)
    path, body, _ = double.asked[0]
    assert path == fields.get("path", "/pooling")
    assert body["messages"][1] == {"role": "assistant", "content": "7"}


@pytest.mark.parametrize("answer", [{}, {"data": []}, {"data": [{"data": [1, 2]}]}, {"data": [{"data": "1"}]}])
def test_a_reward_model_that_gives_none_is_an_error(answer: dict[str, Any]) -> None:
    score, _ = scored(answer, kind="reward_model")
    assert (score.status, score.reward) == (ERROR, None) and "at 'data.0.data'" in (score.detail or "")


@pytest.mark.parametrize(
    ("field", "value"),
    [("base_url", "http://user:key@host/v1"), ("template", "no place"), ("pattern", "score"), ("highest", 0.0)],
)
def test_a_config_that_cannot_work_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        JudgeConfig.model_validate({"base_url": "http://h/v1", "model": "m", field: value})


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UserError, match=r"pip install 'octetrl\[judge\]'"):
        Judge(JudgeConfig(base_url="http://h/v1", model="m"))

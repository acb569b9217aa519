"""Scores completions with another model behind any OpenAI-compatible endpoint: a chat model or a reward model.

    chat           template -> /v1/chat/completions -> the score in its reply -> (score - lowest) / (highest - lowest)
    reward_model   prompt and completion as messages -> `path` -> the number at `value_at`, as it is

Every completion gets a status; a failure is never scored as 0. SCORED: the judge gave a finite number. REWARD_TIMEOUT:
the last attempt had no answer in time. REWARD_ERROR: any other failure, with the reason, including a reply without a
score or with a score out of range.

The judge runs in threads of the run's process and not in reward workers, because it only waits. A greedy judge is asked
only once about equal completions.

A policy may learn to persuade a judge, by praising its answer or by writing "Score: 10". Only the last match in the
judge's reply counts. Still, look at the rewarded rollouts (`octetrl rollouts`).
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from octetrl.config.environment import JudgeConfig
from octetrl.endpoint import Endpoint, EndpointError
from octetrl.environments.scoring import LARGEST_REWARD, Key, RewardTimes, Score, ScoringRound, score_all
from octetrl.records import RolloutStatus, Task

_REMEMBERED = 100_000
_SHOWN = 120


class Judge:
    """A scorer, `judge(task, text) -> float`. `score` rates many completions at once, as in RewardWorkers. Raises
    UserError if httpx or the key is missing."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._endpoint = Endpoint(config)
        self._known: OrderedDict[str, float] = OrderedDict()  # request -> reward

    def __call__(self, task: Task, completion_text: str) -> float:
        """The completion's reward. Raises EndpointError, or ValueError for a reply without a score."""
        key = self.question(task, completion_text)
        if key in self._known:
            return self._known[key]
        path = "chat/completions" if self._config.kind == "chat" else self._config.path
        answer = self._endpoint.post(path, self._body(task, completion_text))
        reward = self._chat_score(answer) if self._config.kind == "chat" else _number_at(answer, self._config.value_at)
        if self._config.temperature == 0:
            self._known[key] = reward
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return reward

    def __reduce__(self) -> tuple[type[Judge], tuple[JudgeConfig]]:
        """Pickle only the settings: connections and the key stay in this process."""
        return Judge, (self._config,)

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """The score of each (task, completion text), in their order."""
        return score_all(self.begin(), completions)

    def begin(self) -> JudgeRound:
        """Completions that are scored as they end (scoring.py)."""
        return JudgeRound(self, self._config)

    def question(self, task: Task, completion_text: str) -> str:
        """What the judge is asked, as one text: equal for completions of which it is asked only once."""
        return json.dumps(self._body(task, completion_text), sort_keys=True)

    def close(self) -> None:
        self._endpoint.close()

    def score_one(self, task: Task, completion_text: str) -> Score:
        """The completion's score. Waits for the judge."""
        try:
            return Score(RolloutStatus.SCORED, self(task, completion_text))
        except EndpointError as error:
            status = RolloutStatus.REWARD_TIMEOUT if error.timed_out else RolloutStatus.REWARD_ERROR
            return Score(status, None, f"judge: {error}")
        except (ValueError, RecursionError) as error:  # RecursionError: an answer too deep to quote
            return Score(RolloutStatus.REWARD_ERROR, None, f"judge: {error}")

    def _body(self, task: Task, completion_text: str) -> dict[str, Any]:
        config = self._config
        if config.kind == "reward_model":
            messages = [*task.messages, {"role": "assistant", "content": completion_text}]
            return {"model": config.model, "messages": messages}
        texts = {"prompt": task.text, "answer": task.answer or "", "completion": completion_text}
        question = re.sub(r"\{(prompt|answer|completion)\}", lambda match: texts[match[1]], config.template)
        return {
            "model": config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }

    def _chat_score(self, answer: dict[str, Any]) -> float:
        config, content, finish = self._config, None, None
        with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError):
            choice = answer["choices"][0]
            content, finish = choice["message"]["content"], choice.get("finish_reason")
        if not isinstance(content, str):
            raise ValueError(f"the answer holds no message: {str(answer)[:_SHOWN]}")
        reply = content.rpartition("</think>")[2]
        score = _by_pattern(reply, config.pattern) if config.json_key is None else _by_key(reply, config.json_key)
        if score is None:
            cut = f", cut at judge.max_tokens {config.max_tokens}" if finish == "length" else ""
            raise ValueError(f"no score in the reply{cut}, which ends '{' '.join(reply.split())[-_SHOWN:]}'")
        if not config.lowest <= score <= config.highest:
            raise ValueError(f"the score {score:g} is not from {config.lowest:g} to {config.highest:g}")
        return (score - config.lowest) / (config.highest - config.lowest)


class JudgeRound(ScoringRound):
    """Completions about which a judge is asked while others are sampled (scoring.py)."""

    def __init__(self, judge: Judge, config: JudgeConfig) -> None:
        self._judge, self._asks_once = judge, config.temperature == 0
        self._threads = ThreadPoolExecutor(config.concurrency)
        self._asked: dict[str, Future[Score]] = {}  # by question
        self._scores: dict[Key, Future[Score]] = {}

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._threads.shutdown(wait=kind is None, cancel_futures=True)

    def submit(self, key: Key, task: Task, completion_text: str) -> None:
        question = self._judge.question(task, completion_text) if self._asks_once else str(key)
        if question not in self._asked:
            self._asked[question] = self._threads.submit(self._judge.score_one, task, completion_text)
        self._scores[key] = self._asked[question]

    def so_far(self) -> dict[Key, Score]:
        return {key: score.result() for key, score in self._scores.items() if score.done()}

    @property
    def is_done(self) -> bool:
        return all(score.done() for score in self._scores.values())

    def finish(self) -> dict[Key, Score]:
        began = time.monotonic()
        scores = {key: score.result() for key, score in self._scores.items()}
        self.times = RewardTimes(waited=time.monotonic() - began)
        return scores


def _by_pattern(reply: str, pattern: str) -> float | None:
    matches = re.findall(pattern, reply)
    return _number(matches[-1]) if matches else None


def _by_key(reply: str, key: str) -> float | None:
    """The value of `key` in the last JSON object of `reply` that has it."""
    last, position, decoder = None, 0, json.JSONDecoder()
    while (position := reply.find("{", position)) >= 0:
        try:
            value, end = decoder.raw_decode(reply, position)
        except (ValueError, RecursionError):
            position += 1
            continue
        last, position = (value[key], end) if key in value else (last, position + 1)
    return _number(last)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST_REWARD else None


def _number_at(answer: dict[str, Any], path: str) -> float:
    """The number at `path`; lists with one element are entered."""
    value: Any = answer
    for step in path.split("."):
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"the answer has nothing at '{path}': {str(answer)[:_SHOWN]}") from None
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    number = None if isinstance(value, str) else _number(value)
    if number is None:
        raise ValueError(f"what the answer has at '{path}' is not a finite number: {str(value)[:_SHOWN]}")
    return number

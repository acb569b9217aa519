"""Rollouts as a run writes them, and some that it would not, for the tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octetrl.records import Completion, FinishReason, Reply, Rollout, RolloutGroup, RolloutStatus, Task, Turn

EVIL = "</script><script>alert('x')</script>\x1b[31m\u202e<b>[bold]"


def line(task: str, sibling: int, reward: float | None, text: str = "1 + 2 = 3", **further: Any) -> dict[str, Any]:
    status = "scored" if reward is not None else "reward_error"
    tokens = list(range(len(text)))
    return {
        "task_id": task,
        "prompt": f"What is {task}?",
        "answer": "3",
        "sibling": sibling,
        "status": status,
        "reward": reward,
        "answered": "3",
        "detail": None if reward is not None else "KeyError: 'x' (r.py:3)",
        "trace": None if reward is not None else "Traceback ...\nKeyError: 'x'",
        "text": text,
        "policy_version": 0,
        "finish_reason": "stop",
        "prompt_token_ids": [1],
        "token_ids": tokens,
        "logprobs": [-0.05] * len(tokens),
        **further,
    }


def two_turns(task: str, sibling: int) -> dict[str, Any]:
    first: dict[str, Any] = {"prompt_token_ids": [1], "num_tokens": 4, "text": "ask!"}
    first["replies"] = [{"role": "tool", "text": "told you"}]
    last = {"prompt_token_ids": [2], "num_tokens": 3, "text": "so 3", "replies": []}
    text = "ask!told youso 3"
    found = line(task, sibling, 1.0, text, turns=[first, last], components={"right": 1.0, "brevity": -0.25})
    return found | {"token_ids": list(range(7)), "logprobs": [-0.1, -3.0, -6.0, -0.1, -0.1, -0.1, -0.1]}


def write_run(folder: Path) -> Path:
    """Steps 1 to 3 with two groups each: `easy` (rewards 1, 0.5), and one whose second has no reward; step 3 has a
    conversation of two turns and a text that means harm, and an answer that two versions sampled."""
    (folder / "rollouts").mkdir(parents=True)
    for step in (1, 2, 3):
        rows = [line("sum/easy", 0, 1.0), line("sum/easy", 1, 0.5, "I guess FOUR")]
        rows += [line(f"sum/{step}", 0, 0.0), line(f"sum/{step}", 1, None)]
        if step == 3:
            rows[0]["policy_versions"] = [[0, 2], [4, 3]]
            rows += [two_turns("talk", 0), line("talk", 1, -1.0, EVIL)]
        path = folder / "rollouts" / f"step_{step:06d}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (folder / "rollouts" / "step_000004.jsonl.partial").write_text("{")
    return folder


class Letters:
    """A tokenizer whose token n is the nth letter of `text`, which begins again at its end."""

    def __init__(self, text: str) -> None:
        self._text = text

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self._text[token_id % len(self._text)] for token_id in token_ids)


TASK = Task(id="chain_sum/17", prompt="3 + 4 =", answer="7")


def turn(tokens: tuple[int, ...], reply: str | None = None) -> Turn:
    text = "".join(str(token) for token in tokens)
    completion = Completion(tokens, (-0.1,) * len(tokens), text, FinishReason.STOP, 5, "digest")
    return Turn((1, 2), completion, () if reply is None else (Reply("user", reply),))


def rollout(status: RolloutStatus, reward: float | None, *turns: Turn) -> Rollout:
    return Rollout(TASK, turns, status, reward)


GROUP = RolloutGroup(
    TASK,
    (
        rollout(RolloutStatus.SCORED, 1.0, turn((7, 9))),
        rollout(RolloutStatus.TRUNCATED, 0.0, turn((8, 8, 8, 8))),
        rollout(RolloutStatus.REWARD_ERROR, None, turn((6, 9, 9), reply="go on"), turn((5, 9, 9))),
        rollout(RolloutStatus.PROMPT_TOO_LONG, None),
    ),
)
FLAT = RolloutGroup(TASK, (rollout(RolloutStatus.SCORED, 1.0, turn((7, 9))),) * 2)

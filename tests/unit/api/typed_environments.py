"""What a user may write, for the type checkers: `make test` runs mypy on it. Nothing here is executed."""

from __future__ import annotations

import octetrl
from octetrl import Conversation, Task, metric, reward


class Polite:
    def __init__(self) -> None:
        self.tasks = [Task(id="1", prompt="hello")]

    @reward
    def polite(self, conversation: Conversation) -> float:
        return float("please" in conversation.text)

    @reward(weight=0.2)
    async def short(self, conversation: Conversation) -> float:
        return 1.0

    @metric
    def length(self, conversation: Conversation) -> float:
        return float(len(conversation.text))


class Fixed:
    tasks = (Task(id="1", prompt="hello"),)

    @reward
    def polite(self, conversation: Conversation) -> float:
        return 1.0


class Scored:
    tasks = (Task(id="1", prompt="hello"),)

    def score(self, task: Task, text: str) -> float:
        return 1.0


class MadeTasks:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> Task:
        return Task(id=str(place), prompt=f"{place} + 1 =")


class Made:
    tasks = MadeTasks()

    @reward
    def polite(self, conversation: Conversation) -> float:
        return 1.0


def by_column(completions: list[str], answer: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def trl(prompts: list[str], completions: list[str], **columns: list[str]) -> list[float]:
    return [1.0 for _ in completions]


class Nothing:
    pass


def accepted() -> None:
    octetrl.train(model="m", tasks=Polite())
    octetrl.train(model="m", tasks=Fixed())
    octetrl.train(model="m", tasks=Scored())
    octetrl.train(model="m", tasks=Made())
    octetrl.train(model="m", tasks="t.jsonl", reward=by_column)
    octetrl.train(model="m", tasks=[{"prompt": "a", "answer": "b"}], reward=trl)
    octetrl.train(model="m", tasks="t.jsonl", reward=lambda task, text: 1.0)
    octetrl.train(model="m", environments={"a": {"tasks": Fixed(), "weight": 2}})


def refused() -> None:
    octetrl.train(model="m", tasks=Nothing())  # type: ignore[arg-type]
    octetrl.train(model="m", tasks=3)  # type: ignore[arg-type]
    octetrl.train(model="m", tasks=[], reward=1.0)  # type: ignore[arg-type]


def asked(task: Task, text: str) -> float:
    return float("please" in text)


def run() -> None:
    """An unknown field is an error of the type checker, and so is an ignore without an error."""
    octetrl.train("demo_grpo", steps=3, rollout={"group_size": 4, "stop": ["\n"]}, trainer={"optimizer": {"lr": 1e-5}})
    octetrl.train(model={"path": "m"}, algorithm={"name": "dapo", "clip_high": 0.3}, precision="fp8_full", seed=1)
    sums = [{"prompt": "2+2="}]
    octetrl.train(environments={"sums": {"tasks": sums, "eval_tasks": sums, "reward": asked, "weight": 2}}, epochs=None)
    octetrl.resume("runs/sums", reward=asked, steps=400, trainer={"optimizer": {"lr": 1}})
    octetrl.train("demo_grpo", stepz=3)  # type: ignore[call-arg]
    octetrl.train("demo_grpo", rollout={"temperatur": 1})  # type: ignore[typeddict-unknown-key]
    octetrl.train("demo_grpo", trainer={"optimizer": {"lr": "fast"}})  # type: ignore[typeddict-item]
    octetrl.train("demo_grpo", algorithm={"clip": 0.2})  # type: ignore[typeddict-unknown-key]
    octetrl.resume("runs/sums", stepz=400)  # type: ignore[call-arg]

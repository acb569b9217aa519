"""An environment: words to spell backwards, with half a point for the right letters in a wrong order.

workers = RewardWorkers(Backwards().score, timeout_seconds=1.0)
"""

from octetrl.records import Task

WORDS = ("octet", "reward", "rollout", "policy", "tensor", "kernel", "publish", "scale")


class Backwards:
    tasks = tuple(Task(id=word, prompt=f"Spell '{word}' backwards.", answer=word[::-1]) for word in WORDS)

    def score(self, task: Task, completion_text: str, /) -> float:
        answer = completion_text.strip()
        return 1.0 if answer == task.answer else 0.5 * (sorted(answer) == sorted(task.id))

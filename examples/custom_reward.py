"""A reward: a function of a task and a completion.

In a recipe: `environment.reward: examples.custom_reward:short_and_right`
"""

from octetrl.records import Task


def short_and_right(task: Task, completion_text: str) -> float:
    """1 for a completion that ends with the answer, minus 0.001 for each character; at least 0."""
    if task.answer is None:
        raise ValueError("no answer to compare with")  # the rollout is counted and left out, not scored as 0
    is_right = completion_text.strip().endswith(task.answer)
    return max(0.0, is_right - 0.001 * len(completion_text))

"""Reward functions of TRL's form as rewards here: `(prompts, completions, **columns) -> list[float]`, or with fewer
parameters, as `(completions, answer)`.

    environment: {kind: jsonl, dataset: sums.jsonl, reward: "my_rewards:accuracy"}     one function, as it is

    my_reward = TrlRewards([accuracy, polite], weights=[1.0, 0.2])                     several, with weights

TRL calls a function once for a batch. Here each completion is scored as soon as it ends, so each list has one entry. A
function that compares the completions of a prompt gets them all as a reward `of: group` (named_rewards.py).

A function gets the columns that it names, or all with `**columns`: `answer`, `id`, and each key of the task's metadata,
which are the other keys of the file's row. Nobody has `trainer_state`, `completion_ids` and the like. Functions may be
async; they are awaited together. None means that a function does not apply to the completion. If none applies, there
is no reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from octetrl.environments.scoring import call_all, finite_number, place_of
from octetrl.environments.turns import Conversation, reward
from octetrl.records import Task
from octetrl.system.errors import UserError, type_of

TrlReward = Callable[..., Any]  # (prompts, completions, **columns) -> list[float | None], or async


class TrlRewards:
    """The weighted sum of reward functions of TRL's form, as a scorer.

    weights: one for each function; None: all 1. messages: whether prompts and completions are lists of messages, as in
    TRL's conversational data sets; otherwise they are texts. Raises UserError for a function of another form.
    """

    def __init__(
        self, functions: Sequence[TrlReward], weights: Sequence[float] | None = None, *, messages: bool = False
    ) -> None:
        self._functions = tuple(functions)
        self._weights = (1.0,) * len(self._functions) if weights is None else tuple(weights)
        self._messages = messages
        if not self._functions:
            raise UserError("TrlRewards: there is no reward function; give a list of at least one")
        if len(self._weights) != len(self._functions):
            raise UserError(
                f"TrlRewards: {len(self._weights)} weights for {len(self._functions)} functions; give one for each"
            )
        for weight in self._weights:
            finite_number(weight, "weight")
        for function in self._functions:
            if not has_trl_form(function):
                raise UserError(
                    f"TrlRewards: {place_of(function)} has no parameter named completions; write (prompts, completions,"
                    " **columns)"
                )

    def __call__(self, task: Task, completion_text: str) -> float:
        """The reward of one completion. Raises ValueError or TypeError for a result of another form."""
        results = call_all(
            partial(call_trl, function, task, completion_text, messages=self._messages) for function in self._functions
        )
        values = [_value(function, result) for function, result in zip(self._functions, results, strict=True)]
        pairs = [(weight, value) for weight, value in zip(self._weights, values, strict=True) if value is not None]
        if not pairs:
            raise ValueError("every reward function returned None, so the completion has no reward")
        return sum(weight * value for weight, value in pairs)


def trl_reward(function: TrlReward, weight: float = 1.0, *, messages: bool = False) -> Any:
    """A function of TRL's form as a method with @reward, so that its values are metrics of their own:

        class Sums:
            tasks = TASKS  # a list of Task
            accuracy = trl_reward(accuracy)
            polite = trl_reward(polite, weight=0.2)

    The completion is the model's last message. None counts as 0.
    """
    if not has_trl_form(function):
        raise UserError(f"trl_reward: {place_of(function)} is not of the form (prompts, completions, **columns)")

    async def judge(self: Any, conversation: Conversation) -> float:
        result = call_trl(function, conversation.task, conversation.text, messages=messages)
        value = _value(function, await result if inspect.isawaitable(result) else result)
        return 0.0 if value is None else value

    return reward(weight=weight)(judge)


def has_trl_form(function: Any) -> bool:
    """Whether a function takes completions by name. A first parameter `task` is that of (task, text), unless prompts or
    all columns are taken too."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    if "completions" not in parameters:
        return False
    return "prompts" in parameters or _takes_all(parameters) or next(iter(parameters)) != "task"


def _takes_all(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def call_trl(function: TrlReward, task: Task, *texts: str, messages: bool = False) -> Any:
    """Call `function` for completions of one task: its list, or an awaitable of it. Raises TypeError for a column that
    the task lacks."""
    prompt: Any = list(map(dict, task.messages)) if messages or not isinstance(task.prompt, str) else task.prompt
    said: list[Any] = [[{"role": "assistant", "content": text}] for text in texts] if messages else list(texts)
    columns = {**task.metadata, "id": task.id, "answer": task.answer}
    given = {name: [value] * len(texts) for name, value in columns.items()}
    given |= {"prompts": [prompt] * len(texts), "completions": said}  # whatever columns a row has
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        by_name = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if by_name and parameter.default is inspect.Parameter.empty and name not in given:
            raise TypeError(
                f"{place_of(function)} needs the column '{name}', which the task does not have; it has"
                f" {', '.join(columns)}"
            )
    if not _takes_all(parameters):
        given = {name: value for name, value in given.items() if name in parameters}
    try:
        return function(**given)
    except TypeError as error:
        if str(error).startswith("string indices") and not messages:
            advice = "completions are texts here; TrlRewards([function], messages=True) gives lists of messages"
            error.args = (f"{error}; {advice}",)
        raise


def _value(function: TrlReward, result: Any) -> float | None:
    if isinstance(result, str) or not hasattr(result, "__len__") or not hasattr(result, "__getitem__"):
        raise TypeError(f"{place_of(function)} returned {type_of(result)}; return a list of one number")
    if len(result) != 1:
        raise ValueError(f"{place_of(function)} returned {len(result)} rewards for 1 completion; return a list of one")
    return None if result[0] is None else finite_number(result[0], f"reward of {place_of(function)}")

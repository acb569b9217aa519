"""Runs environments with Gymnasium's `reset` and `step` as conversations.

    prompt        {instructions}, then the observation of reset(seed); task i has seed + i
    message       the model's action: the text after the last `action_marker`, a name, a number, or the text itself
    reply         the observation of step(action); an unknown action is reported to the model, with the known ones
    reward        the sum of the steps' rewards, when the game is terminated, truncated, or out of turns

An observation that is a text is shown as it is. Otherwise `render()` is shown if the environment was created with
`render_mode="ansi"`, and else the observation's `str`. `environment.dataset: module:name` names a function or class
that creates an environment; this does not need Gymnasium. An id, such as FrozenLake-v1, needs the extra `gymnasium`.

Each rollout has its own environment. The prompt was created with another one, so the observation of reset(seed) must be
the same each time. Otherwise the rollout is an environment_error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from octetrl.environments.python_object import LOAD_SECONDS, load_object
from octetrl.environments.rewards import extract_answer
from octetrl.environments.tasks import MadeTasks
from octetrl.environments.turns import Conversation, metric, reward
from octetrl.records import Task
from octetrl.system.errors import UserError, error_line, nearest

_COLOURED = re.compile(r"\x1b\[[1-9][0-9;]*m([^\x1b]*)\x1b\[0?m")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class RefusedAction(Exception):
    """Why a message has no action. The text is shown to the policy."""


@dataclass(eq=False, kw_only=True)
class Episodes:
    """Episodes of steps as conversations: the part that does not depend on who steps."""

    size: int
    seed: int = 0
    instructions: str = "Play this game. Answer each message with your next action."
    action_marker: str | None = None
    _shown: dict[int, str] = field(default_factory=dict, repr=False)

    def begin(self, seed: int) -> tuple[Any, str]:
        """A new episode, and what it shows first."""
        raise NotImplementedError

    def act(self, state: Any, said: str) -> str | None:
        """What the action shows; None: the episode is over. state: the conversation's, whose `total` and `steps` it
        adds to. Raises RefusedAction."""
        raise NotImplementedError

    def close_episode(self, episode: Any) -> None:
        raise NotImplementedError

    @property
    def tasks(self) -> Sequence[Task]:
        return MadeTasks(self.size, lambda indices: [self._task(index) for index in indices])

    def _task(self, index: int) -> Task:
        seed = self.seed + index
        if seed not in self._shown:
            episode, self._shown[seed] = self.begin(seed)
            self.close_episode(episode)
        shown = self._shown[seed]
        return Task(f"seed/{seed}", f"{self.instructions}\n\n{shown}", metadata={"seed": seed, "shown": shown})

    def start(self, conversation: Conversation) -> None:
        state, given = conversation.state, conversation.task.metadata
        state.total, state.steps, state.wrong = 0.0, 0, 0
        state.episode, shown = self.begin(given["seed"])
        if shown != given["shown"]:
            seed = given["seed"]
            raise RuntimeError(f"reset(seed={seed}) showed {shown[:80]!r} the second time; the seed must decide it")

    def reply(self, conversation: Conversation) -> str | None:
        said = extract_answer(conversation.text.rpartition("</think>")[2], self.action_marker)
        try:
            if said is None:
                raise RefusedAction(f"There is no action in that: write it after {self.action_marker}")
            return self.act(conversation.state, said)
        except RefusedAction as refusal:
            conversation.state.wrong += 1
            return str(refusal)

    def finish(self, conversation: Conversation) -> None:
        if hasattr(conversation.state, "episode"):
            self.close_episode(conversation.state.episode)

    @reward
    def gained(self, conversation: Conversation) -> float:
        """The sum of the steps' rewards."""
        return conversation.state.total

    @metric
    def steps(self, conversation: Conversation) -> float:
        return conversation.state.steps

    @metric
    def wrong_actions(self, conversation: Conversation) -> float:
        """Number of messages without a valid action."""
        return conversation.state.wrong


@dataclass(eq=False, kw_only=True)
class ResetStep(Episodes):
    """`make()` creates an environment. actions: names of the actions, in the order of a Discrete space. If there are
    none, an action is a number, or in a space of texts the text itself."""

    make: Callable[[], Any]
    actions: Sequence[str] = ()

    def begin(self, seed: int) -> tuple[Any, str]:
        environment = self.make()
        return environment, _shown(environment, environment.reset(seed=seed)[0])

    def act(self, state: Any, said: str) -> str | None:
        result = state.episode.step(self._action(said, getattr(state.episode, "action_space", None)))
        if not isinstance(result, tuple) or len(result) != 5:
            raise TypeError("step gave something else than (observation, reward, terminated, truncated, info)")
        observation, gained, terminated, truncated, _ = result
        state.steps += 1
        state.total += float(gained)
        return None if terminated or truncated else _shown(state.episode, observation)

    def close_episode(self, episode: Any) -> None:
        if hasattr(episode, "close"):
            episode.close()

    def _action(self, said: str, space: Any) -> Any:
        """The action that the message names. Raises RefusedAction."""
        if self.actions:
            names = [name.lower() for name in self.actions]
            word = said.strip().strip(".!\"'").lower()
            if word not in names:
                raise RefusedAction(f"'{said[:40]}' is no action. The actions are: {', '.join(self.actions)}.")
            return getattr(space, "start", 0) + names.index(word)
        count = getattr(space, "n", None)
        if count is None:
            if space is not None and not space.contains(said):
                raise RefusedAction(f"'{said[:40]}' is no action here.")
            return said
        first = int(getattr(space, "start", 0))
        if not re.fullmatch(r"-?\d{1,9}", said, re.ASCII) or not first <= int(said) < first + int(count):
            raise RefusedAction(
                f"'{said[:40]}' is no action. The actions are the numbers {first} to {first + count - 1}."
            )
        return int(said)


def gymnasium_environment(
    name: str,
    parameters: Mapping[str, Any],
    *,
    size: int,
    seed: int,
    action_marker: str | None,
    load_seconds: float = LOAD_SECONDS,
) -> ResetStep:
    """`name`: one of Gymnasium's ids, or `module:name` of a function or class that creates an environment.
    `parameters`: instructions, actions, and arguments of that function. Raises UserError if it creates none."""
    given = dict(parameters)
    ours = {key: given.pop(key) for key in ("instructions", "actions") if key in given}
    try:
        make = _maker(name, given, load_seconds)
        environment = ResetStep(make=make, size=size, seed=seed, action_marker=action_marker, **ours)
        _ = environment.tasks[0]
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, SystemExit) as error:
        raise UserError(
            f"environment.dataset: '{name}' with parameters {given} gives no environment with reset(seed=...)"
            f" that shows something ({error_line(error)})"
        ) from error
    return environment


def _maker(name: str, parameters: dict[str, Any], load_seconds: float) -> Callable[[], Any]:
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        return partial(load_object("environment.dataset", name, load_seconds), **parameters)
    try:
        import gymnasium
    except ImportError:
        raise UserError(
            f"environment.dataset: '{name}' needs gymnasium, which is not installed; pip install 'octetrl[gymnasium]',"
            " or give module:name of what makes an environment"
        ) from None
    if name not in gymnasium.registry:
        known = nearest(name, gymnasium.registry)
        raise UserError(f"environment.dataset: gymnasium has no environment '{name}'{known}")
    return partial(gymnasium.make, name, **parameters)


def _shown(environment: Any, observation: Any) -> str:
    if not isinstance(observation, str) and getattr(environment, "render_mode", None) == "ansi":
        observation = environment.render()
    text = _COLOURED.sub(r"[\1]", str(observation))  # a colour says something: where one stands, say
    return _COLOUR.sub("", text).strip()

"""Tries a recipe's tasks, prompts and score before a run does: `octetrl check` shows the result. No torch.

A sample of the training tasks is made and tokenized. The score is called in a reward process, as in a run, on the
reference answers of some tasks, on an empty text and on garbage. So a run whose prompts are all too long, or whose
score can't be used, is refused before it begins.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from octetrl.config.environment import EnvironmentConfig
from octetrl.config.schema import Recipe
from octetrl.config.several_environments import alone, renamed
from octetrl.environments.dialogue import is_dialogue
from octetrl.environments.judge import Judge
from octetrl.environments.python_object import named_reward
from octetrl.environments.reward_workers import RewardWorkers
from octetrl.environments.scoring import RETURNED_BY, Score
from octetrl.environments.tasks import Environment
from octetrl.records import RolloutStatus, Task
from octetrl.rollout.chat_tokens import unread
from octetrl.run.environment import (
    NOTHING_GIVEN,
    build_environment,
    build_environments,
    build_tasks,
    build_taskset,
    chat_options,
    refuse_own_sampling,
    reward_processes,
)
from octetrl.run.tokenizer_process import TokenizerProcess
from octetrl.system.errors import UserError

MOST_TASKS, MOST_SECONDS = 64, 5.0  # of the sample: tasks may take long to make
REFERENCES = 2  # tasks whose reference answers are scored
MOST_SHOWN = 600  # characters of the first prompt
MANY_TOO_LONG = 0.1  # share of prompts above which it is worth a line
GARBAGE = "}{ 1e999 \\frac{ </answer> \u2603 \n\n <|nothing|> 'quote\" 0x -inf"


class FirstPrompt(NamedTuple):
    """The first training prompt as the model reads it."""

    task_id: str
    text: str
    num_tokens: int


@dataclass(slots=True)
class Rehearsal:
    """What was found. `lines` are (name, text) to show, `problems` what a run would fail with. prompts: one of each
    environment."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    prompts: list[FirstPrompt] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.lines.append(("warning", text))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self.problems.append(str(error))


def rehearse(recipe: Recipe, tokenizer: TokenizerProcess | None) -> Rehearsal:
    """Try tasks, prompts and score. tokenizer: None if it can't be read, then no prompt is tokenized.

    An environment that can't be built is no problem here, because the checks of files report it. A reward model's run
    samples no answers, and is not rehearsed. Of several environments each is rehearsed."""
    if not recipe.environments:
        return _rehearse_alone(recipe, tokenizer)
    found = Rehearsal()
    for name, one in alone(recipe).items():
        of_one = _rehearse_alone(one, tokenizer)
        found.lines += [(f"{name}: {label}" if label else "", text) for label, text in of_one.lines]
        found.problems += [renamed(problem, name) for problem in of_one.problems]
        found.prompts += of_one.prompts
    if found.problems or recipe.algorithm.name == "reward_model":
        return found
    try:
        environments = build_environments(recipe)
    except UserError:
        return found
    with found.collecting():
        build_tasks(recipe, environments)  # one may hold out all tasks of another
    return found


def _rehearse_alone(recipe: Recipe, tokenizer: TokenizerProcess | None) -> Rehearsal:
    found, config = Rehearsal(), recipe.environment
    if config.dataset is None or recipe.algorithm.name == "reward_model":
        return found
    try:
        environment = build_environment(config)
    except UserError:
        with found.collecting():
            _load_reward(config)
        return found
    tasks: list[Task] = []
    with found.collecting():
        tasks = _sample(environment, config)
        refuse_own_sampling(recipe, environment.tasks)
    if tasks and tokenizer is not None:
        with found.collecting():
            _rehearse_prompts(found, recipe, environment, tokenizer, tasks)
            _look_at_rows(found, environment.tasks if isinstance(environment.tasks, list | tuple) else tasks, tokenizer)
    with found.collecting():
        scores = None if is_dialogue(environment) or config.reward_model or config.judge else environment.score
        if scores is None or not tasks:
            _load_reward(config)
            if is_dialogue(environment) and tasks:
                text = "not tried: they take a whole conversation; `--sample 2` tries them on answers of the model"
                found.lines.append(("rewards", text))
        else:
            with reward_processes(scores, config) as workers:
                _rehearse_score(found, config, workers, tasks)
    return found


def _sample(environment: Environment, config: EnvironmentConfig) -> list[Task]:
    """The first training tasks, as many as can be made in the time. Raises UserError if there are too few tasks."""
    taskset = build_taskset(environment, config)
    tasks: dict[str, Task] = {}
    ends = time.monotonic() + MOST_SECONDS
    for _ in range(min(MOST_TASKS, len(environment.tasks))):
        (task,) = taskset.next_batch(1)
        tasks.setdefault(task.id, task)
        if time.monotonic() > ends:
            break
    return list(tasks.values())


def _rehearse_prompts(
    found: Rehearsal, recipe: Recipe, environment: Environment, tokenizer: TokenizerProcess, tasks: Sequence[Task]
) -> None:
    limit, chat = recipe.rollout.max_prompt_tokens, chat_options(recipe, environment)
    plain = [replace(task.plain(), metadata={}) for task in tasks]  # a user's own class may not travel
    text = tokenizer.prompt_text(plain[0], chat)
    shown = json.dumps(text, ensure_ascii=False)
    found.lines.append(("first prompt", shown if len(shown) <= MOST_SHOWN else f"{shown[: MOST_SHOWN - 3]}..."))
    if chat["tools"]:
        asked = recipe.rollout.tool_format
        source = "by the chat template" if asked == "auto" else "by the recipe"
        found.lines.append(("tool calls", f"{tokenizer.tool_format(asked)}, {source} (rollout.tool_format)"))
    for name, default in tokenizer.template_variables().items():
        given = chat["variables"].get(name)
        set_to = f"{json.dumps(given)} by the recipe" if given is not None else default or "not set"
        found.lines.append(("template", f"{name}: {set_to} (rollout.chat_template_kwargs)"))
    lengths = tokenizer.prompt_lengths(plain, chat, recipe.model.context_length)
    found.prompts.append(FirstPrompt(tasks[0].id, text, lengths[0]))
    lengths.sort()
    late = lengths[math.ceil(0.99 * len(lengths)) - 1]
    too_long = sum(length > limit for length in lengths)
    found.lines.append(
        (
            "prompts",
            f"{len(lengths)} tried: median {statistics.median(lengths):,.0f} tokens, 99% at most {late:,}; limit"
            f" {limit:,}, {too_long / len(lengths):.0%} too long",
        )
    )
    if too_long == len(lengths):
        found.problems.append(
            f"rollout.max_prompt_tokens: {limit} is less than every prompt that was tried has ({lengths[0]:,} to"
            f" {lengths[-1]:,} tokens), so nothing would be sampled; raise it to at least {late:,}"
        )
    elif too_long > MANY_TOO_LONG * len(lengths):
        found.warn(f"prompts that are too long get no answer; rollout.max_prompt_tokens={late} takes 99% of them")


def _look_at_rows(found: Rehearsal, tasks: Sequence[Task], tokenizer: TokenizerProcess) -> None:
    """Raise UserError for the first row whose tools or variables the template ignores. Warn of the first prompt that
    nobody but the system says."""
    names = tokenizer.template_names()
    for task in tasks:
        if lost := unread(names, task.chat_template_kwargs, task.tools):
            raise UserError(f"task '{task.id}': {lost}")
    alone = (task for task in tasks if all(message["role"] in ("system", "developer") for message in task.messages))
    if (task_alone := next(alone, None)) is not None:
        found.warn(
            f"task '{task_alone.id}' has system messages alone, so nobody asks anything; is its question missing?"
        )


def _load_reward(config: EnvironmentConfig) -> None:
    """Load the score without calling it: no task was made, or the score is not the environment's."""
    if config.reward is not None:
        RewardWorkers(
            named_reward(config.reward, NOTHING_GIVEN),
            timeout_seconds=config.reward_timeout_seconds,
            memory_mib=config.reward_memory_mib,
            load_seconds=config.load_timeout_seconds,
        ).close()
    if config.judge is not None:
        Judge(config.judge).close()


def _rehearse_score(found: Rehearsal, config: EnvironmentConfig, workers: RewardWorkers, tasks: Sequence[Task]) -> None:
    tried = [
        ("reference answer", task, reference_text(config, task.answer)) for task in tasks if task.answer is not None
    ][:REFERENCES]
    tried += [("empty text", tasks[0], ""), ("garbage", tasks[0], GARBAGE)]
    scores = workers.score([(task, text) for _, task, text in tried])
    shown: dict[str, Score] = {}
    for (name, _, _), score in zip(tried, scores, strict=True):
        shown.setdefault(name, score)
    found.lines += [(name, _shown(score)) for name, score in shown.items()]
    several = {} if config.reward is None or isinstance(config.reward, str) else config.reward
    if not_called := [name for name, each in several.items() if each.in_run]:
        text = f"{', '.join(not_called)}: the run's process calls them; `--sample 2` does too"
        found.lines.append(("without", text))
    failed = [score for score in scores if score.reward is None]
    wrong_type = [score for score in failed if RETURNED_BY in (score.detail or "")]
    field_name = "environment.reward" if config.reward is not None else "environment"
    if wrong_type:
        found.problems.append(f"{field_name}: {wrong_type[0].detail}; return a finite number")
    elif len(failed) == len(scores):
        found.problems.append(
            f"{field_name}: the score fails on every text that was tried ({failed[0].status}: {failed[0].detail})"
        )
    elif failed:
        found.warn("where the score fails, a rollout has no reward and is left out")
    rewards = [score.reward for score in scores]
    if not failed and len(scores) > 2 and len(set(rewards)) == 1:
        found.warn("reference answer, empty text and garbage get the same reward; equal rewards teach nothing")
    elif config.reward is None and config.answer_marker is not None and rewards[0] == rewards[-2] and len(scores) > 2:
        found.warn(f"the reference answer after '{config.answer_marker}' is worth no more than an empty text")


def reference_text(config: EnvironmentConfig, answer: str) -> str:
    """A completion that gives `answer` as the recipe's marker wants it."""
    marker = config.answer_marker
    if marker is None:
        boxed = config.kind == "math" and "$" not in answer and "\\boxed" not in answer
        return f"\\boxed{{{answer}}}" if boxed else answer
    closing = f"</{marker[1:]}" if marker.startswith("<") and marker.endswith(">") else ""
    return f"{marker} {answer}{closing}"


def _shown(score: Score) -> str:
    if score.status is RolloutStatus.SCORED:
        return f"reward {score.reward:g}"
    return f"no reward, {score.status}: {score.detail}"

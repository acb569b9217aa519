"""Builds the environments of a recipe, and what a run needs of them: tasks, chat tokens and scorers. No torch.

Of several environments, each is built from the recipe that has only this one (config/several_environments.py). The
parts are then joined (environments/mixed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from octetrl.config.algorithm import OwnObjectiveConfig
from octetrl.config.environment import EnvironmentConfig
from octetrl.config.rules_environment import refuse_for_turns
from octetrl.config.schema import Recipe
from octetrl.config.several_environments import alone, errors_named
from octetrl.data.tasks import read_tasks
from octetrl.data.tokenizer import Tokenizer, tool_family
from octetrl.environments.calls import unchanged_process
from octetrl.environments.code_scorer import code_environment
from octetrl.environments.dialogue import ConversationLimits, Dialogue, Dialogues, is_dialogue, toolbox_of
from octetrl.environments.judge import Judge
from octetrl.environments.math_answers import MathScorer, reference_problems
from octetrl.environments.mixed import MixedDialogues, MixedScorer, MixedTaskset
from octetrl.environments.named_rewards import WithGroupRewards
from octetrl.environments.python_object import (
    ForeignTasks,
    Given,
    can_run_elsewhere,
    check_environment,
    group_rewards,
    load_environment,
    load_object,
    named_reward,
)
from octetrl.environments.reasoning_gym import reasoning_gym_environment
from octetrl.environments.reset_step import gymnasium_environment
from octetrl.environments.reward_workers import FunctionRewards, RewardWorkers
from octetrl.environments.rewards import ExactScorer
from octetrl.environments.scoring import OpenScorer, Scorer, place_of
from octetrl.environments.tasks import Environment, NoTasks, TaskEnvironment, Taskset
from octetrl.environments.tools.ready import with_tools
from octetrl.environments.verifiers_adapter import verifiers_environment
from octetrl.records import Task
from octetrl.rollout.chat_tokens import ChatTokenizer, ChatTokens, try_prompts
from octetrl.shapes.spec import ModelSpec

NOTHING_GIVEN: Given = MappingProxyType({})
Environments = Mapping[str, Environment]  # by name; a single one has the empty name
Rewards = OpenScorer | Dialogues
_Part = TypeVar("_Part", bound=OpenScorer | Dialogue)


@unchanged_process()
def build_environment(config: EnvironmentConfig, given: Given = NOTHING_GIVEN) -> Environment:
    """Tasks and scorer of the recipe; `environment.reward` replaces the kind's own scorer.

    given: what the recipe names as `given:NAME` (environments/python_object.py).
    """
    if config.dataset is None:
        return TaskEnvironment([], ExactScorer())  # validated: neither rollouts nor evaluation
    if config.kind == "python" and config.dataset in given:
        environment: Environment = given[config.dataset]
        check_environment(environment, config.dataset)
    else:
        environment = _environment_of_kind(config, config.dataset)
    if config.reward is not None and not is_dialogue(environment):
        environment = TaskEnvironment(environment.tasks, named_reward(config.reward, given))
    return with_tools(environment, config)


def _environment_of_kind(config: EnvironmentConfig, dataset: str) -> Environment:
    """`dataset`: the kind says what it names. Games and the like have their own tasks, replies and rewards."""
    size, seed = config.train_size + config.eval_size, config.seed
    made: Any
    match config.kind:
        case "reasoning_gym":
            made = reasoning_gym_environment(
                dataset,
                config.parameters,
                size=size,
                seed=seed,
                answer_marker=config.answer_marker,
                prompt_template=config.prompt_template,
                task_seconds=config.task_timeout_seconds,
            )
        case "code":
            made = code_environment(_read_tasks(dataset, config), config)
        case "jsonl":
            made = TaskEnvironment(_read_tasks(dataset, config), ExactScorer(config.answer_marker))
        case "math":
            made = TaskEnvironment(_read_tasks(dataset, config), _math_scorer(config))
        case "gymnasium":
            made = gymnasium_environment(
                dataset,
                config.parameters,
                size=size,
                seed=seed,
                action_marker=config.answer_marker,
                load_seconds=config.load_timeout_seconds,
            )
        case "verifiers":
            made = verifiers_environment(dataset, config.parameters)
        case "python":
            made = load_environment(dataset, config.load_timeout_seconds)
    return made


@unchanged_process()
def build_taskset(environment: Environment, config: EnvironmentConfig) -> Taskset:
    """The training tasks in their order, and the held-out ones, of `eval_split` if the recipe names one."""
    if config.dataset is None:
        return NoTasks()
    eval_tasks = None
    if config.eval_split is not None:
        read = _read_tasks(config.dataset, config, config.eval_split)
        eval_tasks = [replace(task, id=f"{config.eval_split}/{task.id}") for task in read]  # rows count from 1 in each
        if config.kind == "code":
            eval_tasks = list(code_environment(eval_tasks, config).tasks)
    tasks = environment.tasks
    if config.kind == "python" and not isinstance(tasks, list | tuple):
        tasks = ForeignTasks(tasks, config.dataset)
    return Taskset(tasks, eval_size=config.eval_size, seed=config.seed, eval_tasks=eval_tasks)


def _math_scorer(config: EnvironmentConfig) -> MathScorer:
    seconds = min(1.0, config.reward_timeout_seconds / 4)  # of a processor, which may be shared
    return MathScorer(config.answer_marker, config.answer_tolerance, seconds)


def _read_tasks(path: str, config: EnvironmentConfig, split: str | None = None) -> list[Task]:
    has_other_scorer = any((config.reward, config.reward_model, config.judge))
    return read_tasks(
        path,
        config.prompt_template,
        columns=config.columns,
        reference_marker=config.reference_marker,
        split=split or config.split,
        subset=config.subset,
        answer_problems=reference_problems if config.kind == "math" and not has_other_scorer else None,
    )


def build_environments(recipe: Recipe, given: Given = NOTHING_GIVEN) -> Environments:
    """All environments of the recipe. Raises UserError for what the user can correct, naming the environment."""
    built = {}
    for name, config in recipe.each_environment.items():
        with errors_named(name):
            built[name] = build_environment(config, given)
    return built


def build_tasks(recipe: Recipe, environments: Environments) -> Taskset:
    """The training tasks of all environments in their order, and the held-out ones."""
    tasksets = {}
    for name, config in recipe.each_environment.items():
        with errors_named(name):
            tasksets[name] = build_taskset(environments[name], config)
    if not recipe.environments:
        return tasksets[""]
    return MixedTaskset(tasksets, {name: config.weight for name, config in recipe.environments.items()})


def build_chats(
    recipe: Recipe, spec: ModelSpec | None, tokenizer: ChatTokenizer, environments: Environments
) -> ChatTokens:
    """The chat tokens, with each environment's tools, and with its system prompt if the recipe has none. Of several
    environments each has its own; given conversations have no tools. spec: None if the model is unknown
    (engine.backend: openai)."""
    ends = () if spec is None else spec.eos_token_ids
    build = partial(ChatTokens, tokenizer, ends=ends, context_length=recipe.model.context_length)
    chats = {}
    for name, environment in environments.items():
        with errors_named(name):
            chats[name] = build(**chat_options(recipe, environment))
            if isinstance(environment.tasks, list | tuple):
                try_prompts(chats[name], environment.tasks)
    return build(**chat_options(recipe), by_environment=chats) if recipe.environments else chats[""]


def chat_options(recipe: Recipe, environment: Environment | None = None) -> dict[str, Any]:
    """Arguments of `ChatTokens`. environment: whose tools, and whose system prompt if the recipe has none."""
    own, config = None if environment is None else getattr(environment, "system_prompt", None), recipe.rollout
    return {
        "system_prompt": own if config.system_prompt is None else config.system_prompt,
        "tools": () if environment is None else toolbox_of(environment).schemas(),
        "variables": config.chat_template_kwargs,
    }


def build_scorers(
    recipe: Recipe, environments: Environments, tokenizer: Tokenizer, given: Given = NOTHING_GIVEN
) -> Rewards | None:
    """The scorer, or whole dialogues if an environment has several turns. None: the workers score."""
    if any(is_dialogue(environment) for environment in environments.values()):

        def dialogue(one: Recipe, environment: Environment) -> Dialogue:
            refuse_for_turns(one)
            return _dialogue(one.environment, environment, tokenizer, given)

        dialogues = _for_each(recipe, environments, dialogue)
        return MixedDialogues(dialogues) if recipe.environments else dialogues[""]
    if recipe.model_scores:
        return None

    def scorer(one: Recipe, environment: Environment) -> OpenScorer:
        judge = one.environment.judge
        own = _rewards(environment.score, one.environment, given) if judge is None else Judge(judge)
        return _with_groups(own, one.environment, given)

    scorers = _for_each(recipe, environments, scorer)
    return MixedScorer(scorers) if recipe.environments else scorers[""]


def _for_each(
    recipe: Recipe, environments: Environments, build: Callable[[Recipe, Environment], _Part]
) -> dict[str, _Part]:
    """A part for each environment. If one is refused, those before it are closed."""
    parts: dict[str, _Part] = {}
    try:
        for name, one in alone(recipe).items():
            with errors_named(name):
                parts[name] = build(one, environments[name])
    except BaseException:
        for part in parts.values():
            part.close()
        raise
    return parts


def _dialogue(config: EnvironmentConfig, environment: Environment, tokenizer: Tokenizer, given: Given) -> Dialogue:
    """`environment.reward` and `environment.judge` replace the environment's own rewards."""
    replaces = config.reward is not None or config.judge is not None
    own: Scorer | None = getattr(environment, "score", None)
    function = own if config.reward is None else named_reward(config.reward, given)
    scorer: OpenScorer | None = None
    if config.judge is not None:
        scorer = Judge(config.judge)
    elif function is not None:
        scorer = _with_groups(_rewards(function, config, given), config, given)
    limits, family = ConversationLimits.from_config(config), tool_family(tokenizer)
    return Dialogue(environment, limits, family=family, scorer=scorer, only_scorer=replaces)


def _rewards(scorer: Scorer, config: EnvironmentConfig, given: Given) -> OpenScorer:
    """In processes of their own, unless only this process has the function."""
    gives_up = config.max_failure_share < 1.0  # a step whose rewards all fail ends the run
    if given and not can_run_elsewhere(scorer):
        seconds, at_once = config.reward_timeout_seconds, config.reward_workers or 1
        return FunctionRewards(scorer, timeout_seconds=seconds, at_once=at_once, gives_up=gives_up)
    return reward_processes(scorer, config, gives_up=gives_up)


def _with_groups(scorer: OpenScorer, config: EnvironmentConfig, given: Given) -> OpenScorer:
    """`scorer`, and the recipe's rewards of whole groups, if it has any."""
    try:
        parts = group_rewards(config, given)
    except BaseException:
        scorer.close()
        raise
    seconds = config.reward_timeout_seconds
    return WithGroupRewards(scorer, parts, timeout_seconds=seconds) if parts else scorer


def reward_processes(scorer: Scorer, config: EnvironmentConfig, *, gives_up: bool = True) -> RewardWorkers:
    """Processes that call `scorer`, with the limits of `config`."""
    return RewardWorkers(
        scorer,
        timeout_seconds=config.reward_timeout_seconds,
        processes=config.reward_workers,
        memory_mib=config.reward_memory_mib,
        load_seconds=config.load_timeout_seconds,
        gives_up=gives_up,
    )


def try_objective(recipe: Recipe) -> str | None:
    """Tries an objective of the user's own before a run is built: imports the loss, first in a separate process, checks
    its fields, and calls it on made-up tokens.

    Returns what `check` shows, or None for a shipped objective. Raises UserError for anything that is wrong.
    """
    config = recipe.algorithm
    if not isinstance(config, OwnObjectiveConfig):
        return None
    from octetrl.algorithms.own_objective import load_objective, try_loss  # which imports torch

    function = load_object("algorithm.name", config.name, recipe.environment.load_timeout_seconds)
    objective = load_objective(config)
    try_loss(objective, config)
    advantages = "group-relative" if objective.rule is None else "its own"
    return f"{place_of(function)}; {objective.fields!r}; advantages {advantages}"

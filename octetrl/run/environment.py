"""Builds the environments of a recipe, of any kind, and their tasks. No torch: `octetrl check` builds it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from octetrl.config.environment import EnvironmentConfig
from octetrl.config.schema import Recipe
from octetrl.config.several_environments import errors_named
from octetrl.data.tasks import read_tasks
from octetrl.environments.calls import unchanged_process
from octetrl.environments.code_scorer import code_environment
from octetrl.environments.dialogue import is_dialogue
from octetrl.environments.math_answers import MathScorer, reference_problems
from octetrl.environments.mixed import MixedTaskset
from octetrl.environments.python_object import (
    ForeignTasks,
    Given,
    check_environment,
    load_environment,
    named_reward,
)
from octetrl.environments.reasoning_gym import reasoning_gym_environment
from octetrl.environments.reset_step import gymnasium_environment
from octetrl.environments.reward_workers import RewardWorkers
from octetrl.environments.rewards import ExactScorer
from octetrl.environments.scoring import Scorer
from octetrl.environments.tasks import Environment, NoTasks, TaskEnvironment, Taskset
from octetrl.environments.tools.ready import with_tools
from octetrl.environments.verifiers_adapter import verifiers_environment
from octetrl.records import Task

NOTHING_GIVEN: Given = MappingProxyType({})
Environments = Mapping[str, Environment]  # by name; a single one has the empty name


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

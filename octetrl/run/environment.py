"""Builds the environments of a recipe, and what a run needs of them: tasks, chat tokens and scorers. No torch.

Of several environments, each is built from the recipe that has only this one (config/several_environments.py). The
parts are then joined (environments/mixed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from octetrl.boxes.boxes import Boxes, try_box
from octetrl.config.algorithm import OwnObjectiveConfig
from octetrl.config.environment import EnvironmentConfig, EvalSetConfig
from octetrl.config.rules_environment import own_sampling_problem, refuse_for_turns
from octetrl.config.schema import Recipe
from octetrl.config.several_environments import alone, errors_named, renamed
from octetrl.data.tasks import SAMPLING, read_tasks
from octetrl.data.tokenizer import Tokenizer
from octetrl.environments.calls import unchanged_process
from octetrl.environments.code_scorer import code_environment
from octetrl.environments.curriculum import CurriculumTaskset, order_by
from octetrl.environments.dialogue import (
    ConversationLimits,
    Dialogue,
    Dialogues,
    has_agent,
    is_dialogue,
    toolbox_of,
)
from octetrl.environments.harbor import HarborEnvironment, harbor_environment
from octetrl.environments.judge import Judge
from octetrl.environments.math_answers import MathScorer, reference_problems
from octetrl.environments.mixed import MixedDialogues, MixedScorer, MixedTaskset
from octetrl.environments.named_rewards import RewardsInRun
from octetrl.environments.openenv import openenv_environment
from octetrl.environments.programs import CommandEnvironment
from octetrl.environments.python_object import (
    ForeignTasks,
    Given,
    can_run_elsewhere,
    check_environment,
    load_environment,
    load_object,
    named_reward,
    rewards_in_run,
)
from octetrl.environments.reasoning_gym import reasoning_gym_environment
from octetrl.environments.reset_step import gymnasium_environment
from octetrl.environments.reward_workers import FunctionRewards, RewardWorkers
from octetrl.environments.rewards import ExactScorer, missing_answers
from octetrl.environments.scoring import OpenScorer, Scorer, place_of
from octetrl.environments.tasks import Environment, EvalSet, NoTasks, TaskEnvironment, Taskset, own_eval_sets
from octetrl.environments.tools.formats.reading import ToolFormat
from octetrl.environments.tools.ready import with_tools
from octetrl.environments.verifiers_v1 import verifiers_environment
from octetrl.records import Task
from octetrl.rollout.call_text import find_format
from octetrl.rollout.chat_tokens import ChatTokenizer, ChatTokens, template_names, try_prompts, unread
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError

MOST_COMMANDS = 64  # of `environment.agent` at once, unless the recipe says otherwise
NOTHING_GIVEN: Given = MappingProxyType({})
Environments = Mapping[str, Environment]  # by name; a single one has the empty name
Rewards = OpenScorer | Dialogues
_Part = TypeVar("_Part", bound=OpenScorer | Dialogue)


@unchanged_process()
def build_environment(
    config: EnvironmentConfig, given: Given = NOTHING_GIVEN, *, loads_reward: bool = True
) -> Environment:
    """Tasks and scorer of the recipe; `environment.reward` replaces the kind's own scorer.

    given: what the recipe names as `given:NAME` (environments/python_object.py). loads_reward: False keeps the kind's
    own scorer, for those who only want the tasks.
    """
    if config.dataset is None:
        return TaskEnvironment([], ExactScorer())  # validated: neither rollouts nor evaluation
    if config.kind == "python" and config.dataset in given:
        environment: Environment = given[config.dataset]
        check_environment(environment, config.dataset)
    else:
        environment = _environment_of_kind(config, config.dataset)
    if loads_reward and config.reward is not None and not is_dialogue(environment):
        held_out = getattr(environment, "eval_tasks", None)
        environment = TaskEnvironment(environment.tasks, named_reward(config.reward, given), held_out)
    if config.agent is not None and config.kind != "harbor":
        if is_dialogue(environment):
            raise UserError("environment.agent: this environment takes its turns itself; leave the agent out")
        held_out = getattr(environment, "eval_tasks", None)
        environment = CommandEnvironment(environment.tasks, environment.score, config.agent, held_out)
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
        case "harbor":
            made = harbor_environment(dataset, config)
        case "openenv":
            made = openenv_environment(
                dataset, config.parameters, size=size, seed=seed, action_marker=config.answer_marker
            )
        case "verifiers":
            made = verifiers_environment(dataset, config.parameters, size=size, max_turns=config.turns.max_turns)
        case "python":
            made = load_environment(dataset, config.load_timeout_seconds)
    return made


@unchanged_process()
def build_taskset(environment: Environment, config: EnvironmentConfig, right_from: float = 1.0) -> Taskset:
    """The training tasks in their order, and the held-out ones, of `eval_dataset` or `eval_split` if the recipe names
    one. right_from: of the recipe's `evaluation`, for pass rates."""
    if config.dataset is None:
        return NoTasks()
    tasks = environment.tasks
    if config.kind == "python" and not isinstance(tasks, list | tuple):
        tasks = ForeignTasks(tasks, config.dataset)
    own = {name: EvalSet(list(one)) for name, one in own_eval_sets(environment).items()}
    curriculum = config.curriculum
    build: Callable[..., Taskset] = Taskset
    if curriculum is not None and curriculum.pass_rate is not None:
        build = partial(CurriculumTaskset, settings=curriculum, right_from=right_from)
    column = None if curriculum is None else curriculum.order_by
    return build(
        tasks,
        eval_size=config.eval_size,
        seed=config.seed,
        eval_sets=_eval_sets(config) or own,
        order=None if column is None else order_by(tasks, column),
    )


def _eval_sets(config: EnvironmentConfig) -> dict[str, EvalSet]:
    """The held-out tasks with sources of their own. Rows count from 1 in each, so their ids begin with its name."""

    def read(prefix: str, one: EvalSetConfig) -> list[Task]:
        own = {name: value for name in ("columns", "reference_marker") if (value := getattr(one, name)) is not None}
        own.setdefault("columns", {ours: name for ours, name in config.columns.items() if ours not in SAMPLING})
        own |= {"split": one.split, "subset": one.subset}
        tasks = [
            replace(task, id=f"{prefix}/{task.id}") for task in _read_tasks(one.dataset, config.model_copy(update=own))
        ]
        return list(code_environment(tasks, config).tasks) if config.kind == "code" else tasks

    if config.eval_split is not None and config.eval_dataset is None:
        split = EvalSetConfig(dataset=str(config.dataset), split=config.eval_split, subset=config.subset)
        return {"": EvalSet(read(config.eval_split, split), config.eval_size)}
    return {
        name: EvalSet(read(name or "eval", one), one.size, f"environment.eval_dataset.{name}.size")
        for name, one in config.eval_sets.items()
    }


def _math_scorer(config: EnvironmentConfig) -> MathScorer:
    seconds = min(1.0, config.reward_timeout_seconds / 4)  # of a processor, which may be shared
    return MathScorer(config.answer_marker, config.answer_tolerance, seconds)


def _read_tasks(path: str, config: EnvironmentConfig) -> list[Task]:
    """Rows without an answer are refused where nothing else gives a reward, unless every rollout may fail."""
    has_other_scorer = any((config.reward, config.reward_model, config.judge))
    problems = reference_problems if config.kind == "math" else None
    if config.kind == "jsonl" and config.max_failure_share < 1:
        problems = missing_answers
    return read_tasks(
        path,
        config.prompt_template,
        columns=config.columns,
        reference_marker=config.reference_marker,
        split=config.split,
        subset=config.subset,
        answer_problems=None if has_other_scorer else problems,
    )


def build_environments(recipe: Recipe, given: Given = NOTHING_GIVEN) -> Environments:
    """All environments of the recipe. Raises UserError for what the user can correct, naming the environment."""
    built = {}
    for name, config in recipe.each_environment.items():
        with errors_named(name):
            built[name] = build_environment(config, given)
            try_its_box(config, built[name])
    return built


def try_its_box(config: EnvironmentConfig, environment: Environment) -> None:
    """Start a box for the first task, if the recipe has boxes. Raises UserError if that is not possible."""
    if config.box is not None and config.kind != "harbor":  # whose tasks have images of their own
        first = next(iter(environment.tasks), None)
        try_box(config.box, first, calls_policy=config.agent is not None)


def build_tasks(recipe: Recipe, environments: Environments) -> Taskset:
    """The training tasks of all environments in their order, and the held-out ones."""
    tasksets = {}
    for name, config in recipe.each_environment.items():
        with errors_named(name):
            refuse_own_sampling(recipe, environments[name].tasks)
            tasksets[name] = build_taskset(environments[name], config, recipe.evaluation.right_from)
    if not recipe.environments:
        return tasksets[""]
    several = recipe.environments
    return MixedTaskset(
        tasksets,
        {name: config.weight for name, config in several.items()},
        temperatures={name: config.temperature for name, config in several.items()},
        group_sizes={name: config.group_size for name, config in several.items()},
    )


def refuse_own_sampling(recipe: Recipe, tasks: Sequence[Task]) -> None:
    """Refuses a temperature or group size of a task's own that the recipe cannot have. Raises UserError."""
    own: dict[tuple[float | None, int | None], Task] = {}
    for task in tasks if isinstance(tasks, list | tuple) else ():
        own.setdefault((task.temperature, task.group_size), task)
    for (temperature, size), task in own.items():
        if problem := own_sampling_problem(recipe, temperature, size):
            raise UserError(f"environment: the temperature or group_size of task '{task.id}': {problem}")


def build_chats(
    recipe: Recipe, spec: ModelSpec | None, tokenizer: ChatTokenizer, environments: Environments
) -> ChatTokens:
    """The chat tokens, with each environment's tools, and with its system prompt if the recipe has none. Of several
    environments each has its own; given conversations have no tools. spec: None if the model is unknown
    (engine.backend: openai)."""
    if recipe.rollout.history == "template" and tokenizer.chat_template is None:
        raise UserError("rollout.history: template renders messages, and the tokenizer has no chat template; leave it")
    ends = () if spec is None else spec.eos_token_ids
    build = partial(ChatTokens, tokenizer, ends=ends, context_length=recipe.model.context_length)
    chats = {}
    for name, environment in environments.items():
        with errors_named(name):
            has_tools = bool(toolbox_of(environment).tools)
            tool_format = find_format(tokenizer, *_calls_of(recipe)) if has_tools else None
            chats[name] = build(**chat_options(recipe, environment), tool_format=tool_format)
            if isinstance(environment.tasks, list | tuple):
                try_prompts(chats[name], environment.tasks)
    return build(**chat_options(recipe), by_environment=chats) if recipe.environments else chats[""]


def unread_by_template(recipe: Recipe, tokenizer: Tokenizer, environments: Environments) -> Iterator[str]:
    """What the recipe gives to a chat template that does not read it: `check` refuses it, and a run warns."""
    names = template_names(tokenizer)
    if lost := unread(names, recipe.rollout.chat_template_kwargs):
        yield f"rollout.{lost}"
    for name, environment in environments.items():
        if lost := unread(names, (), toolbox_of(environment).schemas()):
            yield renamed(f"environment.{lost}", name) if name else f"environment.{lost}"


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
            refuse_for_turns(one, has_agent=has_agent(environment))
            return _dialogue(one, environment, find_format(tokenizer, *_calls_of(recipe)), given)

        dialogues = _for_each(recipe, environments, dialogue)
        return MixedDialogues(dialogues) if recipe.environments else dialogues[""]
    if recipe.model_scores:
        return None

    def scorer(one: Recipe, environment: Environment) -> OpenScorer:
        judge, reward = one.environment.judge, one.environment.reward
        function = environment.score if reward is None else named_reward(reward, given)
        own = _rewards(function, one.environment, given) if judge is None else Judge(judge)
        return _with_rewards_in_run(own, one.environment, given)

    scorers = _for_each(recipe, environments, scorer)
    return MixedScorer(scorers) if recipe.environments else scorers[""]


def build_rewards(
    recipe: Recipe,
    spec: ModelSpec | None,
    environments: Environments,
    tokenizer: Tokenizer,
    given: Given = NOTHING_GIVEN,
) -> tuple[Rewards | None, Rewards | None]:
    """What scores training's answers, None: the workers, and what scores those of evaluations, None: the same. spec:
    None if the model is unknown."""
    training, evaluation = rewarded_in(recipe, "training"), rewarded_in(recipe, "evaluation")
    build = partial(_with_agents, recipe, spec, tokenizer, environments)
    own = build(build_scorers(training, environments, tokenizer, given))
    if training is evaluation:
        return own, None
    try:
        return own, build(build_scorers(evaluation, environments, tokenizer, given))
    except BaseException:
        if own is not None:
            own.close()
        raise


def _with_agents(
    recipe: Recipe,
    spec: ModelSpec | None,
    tokenizer: Tokenizer,
    environments: Environments,
    rewards: Rewards | None,
) -> Rewards | None:
    """Starts the server that agents call, if an environment has one. Raises UserError without its packages."""
    if not isinstance(rewards, Dialogues) or not any(map(has_agent, environments.values())):
        return rewards
    try:
        from octetrl.agents.server import AgentServer
    except ImportError as error:
        rewards.close()
        raise UserError(f"environment: agents need the package {error.name}; pip install 'octetrl[serve]'") from error
    server = AgentServer(
        tokenizer,
        vocab_size=len(tokenizer) if spec is None else spec.vocab_size,
        context_length=recipe.model.context_length,
        variables=recipe.rollout.chat_template_kwargs,
        tool_format=recipe.rollout.tool_format,
        ends=() if spec is None else spec.eos_token_ids,
        wake=rewards.calls.wake,
    )
    rewards.capture, rewards.closes = server.policy, server.close
    return rewards


def rewarded_in(recipe: Recipe, purpose: Literal["training", "evaluation"]) -> Recipe:
    """The recipe with the rewards that are called in training, or in evaluations; itself if these are all."""
    one = recipe.environment.rewarded_in(purpose)
    several = {name: config.rewarded_in(purpose) for name, config in recipe.environments.items()}
    if one is recipe.environment and all(several[name] is config for name, config in recipe.environments.items()):
        return recipe
    return recipe.model_copy(update={"environment": one, "environments": several})


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


def _calls_of(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """How the recipe's model writes tool calls, and the variables of its template."""
    return recipe.rollout.tool_format, recipe.rollout.chat_template_kwargs


def _dialogue(recipe: Recipe, environment: Environment, tool_format: ToolFormat | None, given: Given) -> Dialogue:
    """`environment.reward` and `environment.judge` replace the environment's own rewards."""
    config = recipe.environment
    replaces = config.reward is not None or config.judge is not None
    own: Scorer | None = getattr(environment, "score", None)
    function = own if config.reward is None else named_reward(config.reward, given)
    scorer: OpenScorer | None = None
    if config.judge is not None:
        scorer = Judge(config.judge)
    elif function is not None:
        scorer = _with_rewards_in_run(_rewards(function, config, given), config, given)
    limits = ConversationLimits.from_config(config)
    if (config.agent or config.box) is not None and limits.max_in_flight is None:
        limits = replace(limits, max_in_flight=MOST_COMMANDS)
    if isinstance(environment, HarborEnvironment):
        limits = environment.limits(limits)
    boxes = Boxes(config.box)
    return Dialogue(environment, limits, tool_format=tool_format, scorer=scorer, only_scorer=replaces, boxes=boxes)


def _rewards(scorer: Scorer, config: EnvironmentConfig, given: Given) -> OpenScorer:
    """In processes of their own, unless only this process has the function."""
    gives_up = config.max_failure_share < 1.0  # a step whose rewards all fail ends the run
    if given and not can_run_elsewhere(scorer):
        seconds, at_once = config.reward_timeout_seconds, config.reward_workers or 1
        return FunctionRewards(scorer, timeout_seconds=seconds, at_once=at_once, gives_up=gives_up)
    return reward_processes(scorer, config, gives_up=gives_up)


def _with_rewards_in_run(scorer: OpenScorer, config: EnvironmentConfig, given: Given) -> OpenScorer:
    """`scorer`, and the recipe's rewards of whole groups and with limits, if it has any."""
    try:
        of_groups, limited = rewards_in_run(config, given)
    except BaseException:
        scorer.close()
        raise
    seconds = config.reward_timeout_seconds
    is_needed = of_groups or limited
    return RewardsInRun(scorer, of_groups, limited=limited, timeout_seconds=seconds) if is_needed else scorer


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

"""Rules of a recipe's `environment`, of several environments, and of one with several turns."""

from __future__ import annotations

from octetrl.config.backends import VLLM_TEMPERATURES
from octetrl.config.environment import EnvironmentConfig, reward_names
from octetrl.config.rules import Rule, problems_of, together
from octetrl.config.rules_training import FILE_NAMES, GROUPS, OBJECT, samples_rollouts
from octetrl.config.schema import Recipe
from octetrl.system.errors import UserError, nearest

FILES = ("math", "jsonl", "code")
READY_TOOLS = ("calculator", "python", "search")
MARGIN_SECONDS = 4.0
"""Time for starting and ending sandboxes, in addition to the code's own limit."""
MARGIN_MIB = 1024
"""Memory for the tests' own sandbox and the reward's worker, in addition to the code's own limit."""
_DATASETS = {
    "reasoning_gym": "the name of a reasoning_gym dataset, such as chain_sum",
    "code": 'the path of a JSONL file of {"prompt": ..., "tests": [...]}',
    "python": "your own environment as 'module:name'",
    "verifiers": "the name of an installed verifiers taskset",
    "harbor": "a folder of tasks, each with a task.toml",
    "openenv": "the address of a server, such as ws://localhost:8000",
    "gymnasium": "the id of a Gymnasium environment, or 'module:name' of a function or class that creates one",
}
_FILE_OF_TASKS = 'the path of a JSONL file of {"prompt": ..., "answer": ...}'


def _has_splits(recipe: Recipe, *, held_out: bool = False) -> bool:
    """Whether the tasks come from a Hugging Face data set: of the hub, or a folder of one."""
    environment = recipe.environment
    dataset = environment.eval_dataset if held_out and environment.eval_dataset is not None else environment.dataset
    return environment.kind in FILES and isinstance(dataset, str) and not dataset.endswith(FILE_NAMES)


def _unknown_tool(recipe: Recipe) -> str | None:
    return next(
        (tool for tool in recipe.environment.tools if tool not in READY_TOOLS and not OBJECT.fullmatch(tool)), None
    )


def _no_tool(recipe: Recipe) -> str:
    name = str(_unknown_tool(recipe))
    known = ", ".join(READY_TOOLS)
    return f"there is no tool '{name}'{nearest(name, READY_TOOLS)}; give {known} or module:name"


def _no_function(recipe: Recipe) -> str | None:
    """The first name of a reward that is none."""
    return next((name for name in reward_names(recipe.environment.reward) if not OBJECT.fullmatch(name)), None)


def _in_sets(recipe: Recipe) -> str | None:
    """What is wrong with one of the evaluation sets."""
    whole = recipe.evaluation
    for name, one in recipe.environment.eval_sets.items():
        if name in ("environments", "component"):
            return f"'{name}' begins the names of other metrics; give the set another name"
        samples, temperature = one.samples or whole.samples, one.temperature
        if (k := max(one.k or (1,))) > samples:
            return f"{name}: k {k} cannot be estimated from {samples} completions a task; raise its samples"
        if name and samples > 1 and (whole.temperature if temperature is None else temperature) == 0:
            return f"{name}: {samples} greedy completions would be equal; give it a temperature, or samples: 1"
        if (most := recipe.model.context_length - recipe.rollout.max_prompt_tokens) < (one.max_new_tokens or 0):
            return f"{name}: max_new_tokens {one.max_new_tokens} and a prompt exceed the context; give at most {most}"
        if name and (one.split != "train" or one.subset) and one.dataset.endswith(FILE_NAMES):
            return f"{name}: only a Hugging Face data set has splits and subsets; leave them out"
    return None


def _set_of_two(recipe: Recipe) -> str | None:
    """The name of an evaluation set that another environment or its set has too."""
    names = list(recipe.environments)
    names += [name for one in recipe.environments.values() for name in one.eval_sets if name]
    return next((name for place, name in enumerate(names) if name in names[:place]), None)


def own_sampling_problem(recipe: Recipe, temperature: float | None, group_size: int | None) -> str | None:
    """Why an environment of several, or a task, cannot have this temperature or group size of its own in training."""
    low, high = VLLM_TEMPERATURES
    if not samples_rollouts(recipe):
        return None
    if temperature is not None:
        if recipe.algorithm.name == "distill":
            return "distill compares whole distributions, at one temperature; set rollout.temperature"
        if recipe.engine.backend == "vllm" and not low <= temperature <= high:
            return f"engine.backend: vllm samples at temperatures from {low:g} to {high:g}"
    if group_size in (None, recipe.rollout.group_size):
        return None
    if recipe.rollout.learn_beside_tail:
        return "rollout.learn_beside_tail divides by one group_size; leave out the others"
    own = recipe.model_copy(
        update={"environments": {}, "rollout": recipe.rollout.model_copy(update={"group_size": group_size})}
    )
    return next((problem.text.removeprefix("rollout.group_size: ") for problem in problems_of(GROUPS, own)), None)


def _own_sampling(recipe: Recipe) -> tuple[str, str] | None:
    """The first environment of several that cannot have its own temperature or group size, and why."""
    for name, one in recipe.environments.items():
        problem = own_sampling_problem(recipe, one.temperature, one.group_size)
        if problem is not None:
            return name, problem
    return None


def _without_reward(recipe: Recipe) -> str | None:
    """Where no function has a part in the reward: in training, or in evaluations."""
    reward = recipe.environment.reward
    if isinstance(reward, str) or not reward:
        return None
    kinds = {one.only for one in reward.values()}
    return "training" if kinds == {"evaluation"} else "evaluation" if None not in kinds else None


DATASET = (  # where a run draws tasks
    Rule(
        "environment.dataset=null ?environment.kind",
        lambda r: f"missing; kind {r.environment.kind} needs {_DATASETS.get(r.environment.kind, _FILE_OF_TASKS)}",
    ),
)
ENVIRONMENT = (
    *together(
        "environment.parameters environment.kind=math|jsonl|code|python",
        "environment.answer_tolerance environment.kind!=math",
        *(
            f"environment.{name} environment.kind!=math|jsonl|code"
            for name in ("columns", "reference_marker", "eval_dataset")
        ),
        "environment.tools environment.kind!=math|jsonl|code|reasoning_gym",
        *(f"environment.judge environment.{name}" for name in ("reward", "reward_model")),
        "environment.reward_model environment.reward",
        "environment.box.cpus environment.box.kind=bubblewrap",
        "environment.box.network=bridge environment.box.kind=bubblewrap",
    ),
    Rule(
        "environment.box.image=null environment.box.kind!=bubblewrap environment.kind!=harbor",
        "missing; boxes of {r.environment.box.kind} need the name of an image, which may have columns of the task, as"
        " in swe:{{id}}",
    ),
    Rule(
        "environment.box environment.agent=null environment.kind!=python|harbor ?environment.tools",
        "nothing would run in it; give environment.agent a command, or write an agent in Python (kind python)",
        lambda r: not any(":" in tool for tool in r.environment.tools),
    ),
    *(
        Rule(
            f"environment.{name} ?environment.dataset ?environment.kind",
            "only a Hugging Face data set has splits and subsets (owner/name, or a folder); remove it",
            lambda r: not _has_splits(r),
        )
        for name in ("split", "subset")
    ),
    Rule(
        "environment.eval_split ?environment.dataset ?environment.kind ?environment.eval_dataset",
        "only a Hugging Face data set has splits (owner/name, or a folder), and named evaluation sets each have their"
        " own; remove it",
        lambda r: not _has_splits(r, held_out=True),
    ),
    Rule(
        "environment.curriculum ?algorithm.name",
        "{r.algorithm.name} learns from given data and draws no tasks to order; remove it",
        lambda r: r.algorithm.learns_from != "rollouts",
    ),
    Rule(
        "environment.curriculum",
        "it changes nothing yet; give order_by, a column, or pass_rate, a window such as [0.1, 0.9]",
        value_is=lambda given: given.order_by is None and given.pass_rate is None,
    ),
    Rule(
        "environment.curriculum.pass_rate",
        "{} is no window; give the lower end first, such as [0.1, 0.9]",
        value_is=lambda window: window[0] >= window[1],
    ),
    *(
        Rule(
            f"environment.curriculum.{name} environment.curriculum.pass_rate=null",
            "without a window of pass rates no task rests; give pass_rate, such as [0.1, 0.9]",
        )
        for name in ("retry_hard", "retry_easy", "unseen")
    ),
    Rule("environment.eval_dataset", "it is empty; name a set, or leave it out", value_is=lambda sets: not sets),
    Rule(
        "environment.eval_dataset ?evaluation.samples ?evaluation.temperature ?model.context_length",
        lambda r: str(_in_sets(r)),
        lambda r: _in_sets(r) is not None,
    ),
    Rule(
        "environment.eval_split ?environment.split",
        "'{}' is also the split of the training tasks, so none would be left; give another split, or leave it out",
        lambda r: r.environment.eval_split == r.environment.split and r.environment.eval_dataset is None,
    ),
    Rule(
        "environment.reward",
        lambda r: f"'{_no_function(r)}' is not module:name, such as my_rewards:length",
        lambda r: _no_function(r) is not None,
    ),
    Rule(
        "environment.reward",
        lambda r: f"none of them has a part in the reward of {_without_reward(r)}; give one whose `only` is left out",
        lambda r: _without_reward(r) is not None,
    ),
    Rule(
        "environment.reward",
        "a function with only: evaluation has no part in a sum; leave out its weight",
        value_is=lambda reward: (
            not isinstance(reward, str)
            and any(one.only == "evaluation" and one.weight != 1.0 for one in reward.values())
        ),
    ),
    Rule("environment.reward", "it is empty; name a function, or leave it out", value_is=lambda reward: not reward),
    Rule("environment.tools", _no_tool, lambda r: _unknown_tool(r) is not None),
    Rule(
        "environment.corpus=null environment.tools",
        "the tool search needs a corpus; give a file or folder",
        lambda r: "search" in r.environment.tools,
    ),
    Rule(
        "environment.corpus ?environment.tools",
        "only the tool search reads it; add search to environment.tools",
        lambda r: "search" not in r.environment.tools,
    ),
    Rule(
        "environment.prompt_template",
        "it has no {{prompt}}, so all prompts would be the same; add {{prompt}} to it",
        value_is=lambda template: "{prompt}" not in template,
    ),
    *(
        Rule(
            f"environment.{name}",
            "an empty text marks nothing; give a text, or null for the whole",
            value_is=lambda marker: marker == "",
        )
        for name in ("answer_marker", "reference_marker")
    ),
    Rule(
        "?environment.reward_timeout_seconds environment.kind=code ?environment.sandbox.wall_seconds",
        "{} would kill a sandbox before its wall_seconds {r.environment.sandbox.wall_seconds:g}; raise it to"
        f" {MARGIN_SECONDS:g} more than that, or lower sandbox.wall_seconds",
        lambda r: r.environment.reward_timeout_seconds < r.environment.sandbox.wall_seconds + MARGIN_SECONDS,
    ),
    Rule(
        "?environment.reward_memory_mib environment.kind=code ?environment.sandbox.memory_mib",
        "{} would kill a sandbox before its memory_mib {r.environment.sandbox.memory_mib}; raise it to"
        f" {MARGIN_MIB} more than that, or lower sandbox.memory_mib",
        lambda r: r.environment.reward_memory_mib < r.environment.sandbox.memory_mib + MARGIN_MIB,
    ),
)
MIXTURE = (
    Rule(
        "?environment environments",
        "it and environments exclude each other; keep one of the two sections, and write a field of one environment as"
        " environments.NAME.FIELD",
        lambda r: r.environment != EnvironmentConfig(),
    ),
    Rule(
        "environments ?algorithm.name ?engine.backend ?rollout.learn_beside_tail",
        lambda r: ": ".join(_own_sampling(r) or ()),
        lambda r: _own_sampling(r) is not None,
    ),
    Rule(
        "environments",
        lambda r: f"two evaluation sets or environments have the name '{_set_of_two(r)}'; rename one",
        lambda r: _set_of_two(r) is not None,
    ),
)
ONE_OF_SEVERAL = (
    Rule(
        "environment.reward_model",
        "a reward model runs in the trainer's process, and several environments score in reward processes; use a reward"
        " or a judge, or a recipe with this environment alone",
    ),
)
SEVERAL_TURNS = (
    Rule(
        "environment.reward_model",
        "it scores one answer to one prompt, but this environment has several turns; set it to null, or use"
        " environment.reward",
    ),
    Rule(
        "engine.openai.answers=text engine.backend=openai",
        "text has no token ids, and the turns of this environment are joined token by token; use a server that gives"
        " them (answers: tokens), or an environment with one turn",
    ),
    Rule(
        "rollout.learn_beside_tail",
        "it needs answers of one turn, but this environment has several; set it to false",
    ),
    Rule(
        "engine.kv_cache_tokens ?model.context_length",
        "{} cannot hold a conversation of model.context_length {r.model.context_length} tokens; raise it to as many, or"
        " lower model.context_length",
        lambda r: (r.engine.kv_cache_tokens or 0) < r.model.context_length,
    ),
)
AGENT = (
    Rule(
        "algorithm.kl_in=reward_before_baseline",
        "it compares siblings of one sample each, and calls of this environment's agent may be several samples; use"
        " reward or loss",
    ),
)


def refuse_for_turns(recipe: Recipe, *, has_agent: bool) -> None:
    """Refuse settings that an environment with several turns does not support. Raises UserError.

    Call it after loading the environment, because only then it is known to have several turns, or an agent."""
    for problem in problems_of((*SEVERAL_TURNS, *(AGENT if has_agent else ())), recipe):
        raise UserError(problem.text)

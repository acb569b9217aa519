"""Rules of a recipe's `environment`, of several environments, and of one with several turns."""

from __future__ import annotations

from octetrl.config.environment import EnvironmentConfig, reward_names
from octetrl.config.rules import Rule, problems_of, together
from octetrl.config.rules_training import OBJECT
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
    "verifiers": "the name of an installed verifiers environment",
    "gymnasium": "the id of a Gymnasium environment, or 'module:name' of a function or class that creates one",
}
_FILE_OF_TASKS = 'the path of a JSONL file of {"prompt": ..., "answer": ...}'


def _has_splits(recipe: Recipe) -> bool:
    """Whether the tasks come from a Hugging Face data set: of the hub, or a folder of one."""
    dataset = recipe.environment.dataset
    return (
        recipe.environment.kind in FILES
        and dataset is not None
        and not dataset.endswith((".jsonl", ".json", ".parquet"))
    )


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
        *(f"environment.{name} environment.kind!=math|jsonl|code" for name in ("columns", "reference_marker")),
        "environment.tools environment.kind!=math|jsonl|code|reasoning_gym",
        *(f"environment.judge environment.{name}" for name in ("reward", "reward_model")),
        "environment.reward_model environment.reward",
    ),
    *(
        Rule(
            f"environment.{name} ?environment.dataset ?environment.kind",
            "only a Hugging Face data set has splits and subsets (owner/name, or a folder); remove it",
            lambda r: not _has_splits(r),
        )
        for name in ("split", "subset", "eval_split")
    ),
    Rule(
        "environment.eval_split ?environment.split",
        "'{}' is also the split of the training tasks, so none would be left; give another split, or leave it out",
        lambda r: r.environment.eval_split == r.environment.split,
    ),
    Rule(
        "environment.reward",
        lambda r: f"'{_no_function(r)}' is not module:name, such as my_rewards:length",
        lambda r: _no_function(r) is not None,
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


def refuse_for_turns(recipe: Recipe) -> None:
    """Refuse settings that an environment with several turns does not support. Raises UserError.

    Call it after loading the environment, because only then it is known to have several turns."""
    for problem in problems_of(SEVERAL_TURNS, recipe):
        raise UserError(problem.text)

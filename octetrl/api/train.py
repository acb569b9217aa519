"""`octetrl.train`: a run from Python, by a recipe or by a few arguments.

Everything becomes a recipe, so that the run's folder, its checks and its results are those of `octetrl train`. What no
recipe can hold (a notebook's function, a list of tasks, an environment) is named there as `given:NAME`, and the object
is passed beside the recipe (environments/python_object.py).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from octetrl.api.python_words import python_words
from octetrl.config.environment import EnvironmentConfig, reward_names
from octetrl.config.load import load_recipe, recipe_from_mapping, recipe_tree
from octetrl.config.rules_environment import FILES
from octetrl.config.schema import Precision, Recipe
from octetrl.config.several_environments import alone, errors_named
from octetrl.data.rows import Row
from octetrl.data.tasks import make_tasks
from octetrl.environments.named_rewards import check_call_in_run
from octetrl.environments.prompts import read_prompt, read_tools, read_variables, with_prompt_template
from octetrl.environments.python_object import (
    MODULE,
    can_run_elsewhere,
    given_name,
    importable_name,
    is_given,
    search_beside,
)
from octetrl.environments.rewards import ExactScorer
from octetrl.environments.tasks import HasTasks, TaskEnvironment
from octetrl.environments.trl_rewards import TrlReward, has_trl_form
from octetrl.records import Task
from octetrl.run.folder.layout import RECIPE_FILE
from octetrl.run.recipe_files import Resume, refuse_early, will_resume
from octetrl.run.store import fetch_recipe
from octetrl.system.errors import UserError, type_of
from octetrl.system.names import is_url
from octetrl.telemetry.ending import given_callbacks, module_folders

if TYPE_CHECKING:
    from octetrl.api.fields import ChangedFields, ModelFields, OtherFields
    from octetrl.api.finished_run import FinishedRun
    from octetrl.run.callbacks import Callback

Reward = Callable[[Task, str], float] | TrlReward
Rewards = Sequence[Reward | str] | Mapping[str, Reward | str | Mapping[str, Any]]  # several
Rows = Iterable[Task | Mapping[str, Any]]
Tasks = str | Path | Rows | HasTasks
EvalTasks = str | Path | Rows | Mapping[str, Rows]
_TASKS = f"{MODULE}:tasks"
_OF_ANOTHER_DATASET: dict[str, Any] = {"parameters": {}, "columns": {}, "reference_marker": None}


@python_words()
def train(
    recipe: str | Path | None = None,
    *,
    model: str | Path | ModelFields | None = None,
    tasks: Tasks | None = None,
    eval_tasks: EvalTasks | None = None,
    reward: Reward | str | Rewards | None = None,
    precision: Precision | None = None,
    steps: int | None = None,
    output_dir: str | Path | None = None,
    resume: Resume = False,
    allow: Collection[str] = (),
    callbacks: Sequence[Callback | str] | Callback | str | None = None,
    **sections: Unpack[OtherFields],
) -> FinishedRun:
    """Train, and return the run when it has reached its last step.

    recipe: a YAML file, or the name of a shipped recipe (`octetrl recipes` lists them); None: the defaults of a recipe.
    Every other argument replaces what the recipe says.

    model: a Hugging Face folder, or the fields of the recipe's section `model`.
    tasks: a JSONL file of {"prompt", "answer"}; a list of `Task` or of such dictionaries; or an environment, an object
        with `tasks` and `score(task, text)`. Without a reward, an answer is right when it equals the task's.
    eval_tasks: the held-out tasks, in the form of `tasks`: a file beside a file, a list beside a list. Or several sets
        by name, {"easy": [...], "hard": [...]}, each with metrics of its own (`eval/easy/accuracy`). None:
        `environment.eval_size` of `tasks`.
    reward: a function of (task, completion text) that returns a number, one of TRL's form
        `(prompts, completions, **columns)` that returns a list, or "module:name"; also async. Several as a list, or by
        name: {"accuracy": right, "polite": {"function": polite, "weight": 0.2}, "best": {"function": best, "of":
        "group"}}, of which the reward is the weighted sum. A function at the top level of a module runs in a process
        that can be ended. A notebook's own function, a lambda or a closure runs in a thread of this process: a call
        that hangs gets the status `reward_timeout`, but can't be ended.
    precision: "bf16", "fp8_rollout", "fp8", "fp8_full" or "mxfp8".
    steps: updates of the policy.
    output_dir: the run's folder. None: the recipe's, or without a recipe the first free one of runs/MODEL,
        runs/MODEL-2, ...
    resume: continue the run in `output_dir` from its last checkpoint. "auto": start where the folder has no run, and
        do nothing where it has finished.
    allow: with resume, fields that may differ from the run's from here on, such as ["trainer.optimizer.lr"].
    callbacks: objects of `octetrl.Callback`, such as `octetrl.EarlyStopping(patience=3)`, or "module:name".
    sections: any other field of a recipe, sections as dictionaries: rollout={"group_size": 16}, seed=3. Several
        environments are given by name, each with its own tasks and reward:
        environments={"sums": {"tasks": [...], "weight": 2}, "words": {"tasks": "words.jsonl", "reward": spelled}}.

    Raises UserError for what the caller can correct, before anything is written; RunFailed when a run that began
    well can't continue; KeyboardInterrupt after Ctrl-C, with the last whole step saved.

    Example:
        train(model="models/Qwen3-0.6B", tasks=[{"prompt": "2+2=", "answer": "4"}, ...], reward=right, steps=100)
        train("demo_grpo", steps=5, trainer={"optimizer": {"lr": 1e-4}})
    """
    given, fields = dict[str, Any](), dict(sections)
    own: Sequence[Any] = callbacks if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []
    if named := [each for each in own if isinstance(each, str)]:
        fields["callbacks"] = named
    if model is not None:
        fields["model"] = dict(model) if isinstance(model, Mapping) else {"path": str(model)}
    for name, value in {"precision": precision, "steps": steps}.items():
        if value is not None:
            fields[name] = value
    if not (tasks is None and reward is None and eval_tasks is None):
        if sections.get("environments"):
            what = "tasks" if tasks is not None else "reward" if reward is not None else "eval_tasks"
            text = "environments exclude each other; give each environment its own tasks and reward"
            raise UserError(f"octetrl.train: {what} and {text}")
        base = {} if recipe is None else recipe_tree(recipe).get("environment") or {}
        fields["environment"] = {
            **_environment_fields(tasks, reward, base, given, eval_tasks=eval_tasks),
            **_section(sections, "environment"),
        }
    if "environments" in sections:
        several = _section(sections, "environments")
        fields["environments"] = {name: _named_fields(name, one, given) for name, one in several.items()}
    if output_dir is not None:
        fields["output_dir"] = str(output_dir)
    elif recipe is None:
        if resume:
            raise UserError("octetrl.train: resume needs output_dir, the folder of the run to continue")
        fields["output_dir"] = str(_free_folder(fields))
    resolved = _recipe(recipe, fields)
    folder = Path(resolved.output_dir)
    if will_resume(resolved, resume):
        _refuse_not_given_again(resolved, given, [] if callbacks is not None else given_callbacks(folder))
    for name, one in alone(resolved).items():
        dataset = one.environment.dataset
        if dataset is not None and isinstance(rows := given.get(dataset), _GivenRows):
            with errors_named(name):
                given[dataset] = _environment(rows, one)

    refuse_early(resolved, resume=resume)
    from octetrl.api.finished_run import FinishedRun
    from octetrl.run.loop import train as run_recipe

    objects = [each for each in own if not isinstance(each, str)]
    run_recipe(resolved, resume=resume, given=given, allowed=allow, callbacks=objects)
    return FinishedRun(folder, resolved if resolved.epochs is None else load_recipe(folder / RECIPE_FILE), given)


def resume(
    folder: str | Path,
    *,
    tasks: Tasks | None = None,
    eval_tasks: EvalTasks | None = None,
    reward: Reward | str | Rewards | None = None,
    callbacks: Sequence[Callback | str] | Callback | str | None = None,
    allow: Collection[str] = (),
    **changes: Unpack[ChangedFields],
) -> FinishedRun:
    """Continue the run in `folder` from its last checkpoint, with the recipe that it began with. `folder` may be the
    URL of a stored run (checkpoint.store), which is fetched into the output_dir of its recipe.

    tasks, eval_tasks, reward, callbacks: what `train` was given as Python objects, which no folder holds;
    callbacks=[] goes on without them. What is named as "module:name", or lies in a file, is found again.
    changes: fields that differ from here on, such as steps=400 or trainer={"optimizer": {"lr": 1e-6}}.
    allow: contents that may differ from those the run began with, such as ["environment.reward"].

    Raises what `train` raises; UserError also for objects that are missing, with their names.

    Example:
        resume("runs/sums", reward=right, steps=400)
    """
    if is_url(folder):
        changes = {**changes, "checkpoint": {**changes.get("checkpoint", {}), "store": str(folder)}}
        folder = fetch_recipe(str(folder), None).parent
    path = Path(folder) / RECIPE_FILE
    if not path.is_file():
        raise UserError(f"octetrl.resume: '{folder}' holds no run (no {RECIPE_FILE}); give the folder of a run")
    sys.path += [place for place in module_folders(Path(folder)) if place not in sys.path]
    if isinstance(several := changes.get("environments"), Mapping):  # with the other fields of each, and the others
        saved: dict[str, Any] = recipe_tree(path).get("environments") or {}
        whole: dict[str, Any] = {name: {**saved.get(name, {}), **section} for name, section in several.items()}
        changes = {**changes, "environments": {**saved, **whole}}
    return train(
        path,
        tasks=tasks,
        eval_tasks=eval_tasks,
        reward=reward,
        callbacks=callbacks,
        output_dir=folder,
        resume=True,
        allow=[*allow, *_leaves(changes)],
        **changes,
    )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The fields that nested sections set. A reward that is given again is no change."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if key != "reward" or isinstance(value, str):
            yield name
        yield from _leaves(value, f"{name}.") if isinstance(value, Mapping) else ()


def _refuse_not_given_again(recipe: Recipe, given: Mapping[str, Any], callbacks: Sequence[str]) -> None:
    """Raises UserError for what a run was given in Python when it began, and is not given now."""
    lacking: dict[str, dict[str, list[str]]] = {}  # names by the argument, of each environment
    for environment, config in recipe.each_environment.items():
        for argument, names in {"tasks": [config.dataset], "reward": reward_names(config.reward)}.items():
            if missing := [name for name in names if name is not None and is_given(name) and name not in given]:
                lacking.setdefault(environment, {})[argument] = missing
    one = lacking.pop("", {}) | ({"callbacks": list(callbacks)} if callbacks else {})
    again = [f"{argument}=..." for argument in one]
    if lacking:
        each = [f"{name!r}: {{{', '.join(map('{!r}: ...'.format, them))}}}" for name, them in lacking.items()]
        again.append(f"environments={{{', '.join(each)}}}")
    if again:
        named = [name for them in (one, *lacking.values()) for names in them.values() for name in names]
        without = "; callbacks=[] goes on without" if callbacks else ""
        raise UserError(
            f"the run in '{recipe.output_dir}' began with objects of Python ({', '.join(named)}); give them again:"
            f" {', '.join(again)}{without}"
        )


def _recipe(recipe: str | Path | None, fields: dict[str, Any]) -> Recipe:
    if recipe is not None:
        search_beside(recipe)
        return load_recipe(recipe, fields=fields)
    return recipe_from_mapping(fields, "octetrl.train")


def _section(sections: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = sections.get(name) or {}
    if not isinstance(section, Mapping):
        what = "a dictionary of environments by name" if name == "environments" else "its fields as a dictionary"
        raise UserError(f"octetrl.train: {name} is {type_of(section)}; give {what}")
    return dict(section)


def _environment_fields(
    tasks: Tasks | None,
    reward: Reward | str | Rewards | None,
    base: Mapping[str, Any],
    given: dict[str, Any],
    of: str = "",
    eval_tasks: EvalTasks | None = None,
) -> dict[str, Any]:
    """The recipe's fields for tasks and reward. Objects that a recipe can only name go into `given`; of: what their
    names begin with, of one environment of several."""
    fields: dict[str, Any] = {}
    if isinstance(tasks, str | Path):
        fields = {} if base.get("kind") in FILES else {"kind": "jsonl", **_OF_ANOTHER_DATASET}
        fields["dataset"] = str(tasks)
    elif tasks is not None:
        name = given_name(tasks) if hasattr(tasks, "tasks") else _TASKS
        fields = {"kind": "python", "dataset": name, **_OF_ANOTHER_DATASET}
        given[name] = tasks if hasattr(tasks, "tasks") else _GivenRows(_checked_list(tasks))
    if isinstance(eval_tasks, str | Path):
        fields["eval_dataset"] = str(eval_tasks)
    elif eval_tasks is not None:
        rows = given.get(str(fields.get("dataset")))
        if not isinstance(rows, _GivenRows):
            raise UserError(
                "octetrl.train: eval_tasks is no file, so it goes with a list of tasks; give tasks as a list too, both"
                " as files, or an environment with the attribute eval_tasks"
            )
        sets = eval_tasks if isinstance(eval_tasks, Mapping) else {"": eval_tasks}
        rows.eval_tasks = {name: _checked_list(one, "eval_tasks") for name, one in sets.items()}
        fields["eval_size"] = sum(map(len, rows.eval_tasks.values()))
    if isinstance(reward, Mapping | list | tuple):
        fields["reward"] = {name: _named_reward(f"{of}{name}", one, given) for name, one in _by_name(reward).items()}
    elif reward is not None:
        fields["reward"] = _function(reward, given)
    return fields


def _by_name(rewards: Mapping[str, Any] | Sequence[Any]) -> Mapping[str, Any]:
    """Several rewards by name; those of a list have the names of their functions."""
    if isinstance(rewards, Mapping):
        return rewards
    named: dict[str, Any] = {}
    for place, one in enumerate(rewards):
        name = re.sub(r"[^a-z0-9_]", "", str(getattr(one, "__name__", "")).lower()) or f"reward_{place}"
        own, number = name, 2
        while own in named:
            own, number = f"{name}_{number}", number + 1
        named[own] = one
    return named


def _named_reward(name: str, reward: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of one of several rewards: a function, or its fields. name: its own among all of the run."""
    fields = dict(reward) if isinstance(reward, Mapping) else {"function": reward}
    if "function" not in fields:
        raise UserError(f"octetrl.train: reward {name!r} has no function; give the function, or {{'function': ...}}")
    if fields.get("of") == "group":
        if not isinstance(fields["function"], str):
            check_call_in_run(fields["function"], f"octetrl.train: reward {name!r}", of_group=True)
            key = given_name(None, f"reward_{name}")
            given[key], fields["function"] = fields["function"], key
        return fields
    fields["function"] = _function(fields["function"], given, f"reward_{name}")
    return fields


def _function(reward: Any, given: dict[str, Any], name: str | None = None) -> str:
    """`module:name` of a reward. An object that a recipe can only name goes into `given`, by this name or its own."""
    if isinstance(reward, str):
        return reward
    _check_reward(reward)
    path = _reward_name(reward)
    if path.startswith(f"{MODULE}:"):
        path = path if name is None else given_name(None, name)
        given[path] = reward
    return path


def _named_fields(name: str, section: Any, given: dict[str, Any]) -> Any:
    """The fields of one of several environments, whose `tasks` and `reward` may be objects."""
    if not isinstance(name, str):
        raise UserError(f"octetrl.train: environments: the name {name!r} is {type_of(name)}; give a text, as 'sums'")
    if not isinstance(section, Mapping):
        return section
    own: dict[str, Any] = {}
    try:
        objects = section.get("tasks"), section.get("reward")
        found = _environment_fields(*objects, section, own, f"{name}.", eval_tasks=section.get("eval_tasks"))
    except UserError as error:
        text = str(error).removeprefix("octetrl.train: ")
        raise UserError(f"octetrl.train: environments.{name}: {text}") from None
    for word in ("dataset", "reward"):
        if isinstance(path := found.get(word), str) and path in own:  # equal names are different things here
            found[word] = key = given_name(None, f"{word}_{name}")
            given[key] = own.pop(path)
    given |= own  # of several rewards
    return {**found, **{key: value for key, value in section.items() if key not in ("tasks", "reward", "eval_tasks")}}


def _reward_name(reward: Reward) -> str:
    """`module:name` of a function that a reward process can import, else `given:NAME`."""
    name = importable_name(reward) if can_run_elsewhere(reward) else None
    return given_name(reward) if name is None or "." in name.partition(":")[2] else name


def _check_reward(reward: Reward) -> None:
    if not callable(reward):
        raise UserError(f"octetrl.train: reward is {type_of(reward)}; give a function of (task, text)")
    if has_trl_form(reward):
        return
    try:
        inspect.signature(reward).bind(Task("", ""), "")
    except TypeError as error:
        raise UserError(
            f"octetrl.train: the reward can't be called as reward(task, text) ({error}); take these two arguments"
        ) from None
    except ValueError:  # a function of C has no signature
        return


def _checked_list(tasks: Any, what: str = "tasks") -> list[Task | Mapping[str, Any]]:
    if not isinstance(tasks, Iterable) or isinstance(tasks, Mapping | bytes):
        raise UserError(
            f"octetrl.train: {what} is {type_of(tasks)}; give a JSONL file, a list of Task or of dictionaries"
            " with prompt and answer, or an object with tasks and score"
        )
    return list(tasks)


@dataclass(slots=True)
class _GivenRows:
    """Lists of tasks, and of held-out ones by the set's name."""

    tasks: list[Any]
    eval_tasks: dict[str, list[Any]] = field(default_factory=dict)


def _environment(rows: _GivenRows, recipe: Recipe) -> TaskEnvironment:
    """The environment of lists: their tasks with the recipe's prompt template, scored by equality."""
    config = recipe.environment
    held_out = {name: _made(one, config, "eval_tasks", name) for name, one in rows.eval_tasks.items()}
    eval_tasks = held_out.get("", held_out or None)
    return TaskEnvironment(_made(rows.tasks, config), ExactScorer(config.answer_marker), eval_tasks)


def _made(
    tasks: Sequence[Task | Mapping[str, Any]], config: EnvironmentConfig, of: str = "tasks", name: str = ""
) -> list[Task]:
    made: list[Task] = []
    of = f"{of}[{name!r}]" if name else of
    for place, task in enumerate(tasks):
        where = f"{of}[{place}]"
        if isinstance(task, Task):
            made.append(_checked_task(task, config.prompt_template, where))
        elif isinstance(task, Mapping):
            made += make_tasks([Row(place, where, dict(task))], config.prompt_template)
        else:
            raise UserError(f"{where}: {type_of(task)}; give a Task or a dictionary with prompt and answer")
    _refuse_equal_ids(made, of)
    if config.reward is None and config.reward_model is None and config.judge is None:
        for place, task in enumerate(made):
            if task.answer is None:
                raise UserError(
                    f"{of}[{place}]: it has no answer, and there is no reward; give each task an 'answer' to compare"
                    " with, or a reward function of (task, text)"
                )
    return made


def _checked_task(task: Task, template: str, where: str) -> Task:
    """The task itself where nothing changes, since a class of the user's may compute its fields."""
    given = {name: getattr(task, name) for name in ("prompt", "tools", "chat_template_kwargs")}
    prompt, tools, variables = given.values()
    prompt = prompt if isinstance(prompt, str) else read_prompt(prompt, f"{where}: its prompt")
    read: dict[str, Any] = {
        "prompt": with_prompt_template(prompt, template),
        "tools": read_tools(tools, f"{where}: its tools"),
        "chat_template_kwargs": read_variables(variables, f"{where}: its chat_template_kwargs"),
    }
    changed = {name: value for name, value in read.items() if value != given[name]}
    try:
        return replace(task, **changed) if changed else task
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}: {type_of(task)} does not take another {', '.join(changed)} ({error}); give its fields as a plain"
            " Task has them, or tasks in an environment of your own"
        ) from error


def _refuse_equal_ids(tasks: Sequence[Task], of: str) -> None:
    places: dict[str, int] = {}
    for place, task in enumerate(tasks):
        first = places.setdefault(task.id, place)
        if first != place:
            raise UserError(f"{of}[{place}]: id '{task.id}' is that of {of}[{first}] too; ids must differ")


def _free_folder(fields: Mapping[str, Any]) -> Path:
    """runs/MODEL, or runs/MODEL-N with the first free number."""
    section = fields.get("model")
    model = (section.get("path") or section.get("preset")) if isinstance(section, Mapping) else None
    name = Path(str(model)).name if model else "run"
    folder, number = Path("runs") / name, 2
    while folder.exists():
        folder, number = Path("runs") / f"{name}-{number}", number + 1
    return folder

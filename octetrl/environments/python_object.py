"""Objects that the user wrote: named in a recipe as `module:name`, or passed to a run in Python. Errors are one line.

**Named.** A reward (`environment.reward`) is a function. An environment (`environment.kind: python`) is an object, or a
class without arguments. A module can do anything when it is imported: hang, crash, or end its process. After
`os._exit(0)` the run would even look as if it had finished. So a module that the run must import is first imported in a
separate process. Rewards are imported only in their workers.

**Passed.** A recipe is plain data, so it names an object that its caller passes as `given:NAME`. The run looks the name
up in a mapping (`Given`) that comes with the recipe. Commands without such a mapping refuse the recipe. Such a reward
runs in one of two places, depending on whether another process can import it:

    a function or class at the top level of a module      in reward processes (`RewardWorkers`)
    a lambda, a closure, anything `__main__` defines      in threads of this process (`FunctionRewards`)

A notebook's functions belong to `__main__`. A new process can't import them. Their code would have to be pickled, and
no process here reads pickled code.

**Checked.** An environment's attributes may be properties and its tasks may have any class, so each access may raise an
exception or end the process. The checks cover what the run reads later. All tasks of a list are checked. In other
sequences only some tasks are checked, because tasks may be created on access. What this code changes for the whole
process (`ProcessState`, calls.py) is put back.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import re
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from octetrl.environments.calls import unchanged_process
from octetrl.environments.named_rewards import NamedReward, NamedRewards, check_call_in_run
from octetrl.environments.prompts import read_group_size, read_prompt, read_temperature
from octetrl.environments.scoring import Scorer, check_call, check_signature, place_of
from octetrl.environments.tasks import Environment, own_eval_sets
from octetrl.environments.trl_rewards import TrlRewards, has_trl_form
from octetrl.environments.turns import components_of
from octetrl.process.callable_process import CallableProcess, CallFailed, NoAnswer, ProcessDied
from octetrl.records import Task
from octetrl.system.errors import Terminated, UserError, error_line, nearest, type_of

if TYPE_CHECKING:  # pydantic takes as long to import as a reward process takes to start
    from octetrl.config.environment import EnvironmentConfig, RewardConfig

MODULE = "given"
Given = Mapping[str, Any]  # by the name in the recipe: {"given:right_number": <function>}


def given_name(thing: object, name: str | None = None) -> str:
    """How a recipe names `thing`, such as `given:right_number`. name: None: that of the function or class."""
    if name is not None:  # different names stay different
        return f"{MODULE}:{re.sub(r'[^A-Za-z0-9_]', lambda found: f'_{ord(found[0]):x}_', name)}"
    name = getattr(thing, "__name__", None) or type(thing).__name__
    return f"{MODULE}:{re.sub(r'[^A-Za-z0-9_]', '', name) or 'function'}"


def is_given(path: str) -> bool:
    """Whether `path` names an object that only the caller of `octetrl.train` has."""
    return path.partition(":")[0] == MODULE


def refuse_given(field: str, path: str) -> None:
    """Raises UserError if `path` names an object that only the caller of `octetrl.train` has."""
    if is_given(path):
        raise UserError(
            f"{field}: '{path}' was given to octetrl.train in Python, so this command can't find it; use the run in"
            " Python, or put it into a module and name it as 'module:name'"
        )


def importable_name(thing: object) -> str | None:
    """The `module:name` by which another process can import a function or class; None if it can't."""
    module_name, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(name, str) or module_name == "__main__":
        return None
    module = sys.modules.get(module_name)
    is_found = getattr(module, "__spec__", None) is not None and getattr(module, name, None) is thing
    return f"{module_name}:{name}" if is_found else None


def can_run_elsewhere(scorer: object) -> bool:
    """Whether a reward process could load `scorer`: a function, a bound method or a callable object."""
    if isinstance(scorer, functools.partial):
        return can_run_elsewhere(scorer.func)
    if isinstance(scorer, NamedRewards):
        return all(can_run_elsewhere(part.function) for part in scorer.parts)
    if inspect.isfunction(scorer) or inspect.isbuiltin(scorer):
        return importable_name(scorer) is not None
    if importable_name(type(getattr(scorer, "__self__", scorer))) is None:
        return False
    try:
        return b"__main__" not in pickle.dumps(scorer)  # what it holds of this script is not in another process
    except (pickle.PicklingError, AttributeError, TypeError):
        return False


LOAD_SECONDS = 120.0


def load_object(field: str, path: str, seconds: float = LOAD_SECONDS) -> Any:
    """Import the object at `path`, first in a separate process, where the import may take `seconds`. Raises
    UserError, naming the recipe's `field`, if anything is wrong."""
    module_name = check_path(field, path)
    _search_working_directory()
    if module_name not in sys.modules:
        _try_import(field, path, seconds)
    try:
        with unchanged_process():
            return import_object(field, path)
    except SystemExit as error:  # it did not do so in the other process; the run would seem to have finished
        raise UserError(f"{field}: module '{module_name}' fails when imported ({error_line(error)})") from error


def import_object(field: str, path: str) -> Any:
    """Import the object at `path` in this process only. Raises UserError for what Python raises when it imports;
    other exceptions of the module are not caught."""
    module_name = check_path(field, path)
    name = path.rpartition(":")[2]
    _search_working_directory()
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{field}: module '{module_name}' does not import, there is no such module; it is looked for beside the"
                " recipe, in the working directory and on PYTHONPATH"
            ) from error
        is_syntax = isinstance(error, SyntaxError)  # its text has the line
        reason = " ".join(f"SyntaxError: {error}".split()) if is_syntax else error_line(error)
        raise UserError(f"{field}: module '{module_name}' fails when imported ({reason})") from error
    if not hasattr(module, name):
        known = [word for word in vars(module) if not word.startswith("_")]
        raise UserError(f"{field}: module '{module_name}' has no '{name}'{nearest(name, known)}")
    return getattr(module, name)


def check_path(field: str, path: str) -> str:
    """The module's name in `module:name`. Raises UserError if `path` does not have this form."""
    refuse_given(field, path)
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise UserError(f"{field}: '{path}' is not of the form 'module:name', as in 'rewards:exact'")
    if module_name.endswith(".py") and "/" not in module_name:
        module_name = module_name.removesuffix(".py")
        raise UserError(f"{field}: '{path}' names a file; write its module, '{module_name}:{name}'")
    return module_name


def _import_only(field: str, path: str) -> None:
    import_object(field, path)


def _try_import(field: str, path: str, seconds: float) -> None:
    module = f"{field}: module '{path.partition(':')[0]}'"
    process = CallableProcess(_import_only)
    try:
        process.call(field, path, seconds=seconds)
    except CallFailed as error:
        raise UserError(f"{module} fails when imported ({error})") from error
    except ProcessDied as error:
        raise UserError(f"{module} ends its process when imported ({error})") from error
    except NoAnswer as error:
        remedy = "fix it, or raise environment.load_timeout_seconds"
        raise UserError(f"{module} was not imported in {seconds:g} s; {remedy}") from error
    finally:
        process.kill()


def search_beside(recipe: str | Path) -> None:
    """Let modules be found in the folder of the recipe, here and in the processes that this one starts."""
    folder = str(Path(recipe).absolute().parent)
    if Path(recipe).is_file() and folder not in sys.path:
        sys.path.append(folder)


def folders_of(names: Iterable[str]) -> list[str]:
    """The folders in which the modules of `module:name` lie, for a later process that runs elsewhere."""
    modules = {name.partition(":")[0].partition(".")[0] for name in names if ":" in name and not is_given(name)}
    _search_working_directory()
    specs = [find_spec(module) for module in sorted(modules) if module not in ("", "__main__")]
    places = [
        spec.origin or next(iter(spec.submodule_search_locations or ()), "") for spec in specs if spec is not None
    ]
    files = [Path(place).parent if Path(place).name == "__init__.py" else Path(place) for place in places if place]
    return list(dict.fromkeys(str(file.absolute().parent) for file in files))


def _search_working_directory() -> None:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def load_environment(path: str, seconds: float = LOAD_SECONDS) -> Environment:
    """Load the environment at `path`: an object with `tasks` and `score` or decorated rewards, or a class without
    arguments that creates one. seconds: time limit of its import."""
    environment = load_object("environment.dataset", path, seconds)
    if isinstance(environment, type):
        environment = result_of(environment, f"making '{path}'")
    check_environment(environment, path)
    return environment


def check_environment(environment: Any, path: str) -> None:
    """Raises UserError if tasks or rewards are missing, or a task is wrong. path: its name in the recipe."""

    def has(name: str) -> bool:
        return result_of(lambda: hasattr(environment, name), f"'{path}': reading its {name}")

    missing = [] if has("tasks") else ["tasks"]
    names = ("score", "answered", "start", "reply", "finish", "tools", "system_prompt")
    present = [name for name in names if has(name)]
    if "score" not in present and all(each.weight is None for each in components_of(environment)):
        missing.append("score")
    if missing:
        raise UserError(
            f"environment.dataset: '{path}' has no {' and no '.join(missing)};"
            " an environment has `tasks`, and `score(task, completion_text)` or methods with @reward"
        )
    if "score" in present:
        check_signature(environment.score, f"environment.dataset: the score of '{path}'")
    for name in ("start", "reply", "finish"):
        if callable(function := getattr(environment, name, None)):
            check_call(function, f"environment.dataset: the {name} of '{path}'", "conversation")
    check_tasks(result_of(lambda: environment.tasks, f"'{path}': reading its tasks"), path)
    sets = result_of(lambda: own_eval_sets(environment), f"'{path}': reading its eval_tasks")
    for name, tasks in sets.items():
        check_tasks(tasks, path, f"eval_tasks['{name}']" if name else "eval_tasks")
        if (name and not re.fullmatch(r"[a-z0-9_-]+", name)) or name in ("environments", "component"):
            raise UserError(
                f"environment.dataset: '{path}': '{name}' is no name for a set of eval_tasks; use lower case letters,"
                " digits, '_' and '-', and neither 'environments' nor 'component'"
            )


T = TypeVar("T")
MOST_TASKS = 100_000_000  # their order is kept in memory
_TRIED = 16  # of a sequence that is not a list


def result_of(action: Callable[[], T], what: str) -> T:
    """Call `action`, which runs the user's code, and return its result. Raises UserError for its exceptions, also for
    SystemExit and a KeyboardInterrupt of the code's own. Ctrl-C and signals that end the run pass."""
    try:
        with unchanged_process():
            return action()
    except (UserError, Terminated):
        raise
    except KeyboardInterrupt as error:
        if _may_be_ctrl_c(error):
            raise
        raise UserError(f"environment.dataset: {what} raises KeyboardInterrupt; fix the environment") from None
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise UserError(f"environment.dataset: {what} fails ({error_line(error)}); fix the environment") from error


def _may_be_ctrl_c(error: KeyboardInterrupt) -> bool:
    """False only if a Python handler is installed, because the handler would then have raised it."""
    code = getattr(signal.getsignal(signal.SIGINT), "__code__", None)
    return code is None or any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


class ForeignTasks(Sequence[Task]):
    """Tasks of the user's environment, whose code runs at each access. `path`: the environment's name in the recipe."""

    def __init__(self, tasks: Sequence[Task], path: str) -> None:
        self._tasks, self._path = tasks, path

    def __len__(self) -> int:
        return result_of(lambda: len(self._tasks), f"'{self._path}': len(tasks)")

    def __iter__(self) -> Iterator[Task]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: Any) -> Any:
        return result_of(partial(getitem, self._tasks, place), f"'{self._path}': tasks[{place}]")


def check_tasks(given: Any, path: str, what: str = "tasks") -> None:
    """Raises UserError for tasks that a run cannot use. path: the environment's name in the recipe; what: of it."""
    where = f"environment.dataset: '{path}': "
    has_places = hasattr(type(given), "__len__") and hasattr(type(given), "__getitem__")
    if not has_places or isinstance(given, str | bytes | Mapping):
        raise UserError(
            f"{where}its {what} are {type_of(given)}; give a list of Task, or another sequence with a length and places"
        )
    is_list = isinstance(given, list | tuple)
    tasks = given if is_list else ForeignTasks(given, path)
    number = len(tasks)
    if number > MOST_TASKS:
        raise UserError(f"{where}it has {number:,} tasks, at most {MOST_TASKS:,} can be; give fewer")
    tried = {*range(min(number, _TRIED)), *(number * eighth // 8 for eighth in range(8 if number else 0))}
    places = range(number) if is_list else sorted(tried | {*range(number)[-1:]})
    checked = {place: tasks[place] for place in places}
    for place, task in checked.items():
        _check_task(task, f"{where}{what}[{place}]")
    repeated, times = next(iter(Counter(task.id for task in checked.values()).most_common(1)), ("", 0))
    if times > 1:
        raise UserError(f"{where}{times} tasks have the id {repeated[:60]!r}; give each an id of its own")


def _check_task(task: Any, where: str) -> None:
    if not isinstance(task, Task):
        raise UserError(f"{where} is {type_of(task)}, not a Task; give Task(id=..., prompt=...)")
    for field, kinds, needed in (
        ("id", str, "a text"),
        ("prompt", str | list | tuple, "a text, or a list of messages"),
        ("answer", str | None, "a text or None"),
        ("metadata", Mapping, "a mapping"),
        ("tools", list | tuple, "a list"),
        ("chat_template_kwargs", Mapping, "a mapping"),
    ):
        value = getattr(task, field)
        if not isinstance(value, kinds):
            raise UserError(f"{where}: its {field} is {type_of(value)}; give {needed}")
    if not isinstance(task.prompt, str):
        read_prompt(task.prompt, f"{where}: its prompt")
    read_temperature(task.temperature, f"{where}: its temperature")
    read_group_size(task.group_size, f"{where}: its group_size")
    environment = getattr(task, "environment", None)
    if not isinstance(environment, str) or environment:
        raise UserError(
            f"{where}: its environment is {environment!r}, but the run sets this field of a Task; leave it empty, and"
            " give a field of your own another name"
        )


_FIELD = "environment.reward"


def named_reward(reward: str | Mapping[str, RewardConfig], given: Given) -> Scorer:
    """The reward that a recipe names: an object given in Python, or the function at `module:name`; of several those
    that reward processes call."""
    if not isinstance(reward, str):
        several = {name: each for name, each in reward.items() if not each.in_run}
        parts = [NamedReward(name, named_reward(each.function, given), each.in_sum) for name, each in several.items()]
        return NamedRewards(tuple(parts), before_others=len(several) < len(reward))
    if reward not in given:
        return PythonReward(reward)
    scorer: Scorer = given[reward]
    return TrlRewards([scorer]) if has_trl_form(scorer) else scorer


def rewards_in_run(config: EnvironmentConfig, given: Given) -> tuple[list[NamedReward], list[NamedReward]]:
    """The rewards that the run's process calls: those of whole groups, and those of a completion with limits. Their
    functions are imported first in a process of their own, then here."""
    named = {} if config.reward is None or isinstance(config.reward, str) else config.reward
    made: dict[bool, list[NamedReward]] = {True: [], False: []}
    for name, each in named.items():
        if each.in_run:
            is_given = each.function in given
            seconds = config.load_timeout_seconds
            function = given[each.function] if is_given else _function_here(name, each, seconds)
            part = NamedReward(name, function, each.in_sum, each.max_concurrent, each.per_minute)
            made[each.of == "group"].append(part)
    return made[True], made[False]


def _function_here(name: str, reward: RewardConfig, seconds: float) -> Any:
    field = f"{_FIELD}.{name}"
    function = load_object(field, reward.function, seconds)
    check_call_in_run(function, f"{field}: '{reward.function}'", of_group=reward.of == "group")
    return function


@dataclass(frozen=True)
class PythonReward:
    """The function at `path`, a scorer. Raises UserError, in a worker, when it can't be imported or called."""

    path: str

    def __post_init__(self) -> None:
        check_path(_FIELD, self.path)

    def __call__(self, task: Task, completion_text: str) -> float:
        return self._function(task, completion_text)

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}  # the function is not pickled: the worker imports it

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        _ = self._function  # before the first call, whose time is limited

    @cached_property
    def _function(self) -> Scorer:
        function = import_object(_FIELD, self.path)
        if not callable(function):
            raise UserError(f"{_FIELD}: '{self.path}' is {type_of(function)}, not a function")
        if has_trl_form(function):
            return TrlRewards([function])
        check_signature(function, f"{_FIELD}: '{self.path}'")
        scorer: Scorer = function
        return scorer

    @property
    def place(self) -> str:
        """Name, file and line of the function."""
        return place_of(self._function)

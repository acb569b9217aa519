"""Loads the object that a recipe names as `module:name`, also from the working directory. Errors are one line.

A reward (`environment.reward`) is a function. An environment (`environment.kind: python`) is an object, or a class
without arguments. A module can do anything when it is imported: hang, crash, or end its process. After `os._exit(0)`
the run would even look as if it had finished. So a module that the run must import is first imported in a separate
process. Rewards are imported only in their workers.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octetrl.environments.base import Environment
from octetrl.environments.foreign import OPTIONAL, check_tasks, result_of, unchanged_process
from octetrl.environments.given import refuse_given
from octetrl.environments.score_signature import check_call_with_conversation, check_signature
from octetrl.environments.turns.components import components_of
from octetrl.process.callable_process import CallableProcess, CallFailed, NoAnswer, ProcessDied
from octetrl.system.errors import UserError, error_line, nearest

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
    except SystemExit as error:
        raise UserError(
            f"{field}: module '{module_name}' ends its process when imported (sys.exit({error.code}))"
        ) from error


def import_object(field: str, path: str) -> Any:
    """Import the object at `path` in this process only. Raises UserError; exceptions of the module are not caught."""
    module_name = check_path(field, path)
    name = path.rpartition(":")[2]
    _search_working_directory()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise UserError(
                f"{field}: module '{module_name}' fails when imported: it imports '{error.name}', which is not"
                f" installed ({error_line(error)})"
            ) from error
        raise UserError(
            f"{field}: module '{module_name}' does not import, there is no such module; it is looked for beside the"
            " recipe, in the working directory and on PYTHONPATH"
        ) from error
    except ImportError as error:
        raise UserError(f"{field}: module '{module_name}' fails when imported ({error_line(error)})") from error
    except (SyntaxError, NameError, AttributeError, TypeError, ValueError, OSError) as error:
        reason = error_line(error)
        if isinstance(error, SyntaxError):  # whose text has the line
            reason = " ".join(f"SyntaxError: {error}".split())
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


@dataclass(frozen=True)
class _Trial:
    field: str
    path: str

    def __call__(self) -> None:
        import_object(self.field, self.path)


def _try_import(field: str, path: str, seconds: float) -> None:
    module_name = path.partition(":")[0]
    process = CallableProcess(_Trial(field, path))
    try:
        process.call(seconds=seconds)
    except CallFailed as error:
        raise UserError(f"{field}: module '{module_name}' fails when imported ({error})") from error
    except ProcessDied as error:
        raise UserError(f"{field}: module '{module_name}' ends its process when imported ({error})") from error
    except NoAnswer as error:
        raise UserError(
            f"{field}: module '{module_name}' was not imported in {seconds:g} s; fix it, or raise"
            " environment.load_timeout_seconds"
        ) from error
    finally:
        process.kill()


def search_beside(recipe: str | Path) -> None:
    """Let modules be found in the folder of the recipe, here and in the processes that this one starts."""
    folder = str(Path(recipe).absolute().parent)
    if Path(recipe).is_file() and folder not in sys.path:
        sys.path.append(folder)


def _search_working_directory() -> None:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def load_environment(path: str, seconds: float = LOAD_SECONDS) -> Environment:
    """Load the environment at `path`: an object with `tasks` and `score` or decorated rewards, or a class without
    arguments that creates one. seconds: time limit of its import."""
    found = load_object("environment.dataset", path, seconds)
    environment = result_of(found, f"making '{path}'") if isinstance(found, type) else found
    check_environment(environment, path)
    return environment


def check_environment(environment: Any, path: str) -> None:
    """Raises UserError if tasks or rewards are missing, or a task is wrong. path: its name in the recipe."""

    def has(name: str) -> bool:
        return result_of(lambda: hasattr(environment, name), f"'{path}': reading its {name}")

    missing = [] if has("tasks") else ["tasks"]
    found = [name for name in OPTIONAL if has(name)]
    if "score" not in found and all(one.weight is None for one in components_of(environment)):
        missing.append("score")
    if missing:
        raise UserError(
            f"environment.dataset: '{path}' has no {' and no '.join(missing)};"
            " an environment has `tasks`, and `score(task, completion_text)` or methods with @reward"
        )
    if "score" in found:
        check_signature(environment.score, f"environment.dataset: the score of '{path}'")
    for name in ("start", "reply", "finish"):
        if callable(function := getattr(environment, name, None)):
            check_call_with_conversation(function, f"environment.dataset: the {name} of '{path}'")
    check_tasks(environment, path)

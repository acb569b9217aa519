"""What a recipe names as `module:name`: found in the working directory too, and refused in one line.

A reward (`environment.reward`) is a function, an environment (`environment.kind: python`) an object or a class without
arguments. The module is imported when the recipe is built, so that a misspelt name is an error before anything else.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from octetrl.config.errors import UserError, nearest
from octetrl.environments.base import Environment
from octetrl.environments.turns.components import components_of


def load_object(field: str, path: str) -> Any:
    """The callable or environment at `path`. Raises UserError, naming the recipe's `field`, for whatever is wrong."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise UserError(f"{field}: '{path}' is not of the form 'module:name', as in 'rewards:exact'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"{field}: module '{module_name}' does not import ({error});"
            " it is looked for in the working directory and on PYTHONPATH"
        ) from error
    except (SyntaxError, NameError, AttributeError, TypeError, ValueError, OSError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{field}: module '{module_name}' fails when imported ({reason})") from error
    if not hasattr(module, name):
        known = [word for word in vars(module) if not word.startswith("_")]
        raise UserError(f"{field}: module '{module_name}' has no '{name}'{nearest(name, known)}")
    return getattr(module, name)


def load_environment(path: str) -> Environment:
    """The environment at `path`: an object with `tasks` and `score` or decorated rewards, or a class that makes one
    without arguments."""
    found = load_object("environment.dataset", path)
    environment = found() if isinstance(found, type) else found
    missing = [] if hasattr(environment, "tasks") else ["tasks"]
    if not hasattr(environment, "score") and all(one.weight is None for one in components_of(environment)):
        missing.append("score")
    if missing:
        raise UserError(
            f"environment.dataset: '{path}' has no {' and no '.join(missing)};"
            " an environment has `tasks`, and `score(task, completion_text)` or methods with @reward"
        )
    return environment

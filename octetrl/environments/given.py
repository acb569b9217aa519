"""Objects that the caller passes to a run in Python: a reward function, an environment, a list of tasks.

A recipe is plain data, so it names such an object as `given:NAME`. The run looks the name up in a mapping (`Given`)
that its caller passes with the recipe. Commands without such a mapping refuse the recipe in one line.

A given reward runs in one of two places, depending on whether another process can import it:

    a function or class at the top level of a module     in reward processes (environments/scoring.py)
    a lambda, a closure, anything `__main__` defines      in this process (environments/function_rewards.py)

A notebook's functions belong to `__main__`. A new process can't import them. Their code would have to be pickled, and
no process here reads pickled code.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import re
import sys
from collections.abc import Mapping
from typing import Any

from octetrl.system.errors import UserError

MODULE = "given"
Given = Mapping[str, Any]  # by the name in the recipe: {"given:right_number": <function>}


def given_name(thing: object, name: str | None = None) -> str:
    """How a recipe names `thing`, such as `given:right_number`. name: None: that of the function or class."""
    name = name or getattr(thing, "__name__", None) or type(thing).__name__
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
    if inspect.isfunction(scorer) or inspect.isbuiltin(scorer):
        return importable_name(scorer) is not None
    if importable_name(type(getattr(scorer, "__self__", scorer))) is None:
        return False
    try:
        return b"__main__" not in pickle.dumps(scorer)  # what it holds of this script is not in another process
    except (pickle.PicklingError, AttributeError, TypeError):
        return False

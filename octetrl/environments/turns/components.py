"""Rewards and metrics as decorated functions of a conversation that has ended.

    @reward                      weight 1
    @reward(weight=0.2)          weight 0.2
    @metric                      not part of the reward, but recorded in the same way

A rollout's reward is the weighted sum of its rewards. The unweighted value of each is stored with the rollout, and its
mean is a metric of the step (`reward/component/<name>`, `environment/<name>`). The functions may be async. If a reward
or metric raises, hangs or returns no finite number, the rollout has no reward, and its status says why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar, overload

from octetrl.system.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_octetrl_component"
_NAME = re.compile(r"[a-z0-9_]+")  # part of a metric's name


@dataclass(frozen=True, slots=True)
class Component:
    """A reward of an environment, or a metric if `weight` is None."""

    name: str
    weight: float | None
    function: Callable[..., Any]  # of the conversation


@overload
def reward(function: F, /) -> F: ...
@overload
def reward(*, weight: float) -> Callable[[F], F]: ...
def reward(function: F | None = None, /, *, weight: float = 1.0) -> F | Callable[[F], F]:
    """Marks a method as a reward."""
    if not isinstance(weight, Real) or not math.isfinite(weight):
        raise UserError(f"@reward(weight={weight!r}): a weight is a finite number, such as 0.5")
    return _marked(float(weight)) if function is None else _marked(float(weight))(function)


def metric(function: F, /) -> F:
    """Marks a method as a metric."""
    return _marked(None)(function)


def _marked(weight: float | None) -> Callable[[F], F]:
    def mark(function: F) -> F:
        setattr(function, _MARK, (weight,))
        return function

    return mark


def components_of(environment: object) -> tuple[Component, ...]:
    """All rewards and metrics in the order of their definition, those of base classes first. Raises UserError for a
    name that is not allowed for a metric."""
    names: dict[str, None] = {}
    for kind in reversed(type(environment).__mro__):
        names |= dict.fromkeys(vars(kind))
    names |= dict.fromkeys(getattr(environment, "__dict__", {}))
    found = []
    for name in names:
        mark = getattr(getattr(type(environment), name, None), _MARK, None)
        mark = mark or getattr(getattr(environment, "__dict__", {}).get(name), _MARK, None)
        if mark is None:
            continue
        if not _NAME.fullmatch(name):
            raise UserError(
                f"environment: '{name}' is not a valid name for a reward or metric; use lower case letters and _"
            )
        found.append(Component(name, mark[0], getattr(environment, name)))
    return tuple(found)

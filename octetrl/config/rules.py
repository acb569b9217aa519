"""The form of a rule that a recipe's fields keep, and how a table of rules is read. No torch.

    together("trainer.gradients=bfloat16 model.dtype=float32")

A rule lists fields with the values that do not go together:

    model.lora                      the field is set: it has another value than its default
    model.dtype=float32             it has this value; `a|b`: one of these
    model.dtype!=float32            it has another value
    cluster.tensor_parallel>1       it is larger; `<`: smaller
    ?rollout.stop                   it only belongs to the problem
    (algorithm.name!=ppo)           it only narrows the rule, and does not belong to the problem

The message begins with the first field and its value. A rule may have a text of its own that says why, or what to do:
`{}` in it is the first field's value, `{r.rollout.group_size}` any other. An objective that lacks a field breaks no
rule about it. The tables are in `rules_training.py`, `rules_environment.py`, `rules_running.py` and `rules_shape.py`;
`validate.py` reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from octetrl.config.schema import Recipe
from octetrl.config.section import Problem, Section

When = Callable[[Recipe], bool]
_CONDITION = re.compile(r"([?(]?)([\w.]+)(?:(!=|=|>|<)([^\s)]+))?[)]?")
_LACKING = object()


@dataclass(frozen=True, slots=True)
class Rule:
    """pattern: fields and conditions on them, see above. text: None: that they do not go together; a function where
    values of the recipe are not enough. when: a further condition. value_is: one on the first field's value."""

    pattern: str
    text: str | Callable[[Recipe], str] | None = None
    when: When | None = None
    value_is: Callable[[Any], bool] | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        matches = [_matched(word) for word in self.pattern.split()]
        return tuple(dict.fromkeys(match[2] for match in matches if match[1] != "("))

    def is_broken_by(self, recipe: Recipe) -> bool:
        if not all(_holds(recipe, word) for word in self.pattern.split()):
            return False
        if self.value_is is not None and not self.value_is(value(recipe, self.fields[0])):
            return False
        return self.when is None or self.when(recipe)

    def problem(self, recipe: Recipe) -> Problem:
        """The problem of a recipe that breaks the rule."""
        first, *others = self.fields
        if self.text is None:
            with_these = " and ".join(_shown(recipe, name) for name in others)
            it = ": it" if _is_section(value(recipe, first)) else ""
            return Problem(
                self.fields, f"{_shown(recipe, first)}{it} does not go with {with_these}; change one of them"
            )
        given, text = _in_yaml(value(recipe, first)), self.text
        said = text.format(given, r=recipe) if isinstance(text, str) else text(recipe)
        return Problem(self.fields, f"{first}: {said}")


def problems_of(rules: Iterable[Rule], recipe: Recipe) -> Iterator[Problem]:
    """The problems of the rules that the recipe breaks, in the order of the table."""
    return (rule.problem(recipe) for rule in rules if rule.is_broken_by(recipe))


def together(*patterns: str) -> tuple[Rule, ...]:
    """Rules whose fields do not go together, for no reason that a text would have to say."""
    return tuple(Rule(pattern) for pattern in patterns)


def apart(one: str, others: str) -> tuple[Rule, ...]:
    """`one` goes with none of the conditions in `others`, which are separated by spaces."""
    return together(*(f"{other} {one}" for other in others.split()))


def value(recipe: Recipe, name: str) -> Any:
    """The value of the field with this dotted name. None if its section lacks it, as that of another objective."""
    given = _given(recipe, name)
    return None if given is _LACKING else given


def is_set(recipe: Recipe, name: str) -> bool:
    """Whether the field has another value than its default."""
    section, _, last = name.rpartition(".")
    owner = _given(recipe, section) if section else recipe
    if owner is None or owner is _LACKING or last not in type(owner).model_fields:
        return False
    return bool(getattr(owner, last) != type(owner).model_fields[last].get_default(call_default_factory=True))


def _given(recipe: Recipe, name: str) -> Any:
    node: Any = recipe
    for part in name.split("."):
        node = getattr(node, part, _LACKING)
    return node


def _matched(condition: str) -> re.Match[str]:
    match = _CONDITION.fullmatch(condition)
    assert match is not None, f"'{condition}' is no condition of a rule"
    return match


def _holds(recipe: Recipe, condition: str) -> bool:
    mark, name, how, what = _matched(condition).groups()
    if mark == "?":
        return True
    if how is None:
        return is_set(recipe, name)
    given = _given(recipe, name)
    if given is _LACKING:
        return False
    if how in "<>":
        return given is not None and (given > float(what) if how == ">" else given < float(what))
    return (_in_yaml(given) in what.split("|")) == (how == "=")


def _shown(recipe: Recipe, name: str) -> str:
    """The field with its value; of a section the name alone."""
    given = value(recipe, name)
    return name if _is_section(given) else f"{name}: {_in_yaml(given)}"


def _is_section(given: Any) -> bool:
    return isinstance(given, Section | dict)


def _in_yaml(given: Any) -> str:
    return (
        given if isinstance(given, str) else json.dumps(given, default=lambda section: section.model_dump(mode="json"))
    )

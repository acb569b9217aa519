"""Read the YAML of a recipe: plain data only, and scalars as YAML 1.2 means them.

`1e-6` is a number. `1:30`, `010`, `yes` and `2024-01-01` are texts. A key given twice, a key that is not a text, an
alias (`*name`) and a number that is not finite are errors.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Hashable
from typing import Any

import yaml

from octetrl.system.errors import UserError


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML into plain data: text, numbers, booleans, null, lists, and mappings with text keys."""
    try:
        return json.loads(json.dumps(yaml.load(text, Loader=_RecipeLoader)))
    except yaml.constructor.ConstructorError as error:
        raise UserError(f"{source}{_where(error)}: {error.problem}") from None
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{source}{_where(error)}: not YAML, {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not YAML, {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UserError(f"{source}: not a recipe, it is nested too deeply") from None


def _where(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f", line {mark.line + 1}" if mark is not None else ""


class _RecipeLoader(yaml.SafeLoader):
    """A YAML loader with the plain scalars of YAML 1.2. It accepts only plain data."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):  # a few lines of aliases can expand to gigabytes
            event = self.peek_event()
            raise _refusal(f"the alias *{event.anchor} is not allowed in a recipe; write the value out", event)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError):  # the text does not have the type of its tag
            what = f"{getattr(node, 'value', '')!r} is not of type {node.tag.rpartition(':')[2]}"
            raise _refusal(f"{what}, which its tag names; leave the tag out", node) from None

    def construct_plain_mapping(self, node: yaml.MappingNode) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _refusal("a value tagged !!map is not a mapping; leave the tag out", node)
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key, yaml.ScalarNode):
                what = "a list" if isinstance(key, yaml.SequenceNode) else "a mapping"
                raise _refusal(f"a key is {what}, not a text; write `section: ...` lines", key)
            if key.tag != "tag:yaml.org,2002:str":
                raise _refusal(f"the key {key.value!r} is not a text; put it in quotes", key)
            if key.value in seen:
                raise _refusal(f"the key '{key.value}' is given twice; remove one of them", key)
            seen.add(key.value)
        self.flatten_mapping(node)
        return self.construct_mapping(node, deep=True)

    def construct_finite_float(self, node: yaml.ScalarNode) -> float:
        value = self.construct_yaml_float(node)
        if math.isinf(value) and "inf" not in node.value.lower():
            raise _refusal(f"{node.value} is too large for a number; give at most {sys.float_info.max:.1e}", node)
        if not math.isfinite(value):
            raise _refusal(f"{node.value} is not a finite number; give a finite one", node)
        return value

    def construct_text(self, node: yaml.ScalarNode) -> str:
        text = self.construct_yaml_str(node)
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise _refusal(f"{text!r} contains half of a character; write the whole character", node)
        return text

    def construct_list(self, node: yaml.SequenceNode) -> list[Any]:
        return self.construct_sequence(node, deep=True)

    def refuse(self, node: yaml.Node) -> None:
        raise _refusal(f"{node.tag.replace('tag:yaml.org,2002:', '!!')} is not allowed in a recipe", node)


class RecipeDumper(yaml.SafeDumper):
    """A YAML dumper that quotes every text which `_RecipeLoader` would not read as text."""


def _refusal(problem: str, place: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, place.start_mark)


_PLAIN_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]{0,24})", list("-+0123456789")),
    ("float", r"[-+]?((0|[1-9][0-9_]*)(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
)
_RecipeLoader.yaml_constructors = {}  # inherits nothing, so any tag not named below is refused
_RecipeLoader.yaml_implicit_resolvers, RecipeDumper.yaml_implicit_resolvers = {}, {}
for _tag, _pattern, _first in _PLAIN_SCALARS:
    for _class in (_RecipeLoader, RecipeDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)
for _tag, _constructor in (
    ("null", yaml.SafeLoader.construct_yaml_null),
    ("bool", yaml.SafeLoader.construct_yaml_bool),
    ("int", yaml.SafeLoader.construct_yaml_int),
    ("float", _RecipeLoader.construct_finite_float),
    ("str", _RecipeLoader.construct_text),
    ("seq", _RecipeLoader.construct_list),
    ("map", _RecipeLoader.construct_plain_mapping),
):
    _RecipeLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _constructor)
_RecipeLoader.add_constructor(None, _RecipeLoader.refuse)

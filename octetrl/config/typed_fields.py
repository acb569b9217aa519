"""The recipe's sections as TypedDicts, for editors and type checkers: `octetrl.train(rollout={"temperatur": 1})` is
underlined. `python -m octetrl.config.recipe_page` writes octetrl/api/fields.py; no run reads it.

Python code may give a list where the recipe has a tuple. The section of an objective has the fields of all objectives.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from octetrl.config.algorithm import OBJECTIVES, OwnObjectiveConfig
from octetrl.config.environment import MixedEnvironmentConfig
from octetrl.config.schema import Recipe
from octetrl.config.section import Section

FIELDS = Path(__file__).parents[1] / "api" / "fields.py"
NAMED = ("model", "precision", "steps", "output_dir", "callbacks")  # arguments of `train` with a name
OF_TRAIN = {"tasks": "Any", "eval_tasks": "Any", "reward": "Any"}  # of one of several environments, besides its fields
_HEAD = '''"""The fields of a recipe, for annotations. Written by `python -m octetrl.config.recipe_page`."""
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict'''


def typed_fields() -> str:
    """The text of fields.py."""
    sections: dict[str, dict[str, str]] = {}
    recipe = dict(_fields(Recipe, sections))
    objectives: dict[str, str] = {}
    every: list[type[Section]] = [*OBJECTIVES.values(), OwnObjectiveConfig]
    for objective in every:
        for name, text in _fields(objective, sections):
            known = objectives.get(name, text)
            objectives[name] = text if known == text else f"{known} | {text}"
    sections["AlgorithmFields"] = objectives | {"name": "str"}
    others = {name: text for name, text in recipe.items() if name not in NAMED}
    parts = [_typed_dict(name, fields) for name, fields in sorted(sections.items())]
    parts += [_typed_dict("OtherFields", others), _typed_dict("ChangedFields", {"steps": "int"}, "OtherFields")]
    return "\n\n\n".join([_HEAD, *parts]) + "\n"


def _typed_dict(name: str, fields: dict[str, str], base: str = "TypedDict") -> str:
    lines = [f"    {field}: {text}" for field, text in fields.items()]
    return "\n".join([f"class {name}({base}, total=False):", *lines])


def _fields(section: type[Section], sections: dict[str, dict[str, str]]) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        is_objective = section is Recipe and name == "algorithm"
        yield name, "AlgorithmFields" if is_objective else _spelled(field.annotation, sections)


def _spelled(annotation: Any, sections: dict[str, dict[str, str]]) -> str:
    """A type as the file says it. The sections that it names are added to `sections`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (None, type(None)):
        return "None"
    if origin is Annotated:
        return _spelled(args[0], sections)
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_spelled(each, sections) for each in args))
    if origin is Literal:
        return f"Literal[{', '.join(repr(each).replace(chr(39), chr(34)) for each in args)}]"
    if origin is tuple:
        return f"Sequence[{' | '.join(dict.fromkeys(_spelled(each, sections) for each in args if each is not ...))}]"
    if origin is dict:
        return f"Mapping[str, {_spelled(args[1], sections)}]"
    if not isinstance(annotation, type) or not issubclass(annotation, Section):
        return "Any" if annotation is Any else str(annotation.__name__)
    name = annotation.__name__.removesuffix("Config") + "Fields"
    if name not in sections:
        sections[name] = dict(_fields(annotation, sections))
        sections[name] |= OF_TRAIN if annotation is MixedEnvironmentConfig else {}
    return name


def write_typed_fields() -> None:
    """Write fields.py, with one line for each field."""
    FIELDS.write_text(typed_fields(), encoding="utf-8")

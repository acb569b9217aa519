"""Finds the recipe's field that an option names: `train RECIPE --steps 5` is written `steps=5`."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Sequence

from octetrl.config.other_names import OURS
from octetrl.config.schema import Recipe
from octetrl.config.section import Section

VERBS = ("train", "check", "eval", "doctor")  # which take section.key=value


def field_hint(option: str, arguments: Sequence[str]) -> str:
    """What to write instead of `option` (`--steps`, `--steps=5`), or an empty text if no field has its name."""
    if not arguments or arguments[0] not in VERBS:
        return ""
    name = option.partition("=")[0].lstrip("-").replace("-", "_")
    fields = list(_fields(Recipe))
    found = [field for field in fields if field == name or field.endswith(f".{name}")]
    trained = [one for one in found if one.startswith("trainer.")]  # before the critic's field of the same name
    certain = [name] if name in found else found if len(found) == 1 else trained
    field = certain[0] if certain else OURS.get(name)
    return f"; a field of the recipe has no dashes: {field}={_value(option, arguments)}" if field else ""


def _value(option: str, arguments: Sequence[str]) -> str:
    for place, word in enumerate(arguments):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and place + 1 < len(arguments) and not arguments[place + 1].startswith("-"):
            return arguments[place + 1]
    return "VALUE"


def _fields(section: type[Section], before: str = "") -> Iterator[str]:
    """The dotted names of the fields of `section` and the sections in it, without those of objectives."""
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *typing.get_args(field.annotation)]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        if inner:
            yield from _fields(inner[0], f"{before}{name}.")
        else:
            yield f"{before}{name}"

"""The first stage of a recipe's checks: names, types and ranges of single fields.

pydantic finds these problems. This module writes each one as a line that says what was given, what is allowed and what
to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError

from octetrl.config.algorithm import OBJECTIVES, SHIPPED, GrpoConfig
from octetrl.config.environment import EnvironmentConfig, EvalSetConfig, MixedEnvironmentConfig, RewardConfig
from octetrl.config.other_names import OPTIONS, OURS
from octetrl.config.schema import DataSource, HeldOutSource, Recipe
from octetrl.config.section import Problem, Section
from octetrl.system.errors import nearest

SECTION_BY_NAME = "environments"  # a mapping from names to sections
_LINES = "write `key: value` lines under it"
_LINES_OF_FIELDS = "write its fields as `key: value` lines under it"
_WORDS = {
    "string_type": "is not a text; put it in quotes",
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_type": "is not a number",
    "bool_type": "is neither true nor false",
    "string_pattern_mismatch": "may only contain small letters, digits, '_', '-' and '.'; rename it",
    "tuple_type": "is not a list; write [a, b]",
    "too_short": "has too few values; give at least {min_length:,}",
    "too_long": "has too many values; give at most {max_length:,}",
    "dict_type": f"is not a mapping; {_LINES}",
    "model_type": f"is not a section; {_LINES_OF_FIELDS}",
    "greater_than": "is out of range; it must be above {gt:,.10g}",
    "greater_than_equal": "is out of range; it must be at least {ge:,.10g}",
    "less_than": "is out of range; it must be below {lt:,.10g}",
    "less_than_equal": "is out of range; it must be at most {le:,.10g}",
}
_OF_SEVERAL = {
    ("environment", name) for name in MixedEnvironmentConfig.model_fields if name not in EnvironmentConfig.model_fields
}
_ENTRIES: Mapping[str, type[Section]] = {  # of fields whose entries have names
    "data.eval_dataset": HeldOutSource,
    "eval_dataset": EvalSetConfig,
    "reward": RewardConfig,
}
_ALMOST = 0.8  # how close the spelling of a field in another section has to be
_PLACEHOLDER_MODEL = {"path": "unknown"}  # replaces a missing model while the other fields are checked


def unreadable_texts(value: Any, name: str = "") -> Iterator[Problem]:
    """Yield the texts that are not UTF-8, such as a path with other bytes in it. JSON has no form for them."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from unreadable_texts(key, name or repr(key))
            yield from unreadable_texts(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for part in value:
            yield from unreadable_texts(part, name)
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        yield Problem((name,), f"{name}: {value!r} is not UTF-8 text; rename it, or give another")


def without_nulls(tree: dict[str, Any], schema: type[Section] = Recipe) -> dict[str, Any]:
    """The tree without each null of a field that has a default other than null: null means that a field is not set."""
    kept = {}
    for key, value in tree.items():
        field, section = schema.model_fields.get(key), section_of(schema, key)
        choices = list(_choices(field.annotation)) if field is not None else []
        if value is None and field is not None and not field.is_required() and type(None) not in choices:
            continue
        if key == SECTION and schema is Recipe and isinstance(value, dict):
            section = OBJECTIVES.get(str(value.get("name")), section)
        by_name = get_args(choices[0])[-1] if choices and get_origin(choices[0]) is dict else None
        if isinstance(value, dict) and section is not None:
            value = without_nulls(value, section)
        elif isinstance(value, dict) and isinstance(by_name, type) and issubclass(by_name, Section):
            value = {name: without_nulls(one, by_name) if isinstance(one, dict) else one for name, one in value.items()}
        kept[key] = value
    return kept


def schema_problems(error: ValidationError, tree: dict[str, Any]) -> tuple[list[Problem], dict[str, Any]]:
    """Convert pydantic's errors to problems, and return the tree without the wrong fields for the next stage."""
    sound = json.loads(json.dumps(tree))
    problems, misplaced = [], []
    details = error.errors(include_url=False)
    containers = {detail["loc"][:-1] for detail in details}
    for detail in details:
        if detail["type"] == "too_short" and detail["loc"] in containers:
            continue  # only because of the wrong parts, which are reported themselves
        location = detail["loc"]
        if location[0] == SECTION and len(location) > 1:  # pydantic inserts who wrote the objective, and its name
            location = (SECTION, *location[3 if location[1] == SHIPPED else 2 :])
        field = _field_of(location)
        if detail["type"] == "extra_forbidden" and field[:-1] == (SECTION,) and owners(field[-1]):
            misplaced.append(field[-1])
        elif detail["type"] == "extra_forbidden" and len(field) == len(location):
            problems.append(_unknown_key(field, _schema_at(field[:-1], tree)))
        elif detail["type"] == "missing" and len(field) == len(location):
            problems.append(Problem((".".join(field),), _missing(field)))
        elif detail["type"] == "union_tag_invalid":
            problems.append(_unknown_name((*field, "name"), detail))
        else:
            problems.append(Problem((".".join(field),), _wrong_value(field, {**detail, "loc": location})))
        lacking = detail["type"] == "missing" and 1 < len(field) == len(
            location
        )  # then the whole section must be removed
        _remove(sound, field[:-1] if lacking or field == (SECTION, "name") else field)
    if misplaced:
        problems.append(misplaced_fields(tree[SECTION]["name"], misplaced))
    sound.setdefault("model", _PLACEHOLDER_MODEL)
    sound.setdefault(SECTION, {"name": DEFAULT_NAME})
    return problems, sound


def _unknown_name(field: tuple[str, ...], detail: Any) -> Problem:
    """Report an unknown name in a section that is chosen by name."""
    name, given = ".".join(field), detail["input"][field[-1]]
    words = re.findall(r"'([^']*)'", detail["ctx"]["expected_tags"])
    text = f"{name}: {_show(given)} is not allowed; choose one of {', '.join(words)}{nearest(str(given), words)}"
    return Problem((name,), text)


def _field_of(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The keys that lead to the schema's field. Positions inside a list or a free mapping are left out."""
    keys: list[str] = []
    schema: type[Section] | None = Recipe
    for part in location:
        if schema is None or part == "[key]":
            break
        keys.append(str(part))
        schema = MixedEnvironmentConfig if _is_name(keys) else section_of(schema, str(part))
        schema = Section if keys == [SECTION_BY_NAME] else schema
    return tuple(keys)


def _is_name(keys: Sequence[str]) -> bool:
    """Whether the last key is the name of one of several environments."""
    return len(keys) == 2 and keys[0] == SECTION_BY_NAME


def _schema_at(keys: Sequence[str], tree: Mapping[str, Any]) -> type[Section]:
    if tuple(keys) == (SECTION,):
        return OBJECTIVES[tree[SECTION]["name"]]
    schema: type[Section] = Recipe
    for depth, key in enumerate(keys, start=1):
        schema = MixedEnvironmentConfig if _is_name(keys[:depth]) else section_of(schema, key) or schema
    return schema


def _unknown_key(keys: tuple[str, ...], schema: type[Section]) -> Problem:
    """Report a key that `schema` lacks, with the field that may be meant."""
    full, parent, name = ".".join(keys), ".".join(keys[:-1]), keys[-1]
    if keys in _OF_SEVERAL:
        text = f"{name} belongs to one of several environments: {SECTION_BY_NAME}.NAME.{name}"
        return Problem((full,), f"{full}: unknown key; {text}")
    if not parent and name in OPTIONS:
        return Problem(
            (full,), f"{full}: unknown key; what continues a run is no field of the recipe, but {OPTIONS[name]}"
        )
    ours = OURS.get(name, "")
    if ours and (parent != SECTION or not ours.startswith(f"{SECTION}.") or ours.split(".")[1] in schema.model_fields):
        meant = [ours]
    else:
        meant = _elsewhere(parent, name)
    hint = nearest(name, schema.model_fields)
    if not meant and hint:
        return Problem((full, ".".join(filter(None, (parent, _named(hint))))), f"{full}: unknown key{hint}")
    if not meant and (almost := nearest(name, _by_name(), _ALMOST)):
        meant = _elsewhere(parent, _named(almost))
    hint = f"; allowed are {', '.join(schema.model_fields)}"
    if meant:
        hint = f"; did you mean {' or '.join(repr(each) for each in meant)}?"
    return Problem((full, *meant[:1]), f"{full}: unknown key{hint}")


def _named(hint: str) -> str:
    """The name that a hint of `nearest` suggests."""
    return hint.split("'")[1]


def _elsewhere(parent: str, name: str) -> list[str]:
    """The fields with this name that `parent` may have been confused with: those below it, or else those of a section
    of its own. Without a parent, all."""
    named = _by_name().get(name, [])
    below = [full for full in named if full.startswith(f"{parent}.")]
    return below or [full for full in named if not parent or full.count(".") <= 1]


def _by_name() -> dict[str, list[str]]:
    """The full names of all fields, by their last part."""
    by_name: dict[str, list[str]] = {}
    for full in dict.fromkeys(field_names(Recipe)):
        by_name.setdefault(full.split(".")[-1], []).append(full)
    return by_name


def field_names(schema: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields and sections of `schema`, those of every objective too, some twice."""
    for name in schema.model_fields:
        yield prefix + name
        for section in _sections_of(schema, name):
            yield from field_names(section, f"{prefix}{name}.")


def _missing(field: tuple[str, ...]) -> str:
    hint = "; for example `model: {path: models/Qwen3-0.6B}`" if field == ("model",) else ""
    return f"{'.'.join(field)}: missing{hint}"


def _wrong_value(field: tuple[str, ...], detail: Any) -> str:
    name = ".".join(field)
    if len(detail["loc"]) > len(field):
        parts = [part for part in detail["loc"][len(field) :] if not str(part).startswith("[")]  # "[key]"
        name += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    if detail["type"] == "extra_forbidden":
        known = _ENTRIES.get(".".join(field), _ENTRIES.get(field[-1], DataSource)).model_fields
        hint = nearest(str(detail["loc"][-1]), known) or f"; allowed are {', '.join(known)}"
        return f"{name}: unknown key{hint}"
    if field == ("trainer", "optimizer", "betas") and detail["type"] in ("missing", "too_long", "too_short"):
        return f"{name}: two numbers are needed, such as [0.9, 0.95]"
    if detail["type"] == "missing":
        return f"{name}: missing"
    kind = "model_type" if detail["type"] == "dict_type" and field == (SECTION,) else detail["type"]
    return value_problem(name, {**detail, "type": kind})


def value_problem(name: str, detail: Any) -> str:
    """The line for a value that pydantic refuses. name: of the field; detail: pydantic's error."""
    if detail["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'|\b(\d+|True|False)\b", detail["ctx"]["expected"])
        words = [text or plain.lower() for text, plain in allowed]
        hint = nearest(str(detail["input"]), words)
        return f"{name}: {_show(detail['input'])} is not allowed; choose one of {', '.join(words)}{hint}"
    if detail["type"] == "string_pattern_mismatch" and name.startswith(f"{SECTION_BY_NAME}."):
        given = "an empty name" if not detail["input"] else f"the name {_show(detail['input'])}"
        return f"{SECTION_BY_NAME}: {given} is not allowed; use small letters, digits, '_' and '-', as in `sums`"
    if detail["type"] in ("int_type", "int_from_float") and _is_huge(detail["input"]):
        return f"{name}: {_show(detail['input'])} is out of range; give a smaller number"
    wording = _WORDS.get(detail["type"])
    reason = "is not valid: " + detail["msg"].removeprefix("Value error, ")
    return f"{name}: {_show(detail['input'])} {reason if wording is None else wording.format(**detail.get('ctx', {}))}"


def _is_huge(value: Any) -> bool:
    """Whether it is a whole number beyond those of 64 bits, which becomes a float on its way."""
    return isinstance(value, float) and abs(value) >= 2.0**63


def for_command_line(text: str) -> str:
    """The text of a problem that an override has: it names overrides instead of lines of a file."""
    name = text.partition(":")[0].replace("[", ".").replace("]", "")
    given = re.match(r"model: '([^']*)' ", text)
    fields = f"write model.path={given[1]}" if given else f"write {name}.FIELD=value"
    return text.replace(_LINES_OF_FIELDS, fields).replace(_LINES, f"write {name}.KEY=value")


def for_python(text: str) -> str:
    """The text of a problem of `octetrl.train`: it names arguments instead of lines of a file."""
    if text == _missing(("model",)):
        return "model: missing; give a Hugging Face folder, such as model='models/Qwen3-0.6B'"
    if dataset := re.match(r"(environments\.[^.:]+\.|environment\.)dataset: missing; ", text):
        section = dataset[1].removeprefix("environment.")
        return section + "tasks: missing; give a JSONL file, or a list of {'prompt': ..., 'answer': ...}"
    name = text.partition(":")[0].rpartition(".")[2]
    return text.replace(_LINES_OF_FIELDS, f"give {name}={{...}}").replace(_LINES, f"give {name}={{...}}")


def is_field(keys: Sequence[str]) -> bool:
    """Whether a recipe has a field or section of this dotted name."""
    return ".".join(keys) in field_names(Recipe)


def _show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else f"'{value}'"
    return text if len(text) <= 60 else text[:57] + "..."


def _remove(tree: dict[str, Any], keys: tuple[str, ...]) -> None:
    node: Any = tree
    for key in keys[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(keys[-1], None)


def section_of(schema: type[Section], key: str) -> type[Section] | None:
    """Return the class of the section `key` in `schema`, also if it may be null. None: a plain field, or unknown.

    If the section's class is chosen by name, return the class of its default."""
    return next(_sections_of(schema, key), None)


def _sections_of(schema: type[Section], key: str) -> Iterator[type[Section]]:
    field = schema.model_fields.get(key)
    annotation = field.annotation if field is not None else None
    for choice in _choices(annotation):
        if isinstance(choice, type) and issubclass(choice, Section):
            yield choice


def _choices(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _choices(get_args(annotation)[0])
    elif get_origin(annotation) in (UnionType, Union):
        for choice in get_args(annotation):
            yield from _choices(choice)
    else:
        yield annotation


def may_be_null(schema: type[Section], key: str) -> bool:
    """Whether null turns the section `key` off. This holds if null is its default."""
    return schema.model_fields[key].default is None


SECTION = "algorithm"
DEFAULT_NAME = GrpoConfig().name


def owners(field: str) -> list[str]:
    """List the objectives that have the field."""
    return [name for name, section in OBJECTIVES.items() if field in section.model_fields]


def name_objective(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Name an objective in the tree's `algorithm` section, and remove fields of other objectives that are null."""
    given = tree.get(SECTION, {})
    if not isinstance(given, dict):
        return dict(tree)
    section = {"name": DEFAULT_NAME, **given}
    kept = {key: value for key, value in section.items() if value is not None or not _is_foreign(section["name"], key)}
    return {**tree, SECTION: kept}


def misplaced_fields(name: str, fields: Iterable[str]) -> Problem:
    """Report all fields of the section that belong to other objectives, as one problem."""
    fields = list(fields)
    by_owners: dict[str, list[str]] = {}
    for field in fields:
        by_owners.setdefault(_listed(owners(field)), []).append(field)
    one = len(fields) == 1
    belong = [
        f"{'it' if one else ', '.join(group)} {'belongs' if len(group) == 1 else 'belong'} to {names}"
        for names, group in by_owners.items()
    ]
    which, nulls = "it" if one else "them", " ".join(f"{SECTION}.{field}=null" for field in fields)
    text = (
        f"{SECTION}.{', '.join(fields)}: {name} has no such field{'' if one else 's'}; {'; '.join(belong)}; remove"
        f" {which}, or give {nulls} where a base file has {which}, or choose another {SECTION}.name"
    )
    return Problem((*(f"{SECTION}.{field}" for field in fields), f"{SECTION}.name"), text)


def _listed(names: list[str]) -> str:
    """Name these objectives in the shorter way: list them, or list the exceptions."""
    others = [name for name in OBJECTIVES if name not in names]
    return ", ".join(names) if len(names) <= len(others) else f"every objective except {', '.join(others)}"


def _is_foreign(name: Any, field: str) -> bool:
    section = OBJECTIVES.get(name) if isinstance(name, str) else None
    return section is not None and field not in section.model_fields and bool(owners(field))

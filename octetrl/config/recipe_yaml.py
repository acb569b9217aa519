"""Read the YAML of a recipe: plain data only, and scalars as YAML 1.2 means them.

`1e-6` is a number. `1:30`, `010`, `yes` and `2024-01-01` are texts. A key given twice, a key that is not a text, an
alias (`*name`, of which a few lines can expand to gigabytes), a tag (`!!int`) and a number that is not finite are
errors.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from octetrl.system.errors import UserError

_PLAIN: tuple[tuple[str, str, str, Callable[[str], Any]], ...] = (  # tag, pattern, first letters, value of the text
    ("null", r"~|null|Null|NULL|", "~nN", lambda _: None),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    ("int", r"[-+]?(0|[1-9][0-9_]{0,24})", "-+0123456789", lambda text: int(text.replace("_", ""))),
    (
        "float",
        r"[-+]?(((0|[1-9][0-9_]*)(\.[0-9_]*)?|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
        "-+.0123456789",
        lambda text: float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan")),
    ),
)


class RecipeDumper(yaml.SafeDumper):
    """A YAML dumper that quotes every text which `parse_yaml` would not read as text."""


RecipeDumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first, _ in _PLAIN:
    _letters = [*_first, ""] if _tag == "null" else list(_first)
    RecipeDumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _letters)


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML into plain data: text, numbers, booleans, null, lists, and mappings with text keys.

    libyaml reads a recipe five times faster. What it refuses, and tabs and byte order marks, where it accepts more, are
    for PyYAML's own parser, whose errors are the clearer ones. libyaml also reads a few texts that PyYAML refuses, such
    as `[a?b]`; texts that both read have the same values."""
    if yaml.__with_libyaml__ and not {"\t", "\ufeff"} & set(text):
        with contextlib.suppress(yaml.YAMLError, UnicodeError, RecursionError):
            documents = _documents(text, yaml.CSafeLoader)
            if len(documents) == 1:
                return documents[0]
    try:
        parsed = _documents(text, yaml.SafeLoader)
    except yaml.constructor.ConstructorError as error:
        raise UserError(f"{source}{_where(error)}: {error.problem}") from None
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{source}{_where(error)}: not YAML, {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not YAML, {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UserError(f"{source}: not a recipe, it is nested too deeply") from None
    if len(parsed) > 1:
        raise UserError(f"{source}: not a recipe, it has {len(parsed)} documents; remove the lines of `---`")
    return parsed[0] if parsed else None


def _documents(text: str, loader: Any) -> list[Any]:
    events = yaml.parse(text, Loader=loader)
    return [_value(next(events), events) for event in events if isinstance(event, yaml.DocumentStartEvent)]


def _value(event: yaml.Event, events: Iterator[yaml.Event]) -> Any:
    """The value that begins with this event; reads the events that belong to it."""
    if isinstance(event, yaml.AliasEvent):
        raise _refusal(f"the alias *{event.anchor} is not allowed in a recipe; write the value out", event)
    if tag := getattr(event, "tag", None):
        raise _refusal(f"{tag.replace('tag:yaml.org,2002:', '!!')} is not allowed in a recipe", event)
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event)
    if isinstance(event, yaml.SequenceStartEvent):
        return [_value(item, events) for item in _until(yaml.SequenceEndEvent, events)]
    assert isinstance(event, yaml.MappingStartEvent), event
    mapping: dict[str, Any] = {}
    for key in _until(yaml.MappingEndEvent, events):
        name = _value(key, events)
        if not isinstance(name, str):
            given = repr(key.value) if isinstance(key, yaml.ScalarEvent) else "of a list or a mapping"
            raise _refusal(f"the key {given} is not a text; put it in quotes", key)
        if name in mapping:
            raise _refusal(f"the key '{name}' is given twice; remove one of them", key)
        mapping[name] = _value(next(events), events)
    return mapping


def _until(end: type[yaml.Event], events: Iterator[yaml.Event]) -> Iterator[yaml.Event]:
    for event in events:
        if isinstance(event, end):
            return
        yield event


def _scalar(event: yaml.ScalarEvent) -> Any:
    text: str = event.value
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _refusal(f"{text!r} contains half of a character; write the whole character", event)
    if event.style:  # in quotes, or a block of text
        return text
    for _, pattern, _, convert in _PLAIN:
        if re.fullmatch(pattern, text):
            value = convert(text.lower() if "." in text else text)
            if isinstance(value, float) and not math.isfinite(value):
                raise _refusal(f"{text} is not a finite number; give a finite one", event)
            return value
    return text


def _refusal(problem: str, place: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, place.start_mark)


def _where(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f", line {mark.line + 1}" if mark is not None else ""

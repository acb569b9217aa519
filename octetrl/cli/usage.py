"""A usage error in one line: what was given and what is allowed, in place of a validator's words.

An option that names a field of the recipe gets the field's form: `train RECIPE --steps 5` is written `steps=5`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from octetrl.config.other_names import OPTIONS, OURS
from octetrl.config.problems import field_names
from octetrl.config.schema import Recipe
from octetrl.system.errors import nearest

TAKE_FIELDS = ("train", "check", "eval", "doctor")  # which take section.key=value
SHORT = {"generate --prompts": "; write -p TEXT (--prompt) for each prompt, or --input FILE for many"}
_SAYS = (
    (r"Input should be a valid number.*", "is not a number"),
    (r"Input should be a valid integer.*", "is not a whole number"),
    (r"Input should be greater than or equal to (\S+)", r"is out of range; it must be at least \1"),
    (r"Input should be less than or equal to (\S+)", r"is out of range; it must be at most \1"),
    (r"Input should be greater than (\S+)", r"is out of range; it must be above \1"),
    (r"Input should be less than (\S+)", r"is out of range; it must be below \1"),
)


def usage_text(message: str, arguments: Sequence[str]) -> str:
    """A usage error in one line: what was given, what is allowed."""
    text = " ".join(message.split())
    wrong = re.fullmatch(r"Invalid value for '(.*)': (?:Value error, )?(.*?)\.?", text)
    if wrong is not None:
        option, problem = wrong.groups()
        return _wrong_value(option.split("' / '"), problem, arguments)
    extra = re.fullmatch(r"Got unexpected extra arguments? ?(?:\(s\) )?\((.*)\)", text)
    if extra is not None:
        return f"'{extra[1]}' is one argument too many; leave it out, or write it after an option"
    unknown = re.match(r"No such option: (\S+)", text)
    if unknown is not None:
        possible = re.search(r"\(Possible options: (.*)\)", text)
        hint = nearest(unknown[1], possible[1].split(", ")) if possible else ""
        hint = field_hint(unknown[1], arguments) or SHORT.get(f"{next(iter(arguments), '')} {unknown[1]}", hint)
        return f"{unknown[1]}: there is no such option{hint}"
    return text


def _wrong_value(options: Sequence[str], problem: str, arguments: Sequence[str]) -> str:
    value = _value_of(options, arguments)
    given = "" if value is None else f"'{value}' "
    choice = re.fullmatch(r"'(.*?)' is not one of (.*)", problem)
    if choice is not None:
        allowed = [word.strip(" '") for word in choice[2].split(",")]
        return f"{options[0]}: '{choice[1]}' is not allowed; choose one of {', '.join(allowed)}"
    for pattern, words in _SAYS:
        found = re.fullmatch(pattern, problem)
        if found is not None:
            return f"{options[0]}: {given}{found.expand(words)}"
    return f"{options[0]}: {given}{problem}"


def _value_of(options: Sequence[str], arguments: Sequence[str]) -> str | None:
    """The value on the command line."""
    for word, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name in options:
            return value if equals else following
    return None


def field_hint(option: str, arguments: Sequence[str]) -> str:
    """What to write instead of `option` (`--steps`, `--steps=5`), or an empty text if no field has its name."""
    if not arguments or arguments[0] not in TAKE_FIELDS:
        return ""
    name = option.partition("=")[0].lstrip("-").replace("-", "_")
    fields = dict.fromkeys(field_names(Recipe))
    sections = {field.rpartition(".")[0] for field in fields}
    named = [field for field in fields if f".{field}".endswith(f".{name}") and field not in sections]
    trained = [field for field in named if field.startswith("trainer.")]  # before the critic's field of the same name
    certain = [name] if name in named else named if len(named) == 1 else trained
    if not certain and name in OPTIONS:
        return f"; did you mean '{OPTIONS[name]}'?"
    field = certain[0] if certain else OURS.get(name)
    value = _value_of([option.partition("=")[0]], arguments)
    shown = "VALUE" if value is None or value.startswith("-") else value
    return f"; a field of the recipe has no dashes: {field}={shown}" if field else ""

"""The site's page of recipe fields: each with its type, default and meaning, from the JSON schema of json_schema.py.

A section that several others have,
such as an optimizer, is written once. Objectives share most of their fields: each meaning of a field is one row, which
lists its default for each objective where they differ. All rows of a field are beside one another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from octetrl.config.algorithm import OBJECTIVES

HEAD = """\
# Recipe fields

To write a recipe, copy a shipped one, change it, and check it. `octetrl check` prints one line for each problem, and
whether the run fits into the memory:

```bash
octetrl recipes --copy grpo_chain-sum_qwen3-0.6b_1gpu_fp8-full --to mine
octetrl check mine/grpo_chain-sum_qwen3-0.6b_1gpu_fp8-full.yaml
```

A recipe is a YAML file of sections. Every field is optional, except the model. This page lists all of them. It is made
from the schema in `octetrl/config/schema.py` by `make schema`; editors read the same schema from
`recipes/recipe.schema.json`. [Recipes, line by line](recipes.md) explains some of the shipped ones.

- On the command line a field is its dotted name: `octetrl train RECIPE trainer.optimizer.lr=1e-5`.
- In Python a section is a dictionary: `octetrl.train(RECIPE, trainer={"optimizer": {"lr": 1e-5}})`.
- `null` means that the field is not set. The last column says what happens then.
"""
Schema = dict[str, Any]


def page(schema: Schema) -> str:
    """Return the page's Markdown for the schema of a recipe."""
    top = {name: field for name, field in schema["properties"].items() if _section(field, schema) is None}
    top.pop("algorithm", None)
    parts = [HEAD, "## Top level\n", *_table(top, schema)]
    written: dict[str, str] = {}
    for name, field in schema["properties"].items():
        if name == "algorithm":
            parts += _algorithm(schema)
        elif _section(field, schema) is not None:
            parts += _sections(name, field, schema, written)
    return "\n".join(parts).rstrip() + "\n"


def _sections(name: str, field: Schema, schema: Schema, written: dict[str, str]) -> Iterator[str]:
    """The heading, the text and the table of one section, then the sections inside it.

    `written`: names of the sections so far, by their text. One with the same fields refers to the earlier one.
    """
    section = _section(field, schema)
    assert section is not None
    given = field.get("default")
    own = given if isinstance(given, dict) else {}
    fields = {
        inner: form | {"default": own[inner]} if inner in own else form for inner, form in section["properties"].items()
    }
    yield f"\n{'##' if '.' not in name else '###'} `{name}`\n"
    if text := field.get("description") or section.get("description"):
        yield f"{_text(text)}\n"
    key = json.dumps({inner: {**form, "default": None} for inner, form in section["properties"].items()})
    if earlier := written.get(key):
        defaults = _sections_defaults(earlier, schema)
        others = [
            f"`{inner}` is `{_yaml(form['default'])}`"
            for inner, form in fields.items()
            if form.get("default") != defaults[inner]
        ]
        anchor = earlier.replace(".", "").replace("`", "")
        differ = f", except that {', '.join(others)} by default" if others else ""
        yield f"It has the fields of [`{earlier}`](#{anchor}){differ}."
        return
    written[key] = name
    yield from _table(fields, schema)
    for inner, form in fields.items():
        of_mapping = next(filter(None, map(_of_mapping, _choices(form))), None)
        if _section(form, schema) is not None:
            yield from _sections(f"{name}.{inner}", form, schema, written)
        elif of_mapping is not None and _section(of_mapping, schema) is not None:
            yield from _sections(f"{name}.{inner}.NAME", of_mapping, schema, written)


def _sections_defaults(name: str, schema: Schema) -> Schema:
    """The defaults of a section's fields, as they are where it stands in a recipe."""
    here: Schema = schema
    defaults: Schema = {}
    for part in name.split("."):
        field = here["properties"][part]
        inner = defaults.get(part, field.get("default"))
        here = _section(field, schema) or {}
        defaults = {key: form.get("default") for key, form in here["properties"].items()}
        defaults |= inner if isinstance(inner, dict) else {}
    return defaults


def _algorithm(schema: Schema) -> Iterator[str]:
    """One table of objectives, and one of all their fields."""
    yield "\n## `algorithm`\n"
    yield "`algorithm.name` chooses the objective. [Algorithms](algorithms.md) compares them.\n"
    yield "| `algorithm.name` | what it is |\n|---|---|"
    rows: dict[str, dict[tuple[str, str], dict[str, str]]] = {}
    for name, section in OBJECTIVES.items():
        defined = schema["$defs"][section.__name__]
        yield f"| `{name}` | {_text(defined.get('description', ''))} |"
        for field, form in defined["properties"].items():
            if field != "name":
                resolved = _resolved(form, schema)
                key = (_type(resolved, schema), _text(_description(resolved, schema)))
                rows.setdefault(field, {}).setdefault(key, {})[name] = _default(resolved)
    yield "\nA field that has another meaning for some objectives has several rows.\n"
    yield "| field | type | default | of | what it does |\n|---|---|---|---|---|"
    for field, meanings in rows.items():
        for (kind, text), defaults in meanings.items():
            yield f"| `{field}` | {kind} | {_defaults(defaults)} | {_owners(list(defaults))} | {text} |"


def _defaults(of_objective: dict[str, str]) -> str:
    """The most frequent default, then the others with the names of their objectives."""
    shown: dict[str, list[str]] = {}
    for name, default in of_objective.items():
        shown.setdefault(default, []).append(name)
    first, *others = sorted(shown.items(), key=lambda entry: -len(entry[1]))
    return "; ".join([first[0], *(f"{default} for {', '.join(names)}" for default, names in others)])


def _owners(names: list[str]) -> str:
    missing = [name for name in OBJECTIVES if name not in names]
    if not missing:
        return "all"
    return f"all except {', '.join(missing)}" if len(missing) < len(names) else ", ".join(names)


# ---------------------------------------------------------------- one row


def _table(fields: dict[str, Schema], schema: Schema) -> Iterator[str]:
    yield "| field | type | default | what it does |\n|---|---|---|---|"
    for name, field in fields.items():
        resolved = _resolved(field, schema)
        if _section(field, schema) is not None:
            default = "`null`" if resolved.get("default", 0) is None else "as below"
            yield f"| `{name}` | section | {default} | {_text(_description(resolved, schema))} |"
        else:
            may_lack = name == "extends" or resolved.get("type") == "object"
            default = _default(resolved) if may_lack or "default" in resolved else "required"
            yield f"| `{name}` | {_type(resolved, schema)} | {default} | {_text(_description(resolved, schema))} |"


def _resolved(field: Schema, schema: Schema) -> Schema:
    """A field that refers to another objective's same field, written out."""
    reference = field.get("$ref", "")
    if "/properties/" not in reference:
        return field
    _, _, definition, _, name = reference.split("/")
    return dict(_resolved(schema["$defs"][definition]["properties"][name], schema))


def _section(field: Schema, schema: Schema) -> Schema | None:
    """The definition of a field that is a section with fields of its own."""
    for choice in _choices(field):
        reference = choice.get("$ref", "")
        if reference and "/properties/" not in reference:
            definition: Schema = schema["$defs"][reference.rpartition("/")[2]]
            return definition if "properties" in definition else None
    return None


def _choices(field: Schema) -> Iterator[Schema]:
    """The field, and the forms of which it may be one."""
    yield field
    for choice in (*field.get("anyOf", []), *field.get("oneOf", [])):
        yield from _choices(choice)


def _of_mapping(field: Schema) -> Schema | None:
    """What a mapping holds; None for another field, or one that may hold anything."""
    inner = field.get("additionalProperties") or next(iter(field.get("patternProperties", {}).values()), None)
    return inner if isinstance(inner, dict) and inner else None


def _description(field: Schema, schema: Schema) -> str:
    section = _section(field, schema)
    return str(field.get("description") or (section or {}).get("description", ""))


def _type(field: Schema, schema: Schema) -> str:
    """A field's type with its range: `a`, `b`; number, 0 to 1; list of strings."""
    if several := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(_type(choice, schema) for choice in several)
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{_yaml(value)}`" for value in field["enum"])
    if "$ref" in field:
        return "section"
    kind = str(field.get("type", "any"))
    if kind == "array":
        return _array(field, schema)
    if kind == "object":
        inner = _of_mapping(field)
        return "mapping" if inner is None else f"mapping to {_type(inner, schema)}"
    return {"null": "`null`", "boolean": "true or false", "any": "any"}.get(kind, kind + _range(field))


def _array(field: Schema, schema: Schema) -> str:
    if places := field.get("prefixItems"):
        return f"list of {len(places)}: {'; '.join(_type(place, schema) for place in places)}"
    items = field.get("items") or {}
    if "enum" in items:
        return f"list of {_type(items, schema)}"
    return f"list of {_type(items, schema)}" if items else "list"


def _range(field: Schema) -> str:
    least, most = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    words = []
    if least is not None and most is not None:
        words.append(f"{_number(least)} to {_number(most)}")
    else:
        words += [f"at least {_number(least)}"] if least is not None else []
        words += [f"at most {_number(most)}"] if most is not None else []
    words += [f"above {_number(above)}"] if above is not None else []
    words += [f"below {_number(below)}"] if below is not None else []
    return "".join(f", {word}" for word in words)


def _number(value: float) -> str:
    """A bound: powers of two from 2^16 as such, others with commas."""
    if value == int(value) and value >= 1 << 16 and int(value).bit_count() == 1:
        return f"2^{int(value).bit_length() - 1}"
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _default(field: Schema) -> str:
    if "default" not in field:
        return "`{}`" if field.get("type") == "object" else "none"
    shown = _yaml(field["default"])
    return "a text of several lines" if "\n" in shown else f"`{shown}`".replace("|", "\\|")


def _yaml(value: Any) -> str:
    """A value as a recipe says it, on one line."""
    if isinstance(value, float):
        return f"{value:g}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.6g}"
    if isinstance(value, dict) and value:
        return "{" + ", ".join(f"{name}: {_yaml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _text(text: str) -> str:
    """A description in one cell; `docs/x.md` becomes a link."""
    words = []
    for word in " ".join(text.replace("|", "\\|").replace("None:", "null:").split()).split(" "):
        bare = word.strip("().,;:`")
        if bare.startswith("docs/") and bare.endswith(".md"):
            name = bare.removeprefix("docs/")
            word = word.replace(bare, f"[{name}]({name})")
        words.append(word)
    return " ".join(words)


if __name__ == "__main__":
    from octetrl.config.json_schema import write_json_schema
    from octetrl.config.typed_fields import write_typed_fields

    write_json_schema()
    write_typed_fields()

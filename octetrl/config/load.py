"""A recipe file, what it extends, and the command line's overrides -> one frozen `Recipe`.

    base.yaml  <-  recipe.yaml  <-  section.key=value ...       the later wins, key by key

Rules, all of them:

- `extends: other.yaml` (relative to the file that says it) puts that file underneath; chains are fine, cycles are not.
- Sections merge key by key (`model.lora` may also be null, which turns it off again); every other value replaces,
  lists and `environment.parameters` as a whole. An override reaches inside: `environment.parameters.max_terms=4`.
  The value of an override is YAML; `key=` is null.
- `precision:` stands for its three `fp8` fields. Fields written out in the same file win over it, so does whatever
  comes later; the command line is one such "file", whatever the order of its words. `precision` given later wins
  over fields written out earlier.
- `algorithm.name` chooses the fields of its section; `null` takes away a field of another objective that a file
  underneath gives. Everything else that the objective does not have is an error.
- YAML's traps are closed: `1e-6` is a number, `1:30`, `010`, `yes` and `2024-01-01` are texts, a key given twice is an
  error, so is an alias (`*name`), and anything that is not a finite number.

All problems of a recipe are found before anything is raised; see `config/validate.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from octetrl.config.errors import UserError
from octetrl.config.json_file import read_text
from octetrl.config.objective_keys import drop_defaults_of_others
from octetrl.config.problems import may_be_null, section_of
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem, Section
from octetrl.config.shipped import find_recipe
from octetrl.config.validate import build_recipe

Tree = dict[str, Any]

PRECISIONS: dict[str, Tree] = {
    "bf16": {"rollout": False, "train": False, "kv_cache": "none"},
    "fp8_rollout": {"rollout": True, "train": False, "kv_cache": "none"},
    "fp8": {"rollout": True, "train": True, "kv_cache": "none"},
    "fp8_full": {"rollout": True, "train": True, "kv_cache": "calibrated"},
}
COMMAND_LINE, PYTHON = "command line", "octetrl.train"
MOST_BYTES = 1 << 20  # of a recipe


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, fields: Tree | None = None, training: bool = True
) -> Recipe:
    """The recipe at `path` with `overrides` (`section.key=value`) on top, checked as far as no model is needed.

    fields: the same from Python, as plain data of a recipe's form; it counts as one more file on top.
    training: False for evaluation, which the limits of the algorithm do not concern (top-p, group size, ...).
    Raises UserError: one line for one problem, else a first line and one indented line a problem.
    """
    path = find_recipe(path)
    layers = _read_chain(path)
    if fields is not None:
        layers.append(_Layer(PYTHON, _plain(fields)))
    tree: Tree = {}
    for layer in layers:
        tree = _merge(tree, _with_precision(layer.tree), Recipe)
    given, problems = _parse_overrides(overrides)
    # Sorted so that `precision` comes first: fields written out beside it win.
    for keys, value in sorted(given, key=lambda override: override[0] != ("precision",)):
        override = _nest(keys, value)
        layers.append(_Layer(COMMAND_LINE, override))
        problems += _assign(tree, keys, value)
    recipe, found = build_recipe(tree, training=training)
    problems += found
    if problems:
        raise UserError(_report(str(path), layers, problems))
    assert recipe is not None, "a recipe without problems was not built"
    return recipe


def recipe_tree(path: str | Path) -> Tree:
    """What the file at `path` and all that it extends say, merged and not checked."""
    tree: Tree = {}
    for layer in _read_chain(find_recipe(path)):
        tree = _merge(tree, _with_precision(layer.tree), Recipe)
    return tree


def recipe_from_mapping(tree: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """A recipe made in code from plain data; `precision` means what it means in a file. Raises UserError likewise."""
    plain = _with_precision(_plain(tree))
    recipe, problems = build_recipe(plain)
    if recipe is None:
        raise UserError(_report(source, [], problems))
    return recipe


def _plain(tree: Mapping[str, Any]) -> Tree:
    """Tuples as lists. Raises UserError for what no recipe could hold."""
    try:
        plain: Tree = json.loads(json.dumps(tree, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(f"recipe: {error}; a recipe's fields are text, finite numbers, lists and mappings") from error
    return plain


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; `load_recipe` of it is the same recipe."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=_RecipeDumper, sort_keys=False)


@dataclass(frozen=True, slots=True)
class _Layer:
    source: str  # the file, or "command line"
    tree: Tree


def _read_chain(path: Path) -> list[_Layer]:
    """The file and all that it extends, the furthest ancestor first."""
    chain: list[_Layer] = []
    seen: list[Path] = []
    while True:
        tree = _read_file(path, extended_by=chain[-1].source if chain else None)
        seen.append(path.resolve())
        base = tree.pop("extends", None)
        chain.append(_Layer(str(path), tree))
        if base is None:
            return chain[::-1]
        if not isinstance(base, str) or not base:
            raise UserError(f"{path}: extends: {base!r} is not the path of one recipe; give it as text")
        path = path.parent / base
        if _is_one_of(path, seen):
            cycle = " -> ".join([layer.source for layer in chain] + [str(path)])
            raise UserError(f"{chain[0].source}: extends forms a circle ({cycle}); remove one of them")


def _is_one_of(path: Path, seen: Sequence[Path]) -> bool:
    try:
        return path.resolve() in seen
    except (OSError, RuntimeError, ValueError):  # links in a circle, a NUL: said where the file is read
        return False


def _read_file(path: Path, extended_by: str | None) -> Tree:
    reader = f" ({extended_by} extends it)" if extended_by else ""
    text = read_text(path, f"give the path of a YAML file{reader}", most_bytes=MOST_BYTES)
    tree = _parse_yaml(text, str(path))
    if tree is None:
        raise UserError(f"{path}: the recipe is empty{reader}; it needs at least a `model:` section")
    if not isinstance(tree, dict):
        raise UserError(
            f"{path}: holds a {type(tree).__name__}, not `section: ...` lines{reader}; `octetrl recipes` lists examples"
        )
    return drop_defaults_of_others(tree)


def _parse_overrides(overrides: Iterable[str]) -> tuple[list[tuple[tuple[str, ...], Any]], list[Problem]]:
    given: list[tuple[tuple[str, ...], Any]] = []
    problems: list[Problem] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = tuple(name.strip().split("."))
        if not equals or not all(keys):
            problems.append(Problem((), f"override '{override}' is not section.key=value, such as seed=1"))
            continue
        try:
            given.append((keys, _parse_yaml(text, f"override '{override}'")))
        except UserError as error:
            problems.append(Problem((name,), f"{error}; put the value in quotes"))
    return given, problems


def _with_precision(tree: Tree) -> Tree:
    """The tree with the fields that its `precision` stands for, beneath the ones written out."""
    fields = PRECISIONS.get(str(tree.get("precision")))
    written = tree.get("fp8") or {}
    if fields is None or not isinstance(written, dict):
        return tree
    return {**tree, "fp8": {**fields, **written}}


def _merge(base: Tree, top: Tree, schema: type[Section]) -> Tree:
    """`top` over `base`; sections key by key, everything else as a whole. A section left empty changes nothing."""
    merged = dict(base)
    for key, value in top.items():
        section = section_of(schema, key)
        if section is None or (value is None and may_be_null(schema, key)):
            merged[key] = value
        elif value is None:
            continue
        elif isinstance(value, dict) and isinstance(base.get(key) or {}, dict):
            merged[key] = _merge(base.get(key) or {}, value, section)
        else:
            merged[key] = value
    return merged


def _assign(tree: Tree, keys: tuple[str, ...], value: Any) -> list[Problem]:
    """Put one override into the tree, in place."""
    if keys == ("precision",) and isinstance(value, str) and value in PRECISIONS:
        _assign(tree, ("fp8",), PRECISIONS[value])
    node = tree
    schema: type[Section] = Recipe
    for depth, key in enumerate(keys[:-1]):
        if node.get(key) is None and section_of(schema, key) is not None:
            node[key] = {}  # a section that is null so far
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            text = f"override '{'.'.join(keys)}': {'.'.join(keys[: depth + 1])} is {child!r} and holds no keys"
            return [Problem((), f"{text}; override it as a whole")]
        node, schema = child, (section_of(schema, key) or Section)
    node.update(_merge(node, {keys[-1]: value}, schema))
    return []


def _nest(keys: tuple[str, ...], value: Any) -> Tree:
    for key in reversed(keys):
        value = {key: value}
    return value


def _report(path: str, layers: Sequence[_Layer], problems: Sequence[Problem]) -> str:
    lines = []
    for problem in problems:
        source = _source(path, layers, problem)
        text = " ".join(problem.text.split())
        lines.append(text if source == path and len(problems) > 1 else f"{source}: {text}")
    if len(lines) == 1:
        return lines[0]
    return "\n  ".join([f"{path}: {len(lines)} problems", *lines])


def _source(path: str, layers: Sequence[_Layer], problem: Problem) -> str:
    """Who said it: the last layer that gives one of the problem's fields."""
    for layer in reversed(layers):
        if any(_gives(layer.tree, field.split(".")) for field in problem.fields):
            return layer.source
    return path


def _gives(tree: Any, keys: list[str]) -> bool:
    for key in keys:
        if not isinstance(tree, dict) or key not in tree:
            return False
        tree = tree[key]
    return True


def _parse_yaml(text: str, source: str) -> Any:
    """Plain data: text, numbers, true and false, null, lists and mappings with text keys, nothing shared."""
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
    """YAML 1.2's plain scalars, and nothing that is not plain data."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):  # a few lines of them can stand for gigabytes
            event = self.peek_event()
            raise _refusal(f"the alias *{event.anchor} is not allowed in a recipe; write the value out", event)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError):  # what a tag says, and the text is not
            what = f"{getattr(node, 'value', '')!r} is no {node.tag.rpartition(':')[2]}"
            raise _refusal(f"{what}, as its tag says; leave the tag out", node) from None

    def construct_plain_mapping(self, node: yaml.MappingNode) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _refusal("what is tagged !!map is no mapping; leave the tag out", node)
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise _refusal(f"the key {getattr(key, 'value', '')!r} is not a text; put it in quotes", key)
            if key.value in seen:
                raise _refusal(f"the key '{key.value}' is given twice; remove one of them", key)
            seen.add(key.value)
        self.flatten_mapping(node)
        return self.construct_mapping(node, deep=True)

    def construct_finite_float(self, node: yaml.ScalarNode) -> float:
        value = self.construct_yaml_float(node)
        if not math.isfinite(value):
            raise _refusal(f"{node.value} is not a finite number", node)
        return value

    def construct_text(self, node: yaml.ScalarNode) -> str:
        text = self.construct_yaml_str(node)
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise _refusal(f"{text!r} holds half a character; write the whole one", node)
        return text

    def construct_list(self, node: yaml.SequenceNode) -> list[Any]:
        return self.construct_sequence(node, deep=True)

    def refuse(self, node: yaml.Node) -> None:
        raise _refusal(f"{node.tag.replace('tag:yaml.org,2002:', '!!')} is not allowed in a recipe", node)


class _RecipeDumper(yaml.SafeDumper):
    """Quotes whatever the loader above would read as something else than text."""


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
_RecipeLoader.yaml_constructors = {}  # nothing inherited: what is not named below is refused
_RecipeLoader.yaml_implicit_resolvers, _RecipeDumper.yaml_implicit_resolvers = {}, {}
for _tag, _pattern, _first in _PLAIN_SCALARS:
    for _class in (_RecipeLoader, _RecipeDumper):
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

"""Load a recipe: merge a file, the files that it extends and the command line's overrides into one frozen `Recipe`.

    base.yaml  <-  recipe.yaml  <-  section.key=value ...       each replaces values of those on its left

Rules:

- `extends: other.yaml` names a base file, relative to the extending file, or a shipped recipe by its bare name. A base
  file may extend another one. A cycle is an error.
- Sections merge key by key. Any other value replaces the earlier one as a whole, also a list or
  `environment.parameters`. `model.lora: null` turns LoRA off again.
- An override may set a key inside a mapping: `environment.parameters.max_terms=4`. Its value is YAML. `key=` means
  null.
- `precision:` sets three `fp8` fields. A field written out in the same file overrides it, and so do later files. All
  overrides of the command line count as one file, in any order. A later `precision` overrides fields written earlier.
- `algorithm.name` chooses the fields of its section. `null` removes a field that a base file gives for another
  objective. Any other field that the objective does not have is an error.
- `environment.kind` chooses what `parameters`, `columns`, `reference_marker` and the splits mean. A later file or an
  override that changes the kind drops those of the former kind. The kinds of files (math, jsonl, code) share them.
- `steps` and `epochs` are the run's length: one of them replaces the other of an earlier file.
- `environments` (several, by name) takes the place of `environment`. A file with one of them replaces the other of its
  base files.
- YAML is read as `config/recipe_yaml.py` says: `1e-6` is a number, `yes` and `1:30` are texts.

All problems of a recipe are collected before an error is raised; see `config/validate.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from octetrl.config.environment import EnvironmentConfig
from octetrl.config.problems import for_command_line, for_python, is_field, may_be_null, section_of
from octetrl.config.recipe_yaml import RecipeDumper, parse_yaml
from octetrl.config.rules_environment import FILES
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem, Section
from octetrl.config.shipped import find_recipe, shipped_path
from octetrl.config.validate import build_recipe
from octetrl.system.errors import UserError, nearest, type_of
from octetrl.system.json_file import read_text

Tree = dict[str, Any]

PRECISIONS: dict[str, Tree] = {
    "bf16": {"rollout": False, "train": False, "kv_cache": "none", "format": "block"},
    "fp8_rollout": {"rollout": True, "train": False, "kv_cache": "none", "format": "block"},
    "fp8": {"rollout": True, "train": True, "kv_cache": "none", "format": "block"},
    "fp8_full": {"rollout": True, "train": True, "kv_cache": "calibrated", "format": "block"},
    "mxfp8": {"rollout": True, "train": True, "kv_cache": "none", "format": "mxfp8"},
}
RETIRED: dict[tuple[str, ...], Any] = {  # fields that recipes no longer have, and the value that changes nothing
    ("numerics",): "parity",
    ("rollout", "overdraw"): 1.0,
    ("rollout", "overdraw_return"): "next_step",
}
_OVERRIDE = "override "  # how the text of a problem begins that is an override's alone
COMMAND_LINE, PYTHON = "command line", "octetrl.train"
MOST_BYTES = 1 << 20  # size limit of a recipe file


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, fields: Tree | None = None, training: bool = True
) -> Recipe:
    """Load the recipe at `path`, apply `overrides` (`section.key=value`), and check everything that needs no model.

    fields: overrides from Python, as plain data in a recipe's form. They count as one more file, after `path`.
    training: False for evaluation, which ignores the algorithm's limits (top-p, group size, ...).
    Raises UserError: one line for one problem, otherwise a first line and one indented line per problem.
    """
    path = find_recipe(path)
    layers = _read_chain(path)
    if fields is not None:
        layers.append(_Layer(PYTHON, _plain(fields)))
    tree = _merged(layers)
    given, problems = _parse_overrides(overrides)
    tree = _below_overrides(tree, given)
    unknown = _unknown_names(tree, given)
    problems += unknown
    # Sorted so that `precision` comes first: fields written out in the same place override it.
    for keys, value in sorted(given, key=lambda override: override[0] != ("precision",)):
        override = _nest(keys, value)
        layers.append(_Layer(COMMAND_LINE, override))
        if ".".join(keys[:2]) not in [problem.fields[0] for problem in unknown]:
            problems += _assign(tree, keys, value)
    recipe, of_recipe = build_recipe(tree, training=training)
    problems += of_recipe
    if problems:
        raise UserError(_report(str(path), layers, problems))
    assert recipe is not None, "a recipe without problems was not built"
    return recipe


def recipe_tree(path: str | Path) -> Tree:
    """Merge the file at `path` and all files that it extends, without checks."""
    return _merged(_read_chain(find_recipe(path)))


def recipe_from_mapping(tree: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Build a recipe from plain data in code, with `precision` as in a file. Raises UserError as `load_recipe` does."""
    plain = _with_precision(_plain(tree))
    recipe, problems = build_recipe(plain)
    if recipe is None:
        raise UserError(_report(source, [], problems))
    return recipe


def _plain(tree: Mapping[str, Any]) -> Tree:
    """Convert tuples to lists. Raises UserError for values that a recipe cannot contain."""
    try:
        plain: Tree = json.loads(json.dumps(tree, allow_nan=False))
    except (TypeError, ValueError) as error:
        field = _field_that_is_not_plain(tree)
        raise UserError(
            f"{field or 'recipe'}: {error}; a recipe's fields are text, finite numbers, lists and mappings"
        ) from error
    return plain


def _field_that_is_not_plain(value: Any, name: str = "") -> str:
    """The first field that JSON has no form for; "" if it is none of them alone."""
    if isinstance(value, Mapping):
        fields = (_field_that_is_not_plain(part, f"{name}.{key}".lstrip(".")) for key, part in value.items())
        return next(filter(None, fields), "")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return name
    return ""


def dump_recipe(recipe: Recipe) -> str:
    """Write the resolved recipe as YAML. `load_recipe` reads the same recipe from it."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=RecipeDumper, sort_keys=False)


@dataclass(frozen=True, slots=True)
class _Layer:
    source: str  # the file, or "command line"
    tree: Tree


def _read_chain(path: Path) -> list[_Layer]:
    """Read the file and all files that it extends, the first base first."""
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
            raise UserError(f"{path}: extends: {base!r} is not the path of one recipe; give one path as text")
        path = _base_path(path, base)
        if _was_read(path, seen):
            cycle = " -> ".join([layer.source for layer in chain] + [str(path)])
            raise UserError(f"{chain[0].source}: extends forms a circle ({cycle}); remove one of them")


def _base_path(path: Path, base: str) -> Path:
    """The file that `path` extends: beside it, or else a shipped recipe of this bare name."""
    beside = path.parent / base
    if Path(base).name != base or Path(base).suffix or "\0" in base or os.path.lexists(beside):
        return beside
    try:
        return shipped_path(base)
    except UserError as error:
        raise UserError(
            f"{path}: extends: there is no file '{beside}', and {str(error).partition(': ')[2]}; give the path of a"
            " YAML file, or the name of a shipped recipe"
        ) from None


def _was_read(path: Path, seen: Sequence[Path]) -> bool:
    try:
        return path.resolve() in seen
    except (OSError, RuntimeError, ValueError):  # links in a circle, a NUL: reported when the file is read
        return False


def _read_file(path: Path, extended_by: str | None) -> Tree:
    reader = f" ({extended_by} extends it)" if extended_by else ""
    text = read_text(path, f"give the path of a YAML file{reader}", most_bytes=MOST_BYTES)
    tree = parse_yaml(text, str(path))
    if tree is None:
        raise UserError(f"{path}: the recipe is empty{reader}; it needs at least a `model:` section")
    if not isinstance(tree, dict):
        raise UserError(
            f"{path}: this is {type_of(tree)}, not `section: ...` lines{reader}; `octetrl recipes` lists examples"
        )
    return _without_retired(tree) if is_of_run(path) else tree


def is_of_run(path: Path) -> bool:
    """Whether it is the recipe in the folder of a run, which has every field that recipes had when the run began."""
    return path.name == "config.yaml" and (path.parent / "checkpoints").is_dir()


def _without_retired(tree: Tree) -> Tree:
    """The tree without `RETIRED` fields that change nothing. Any other value is left for the message."""
    for (*sections, key), value in RETIRED.items():
        section: Any = tree
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and key in section and section[key] == value:
            del section[key]
    return tree


def _parse_overrides(overrides: Iterable[str]) -> tuple[list[tuple[tuple[str, ...], Any]], list[Problem]]:
    given: list[tuple[tuple[str, ...], Any]] = []
    problems: list[Problem] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = tuple(name.strip().split("."))
        if not equals or not all(keys):
            value = f"; write {override}=VALUE" if not equals and is_field(keys) else ", such as seed=1"
            problems.append(Problem((), f"{_OVERRIDE}'{override}' is not section.key=value{value}"))
            continue
        try:
            given.append((keys, parse_yaml(text, f"override '{override}'")))
        except UserError as error:
            problems.append(Problem((name,), str(error) if ";" in str(error) else f"{error}; put the value in quotes"))
    return given, problems


def _with_precision(tree: Tree) -> Tree:
    """Add the `fp8` fields that the tree's `precision` sets. Fields written out in the tree keep their values."""
    fields = PRECISIONS.get(str(tree.get("precision")))
    written = tree.get("fp8") or {}
    if fields is None or not isinstance(written, dict):
        return tree
    return {**tree, "fp8": {**fields, **written}}


def _with_one_length(tree: Tree, top: Tree) -> Tree:
    """`tree` without its `steps` if `top` gives `epochs`, and the other way round."""
    for given, other in (("epochs", "steps"), ("steps", "epochs")):
        if top.get(given) is not None and other not in top:
            tree = {key: value for key, value in tree.items() if key != other}
    return tree


def _merged(layers: Iterable[_Layer]) -> Tree:
    tree: Tree = {}
    for layer in layers:
        tree = _merge(_below(_with_one_length(tree, layer.tree), layer.tree), _with_precision(layer.tree), Recipe)
    return tree


def _merge(base: Tree, top: Tree, schema: type[Section]) -> Tree:
    """Merge `top` over `base`: sections key by key, any other value as a whole. An empty section changes nothing."""
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
    """Apply one override to the tree, in place."""
    if keys == ("precision",) and isinstance(value, str) and value in PRECISIONS:
        _assign(tree, ("fp8",), PRECISIONS[value])
    node = tree
    schema: type[Section] = Recipe
    for depth, key in enumerate(keys[:-1]):
        if node.get(key) is None and section_of(schema, key) is not None:
            node[key] = {}  # a section that is null so far
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            text = f"{_OVERRIDE}'{'.'.join(keys)}': {'.'.join(keys[: depth + 1])} is {child!r} and has no keys"
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
        text = for_command_line(text) if source == COMMAND_LINE else text
        text = for_python(text) if source == PYTHON else text
        lines.append(text if source == path and len(problems) > 1 else f"{source}: {text}")
    if len(lines) == 1:
        return lines[0]
    return "\n  ".join([f"{path}: {len(lines)} problems", *lines])


def _source(path: str, layers: Sequence[_Layer], problem: Problem) -> str:
    """The file, or the command line, that a problem comes from: the last layer that gives one of its fields."""
    if problem.text.startswith(_OVERRIDE):
        return COMMAND_LINE
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


_OF_ONE_KIND = ("parameters", "columns", "reference_marker", "split", "subset", "eval_split", "eval_dataset")
_ONE, _SEVERAL = "environment", "environments"


def _below(tree: Tree, top: Tree) -> Tree:
    """`tree` without what the file `top` replaces."""
    if top.get(_SEVERAL) and _ONE not in top:
        tree = {key: value for key, value in tree.items() if key != _ONE}
    elif top.get(_ONE) and not top.get(_SEVERAL):
        tree = {key: value for key, value in tree.items() if key != _SEVERAL}
    new = top.get(_ONE)
    tree = _with_kind(tree, (_ONE,), new["kind"]) if isinstance(new, dict) and "kind" in new else tree
    return _without_preset(tree, top.get("model"))


def _below_overrides(tree: Tree, overrides: Sequence[tuple[tuple[str, ...], Any]]) -> Tree:
    """`tree` without what overrides (keys and values) replace. They count as one file."""
    tree = _with_one_length(tree, {keys[0]: value for keys, value in overrides if len(keys) == 1})
    for keys, value in overrides:
        if keys[-1] == "kind" and (keys[:-1] == (_ONE,) or (len(keys) == 3 and keys[0] == _SEVERAL)):
            tree = _with_kind(tree, keys[:-1], value)
    return _without_preset(tree, {keys[1]: value for keys, value in overrides if keys[:-1] == ("model",)})


def _without_preset(tree: Tree, new: Any) -> Tree:
    """`tree` without its model's preset and random weights, if the section `new` gives a path instead."""
    base = tree.get("model")
    if not isinstance(base, dict) or not isinstance(new, dict):
        return tree
    if not new.get("path") or new.get("preset") or not base.get("preset"):
        return tree
    return {**tree, "model": {key: value for key, value in base.items() if key not in ("preset", "init")}}


def _unknown_names(tree: Tree, overrides: Sequence[tuple[tuple[str, ...], Any]]) -> list[Problem]:
    """Overrides of environments that a tree with `environments` does not have, unless one gives the dataset."""
    known, of_names = tree.get(_SEVERAL), [keys for keys, _ in overrides if keys[0] == _SEVERAL]
    if not isinstance(known, dict) or not known or (_SEVERAL,) in of_names:
        return []
    begun = {keys[1] for keys in of_names if keys[2:] in ((), ("dataset",))}
    return [
        Problem(
            (f"{_SEVERAL}.{name}",),
            f"there is no environment '{name}'; the recipe has {', '.join(known)}{nearest(name, known)}",
        )
        for name in dict.fromkeys(keys[1] for keys in of_names)
        if name not in known and name not in begun
    ]


def _with_kind(tree: Tree, path: tuple[str, ...], kind: Any) -> Tree:
    """`tree` without the fields of the section at `path` that only another kind reads."""
    name, *rest = path
    base = tree.get(name)
    if not isinstance(base, dict):
        return tree
    if rest:
        return {**tree, name: _with_kind(base, tuple(rest), kind)}
    former = base.get("kind", EnvironmentConfig().kind)
    if kind == former or (kind in FILES and former in FILES):
        return tree
    return {**tree, name: {key: value for key, value in base.items() if key not in _OF_ONE_KIND}}

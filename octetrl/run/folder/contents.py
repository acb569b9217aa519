"""What a run learns from besides its recipe: rows of files, source of rewards and environments, the chat template.

`run.json` has a digest of each. A resumed run is refused if one differs and is not allowed (output_folder.py). Tasks
that a program generates are not read for this; the checkpoint has a fingerprint of a few of them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import resolve_name
from pathlib import Path
from tokenize import TokenError
from typing import Any

from octetrl.config.environment import EnvironmentConfig, reward_names
from octetrl.config.schema import Recipe
from octetrl.config.several_environments import section_name
from octetrl.data.mixture import Mixture
from octetrl.environments.python_object import Given, importable_name
from octetrl.environments.tasks import Environment, TaskEnvironment, Taskset
from octetrl.records import Task
from octetrl.system.text import to_utf8
from octetrl.telemetry.sinks import RUN_FILE

Contents = dict[str, dict[str, str]]  # by field: the digest of each part
CONTENTS = "contents"  # their key in run.json
CHAT_TEMPLATE = "chat_template"
NOT_COMPARED = "not compared"  # in place of a digest: a function without a source, as one that was typed in
_ROWS = ("jsonl", "math", "code")  # kinds whose tasks are rows of a file
_INSTALLED = {"site-packages", "dist-packages"}


def contents_of(
    recipe: Recipe,
    given: Given,
    chat_template: Any,
    environments: Mapping[str, Environment],
    taskset: Taskset,
    data: Mixture | None,
) -> Contents:
    """The digests of a run's contents. Reads all tasks and the source files; imports nothing."""
    found: Contents = {CHAT_TEMPLATE: {"text": _digest(json.dumps(chat_template, sort_keys=True))}}
    for name, config in recipe.each_environment.items():
        section = section_name(name)
        found[f"{section}.dataset"] = _tasks(config, environments[name], given)
        if config.eval_split is not None or config.eval_dataset is not None:
            rows = [task for task in taskset.held_out() if task.environment == name]
            field = "eval_split" if config.eval_dataset is None else "eval_dataset"
            found[f"{section}.{field}"] = {"rows": rows_digest(rows)}
        found[f"{section}.reward"] = _reward(config, given)
        found[f"{section}.corpus"] = {} if config.corpus is None else {"files": _files_digest(Path(config.corpus))}
        found[f"{section}.tools"] = {file: one for tool in config.tools for file, one in _source(tool, given).items()}
    for name, digest in ({} if data is None else data.digests).items():
        found[f"data.sources.{name}" if recipe.data.sources else "algorithm.conversations"] = {"rows": digest}
    for name, digest in ({} if data is None else data.eval_digests).items():
        found[f"data.eval_dataset.{name}" if name else "data.eval_dataset"] = {"rows": digest}
    found["algorithm.name"] = _source(recipe.algorithm.name, given)
    return {field: parts for field, parts in found.items() if parts}


def read_contents(folder: Path) -> Contents:
    """The digests in a run folder; empty if its run.json has none."""
    try:
        found = json.loads((folder / RUN_FILE).read_bytes()).get(CONTENTS)
    except (OSError, ValueError, AttributeError, RecursionError):  # output_folder.py says what is wrong with the file
        return {}
    known = found if isinstance(found, dict) else {}
    return {field: parts for field, parts in known.items() if isinstance(parts, dict)}


def changed_contents(saved: Contents, now: Contents) -> dict[str, list[str]]:
    """The parts of each field that differ. A field that only one of the two has is not compared."""
    found: dict[str, list[str]] = {}
    for field, parts in now.items():
        before = saved.get(field, parts)
        both = [(part, before.get(part), parts.get(part)) for part in sorted({*before, *parts})]
        found[field] = [part for part, old, new in both if old != new and NOT_COMPARED not in (old, new)]
    return {field: parts for field, parts in found.items() if parts}


def _tasks(config: EnvironmentConfig, environment: Environment, given: Given) -> dict[str, str]:
    if config.dataset is None:
        return {}
    if config.kind in _ROWS or (config.dataset in given and isinstance(environment.tasks, list | tuple)):
        return {"rows": rows_digest(environment.tasks)}
    return _source(config.dataset, given)


def _reward(config: EnvironmentConfig, given: Given) -> dict[str, str]:
    """The digest of the reward function, or of an environment's class that was given in Python."""
    if config.reward is not None:
        return {file: one for name in reward_names(config.reward) for file, one in _source(name, given).items()}
    dataset = str(config.dataset)
    is_list = isinstance(given.get(dataset), TaskEnvironment)
    return _source(dataset, given) if dataset in given and not is_list else {}


def rows_digest(tasks: Iterable[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        row = [task.id, task.prompt, task.answer, dict(task.metadata)]
        row += [task.tools, dict(task.chat_template_kwargs)] if task.tools or task.chat_template_kwargs else []
        own = {name: value for name in ("temperature", "group_size") if (value := getattr(task, name)) is not None}
        row += [own] if own else []
        digest.update(to_utf8(json.dumps(row, sort_keys=True, default=_type_name) + "\n"))
    return digest.hexdigest()[:16]


def _source(path: str, given: Given) -> dict[str, str]:
    """The digest of each source file of the object that a recipe names as `module:name`."""
    name: str | None = path
    if path in given:
        thing = given[path].func if isinstance(given[path], partial) else given[path]
        name = importable_name(thing) or importable_name(type(thing))
        if name is None:
            return _own_source(thing)
    module, colon, _ = str(name).partition(":")
    files = source_files(module) if colon else {}
    found = {name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for name, file in files.items()}
    return found or ({"source": NOT_COMPARED} if path in given else {})


def _own_source(thing: Any) -> dict[str, str]:
    """The digest of a function or class of a script or a notebook: its own lines, as others of a script may change."""
    with suppress(OSError, TypeError, SyntaxError, TokenError):  # typed in, made by a program, or its file was edited
        return {"source": _digest(inspect.getsource(thing if hasattr(thing, "__name__") else type(thing)))}
    return {"source": NOT_COMPARED}


def source_files(module: str) -> dict[str, Path]:
    """The source of a module, and of what it imports from its own package or from beside it, by the modules' names."""
    root = module.partition(".")[0]
    first = _file_of(module)
    if first is None or root == "octetrl":  # of which run.json has the commit
        return {}
    folder = first.parents[module.count(".") + (first.name == "__init__.py")]
    is_users = not _INSTALLED & set(folder.parts) and folder != Path(os.__file__).parent
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in found or not name or not (top == root or (is_users and top != "octetrl")):
            continue
        path = _file_of(name)
        if path is not None and path.is_relative_to(folder) and not (is_users and _INSTALLED & set(path.parts)):
            found[name] = path
            waiting += _imported(name, path)
        waiting.append(name.rpartition(".")[0])  # a package is imported before its modules
    return found


def _file_of(module: str) -> Path | None:
    """The source file of a module, where an import would look for it; None also for a folder without `__init__.py`."""
    places, found = [Path(place or os.getcwd()) for place in (*sys.path, "")], None
    for part in module.split("."):
        files = (file for place in places for file in (place / part / "__init__.py", place / f"{part}.py"))
        found = next(filter(Path.is_file, files), None)
        if found is None:
            places = [place / part for place in places if (place / part).is_dir()]
        else:
            places = [found.parent] if found.name == "__init__.py" else []
    return None if found is None else found.absolute()


def _imported(module: str, path: Path) -> Iterator[str]:
    """Names that may be modules which it imports."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # its import says so
        return
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            with suppress(ImportError):  # beyond the top package
                base = resolve_name(relative, package) if package else relative.lstrip(".")
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _files_digest(path: Path) -> str:
    """The digest of a file, or of all files in a folder and below it, with their names."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            digest.update(to_utf8(str(file.relative_to(path))) + file.read_bytes())
    return digest.hexdigest()[:16]


def _type_name(value: object) -> str:
    return type(value).__name__


def _digest(text: str) -> str:
    return hashlib.sha256(to_utf8(text)).hexdigest()[:16]

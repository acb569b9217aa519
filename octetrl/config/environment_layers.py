"""What a later file or an override of a recipe replaces in the environments of the files before it.

A file with `environments` replaces an earlier `environment`, and the other way round. A new `kind` drops what only the
former kind reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octetrl.config.environment import EnvironmentConfig
from octetrl.config.section import Problem
from octetrl.system.errors import nearest

Tree = dict[str, Any]
_OF_ONE_KIND = ("parameters", "columns", "reference_marker", "split", "subset", "eval_split")
_ONE, _SEVERAL = "environment", "environments"


def below_file(tree: Tree, top: Tree) -> Tree:
    """`tree` without what the file `top` replaces."""
    if top.get(_SEVERAL) and _ONE not in top:
        tree = {key: value for key, value in tree.items() if key != _ONE}
    elif top.get(_ONE) and not top.get(_SEVERAL):
        tree = {key: value for key, value in tree.items() if key != _SEVERAL}
    new = top.get(_ONE)
    return _with_kind(tree, (_ONE,), new["kind"]) if isinstance(new, dict) and "kind" in new else tree


def below_overrides(tree: Tree, overrides: Sequence[tuple[tuple[str, ...], Any]]) -> Tree:
    """`tree` without what overrides of a kind replace. overrides: keys and values."""
    for keys, value in overrides:
        if keys[-1] == "kind" and (keys[:-1] == (_ONE,) or (len(keys) == 3 and keys[0] == _SEVERAL)):
            tree = _with_kind(tree, keys[:-1], value)
    return tree


def unknown_names(tree: Tree, overrides: Sequence[tuple[tuple[str, ...], Any]]) -> list[Problem]:
    """Overrides of environments that a tree with `environments` does not have, unless one gives the dataset."""
    known = tree.get(_SEVERAL)
    if not isinstance(known, dict) or not known:
        return []
    named = {keys[1]: None for keys, _ in overrides if len(keys) > 2 and keys[0] == _SEVERAL and keys[1] not in known}
    begun = {
        keys[1] for keys, _ in overrides if keys[:1] == (_SEVERAL,) and keys[2:] in ((), ("dataset",)) and keys[1:]
    }
    return [
        Problem(
            (f"{_SEVERAL}.{name}",),
            f"there is no environment '{name}'; the recipe has {', '.join(known)}{nearest(name, known)}",
        )
        for name in named
        if name not in begun and (_SEVERAL,) not in [keys for keys, _ in overrides]
    ]


def _with_kind(tree: Tree, path: tuple[str, ...], kind: Any) -> Tree:
    """`tree` without the fields of the section at `path` that only another kind reads."""
    name, *rest = path
    base = tree.get(name)
    if not isinstance(base, dict):
        return tree
    if rest:
        return {**tree, name: _with_kind(base, tuple(rest), kind)}
    if kind == base.get("kind", EnvironmentConfig().kind):
        return tree
    return {**tree, name: {key: value for key, value in base.items() if key not in _OF_ONE_KIND}}

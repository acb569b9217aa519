"""What a later file or an override of a recipe replaces in the model of the files before it.

`model.path` takes the place of an earlier `preset`, and of the `init: random` that belongs to it: a model that is named
is trained from its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octetrl.config.environment_layers import Tree


def below_model(tree: Tree, top: Tree) -> Tree:
    """`tree` without what the model of `top`, a later file, replaces."""
    base, new = tree.get("model"), top.get("model")
    if not isinstance(base, dict) or not isinstance(new, dict):
        return tree
    if not new.get("path") or new.get("preset") or not base.get("preset"):
        return tree
    return {**tree, "model": {key: value for key, value in base.items() if key not in ("preset", "init")}}


def below_model_overrides(tree: Tree, overrides: Sequence[tuple[tuple[str, ...], Any]]) -> Tree:
    """The same for overrides, keys and values, which count as one file."""
    return below_model(tree, {"model": {keys[1]: value for keys, value in overrides if keys[:-1] == ("model",)}})

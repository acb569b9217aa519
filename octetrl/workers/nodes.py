"""Checks that the machines of a Ray cluster can run the workers of a recipe, before any of them loads a model.

They must have this machine's torch and OctetRL, since others may compute other bits, and must see the files that the
recipe names and the run folder. A version that is the same may still be another checkout, so its files are compared.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from octetrl.config.algorithm import DistillConfig, OwnObjectiveConfig
from octetrl.config.schema import Recipe
from octetrl.system.errors import UserError
from octetrl.telemetry.provenance import source_digest
from octetrl.version import __version__
from octetrl.workers.team import Team


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a worker's machine has. `missing`: of the paths that were asked for."""

    versions: str
    missing: tuple[str, ...]


def look(paths: Sequence[str]) -> NodeInfo:
    """Versions and visible paths of this machine."""
    source = source_digest(ending=".py")[:8]
    versions = f"torch {torch.__version__.partition('+')[0]} and OctetRL {__version__} (source {source})"
    return NodeInfo(versions, tuple(path for path in paths if not os.path.exists(path)))


def check_nodes(team: Team, recipe: Recipe, folder: Path | None) -> None:
    """UserError names the first worker with other versions, or one that does not see a file. `folder`: the run's."""
    paths = {os.path.abspath(path): field for field, path in _paths(recipe) if os.path.exists(path)}
    mark = None if folder is None else folder.absolute() / f".seen-{os.getpid()}"
    try:
        if mark is not None:  # a folder of the same name may be another one
            mark.touch()
            paths[str(mark)] = "output_dir"
        sights: list[NodeInfo] = team.ask("start", "look", list(paths))
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)
    _refuse(team, sights, paths, look(()))


def _refuse(team: Team, sights: Sequence[NodeInfo], paths: Mapping[str, str], here: NodeInfo) -> None:
    for worker, sight in enumerate(sights):
        if sight.versions != here.versions:
            raise UserError(
                f"cluster.address: {team.place(worker)} has {sight.versions}, this machine has {here.versions}; install"
                " the same on all machines"
            )
        for path in sight.missing:
            shown = os.path.dirname(path) if paths[path] == "output_dir" else path
            raise UserError(
                f"{paths[path]}: {team.place(worker)} does not see '{shown}'; put it on a file system that all machines"
                " have under the same path"
            )


def _paths(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Fields and values that name files which a worker reads."""
    model, algorithm = recipe.model, recipe.algorithm
    named = {
        "model.path": model.path,
        "model.tokenizer": model.tokenizer,
        "model.chat_template": model.chat_template,
        "model.lora.path": None if model.lora is None else model.lora.path,
        "critic.path": recipe.critic.path,
        "algorithm.teacher": algorithm.teacher if isinstance(algorithm, DistillConfig) else None,
        "environment.reward_model": recipe.environment.reward_model,
    }
    yield from ((field, path) for field, path in named.items() if path)
    if isinstance(algorithm, OwnObjectiveConfig):  # which the run has imported
        file = getattr(sys.modules.get(algorithm.name.partition(":")[0]), "__file__", None)
        if file is not None and not Path(file).is_relative_to(sys.prefix):  # installed: each machine has its own
            yield "algorithm.name", file

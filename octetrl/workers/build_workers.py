"""Builds the workers of a recipe: one in this process, or several on Ray."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from octetrl.config.in_words import whole_weights_problem
from octetrl.config.schema import Recipe
from octetrl.data.tokenizer import Tokenizer
from octetrl.engine.admission import Admission
from octetrl.engine.grammars import Grammars
from octetrl.engine.stopping import decoder_of
from octetrl.fp8.policy import precision_policy
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.telemetry.console import Console
from octetrl.workers.assignment import Costs
from octetrl.workers.build import BuildWorker, build_worker, resolve_device
from octetrl.workers.nodes import check_nodes
from octetrl.workers.roles import SeparateWorkers
from octetrl.workers.sampler import ManySampler
from octetrl.workers.tail import TailSampler, TailWorkers
from octetrl.workers.team import Deadlines, ProcessTeam
from octetrl.workers.workers import Workers, local_workers

if TYPE_CHECKING:
    from octetrl.workers.ray import RayTeam


def build_workers(recipe: Recipe, spec: ModelSpec, tokenizer: Tokenizer, console: Console, *, trains: bool) -> Workers:
    """The workers of a run, with their model: one in this process, or those of `cluster`, which start or join Ray.
    `trains` false: they only generate and score. Raises UserError."""
    if not recipe.cluster.uses_ray:
        device = resolve_device(recipe.cluster)
        return local_workers(build_worker(recipe, device, tokenizer=tokenizer, trains=trains), console)
    fp8_training = precision_policy(spec, recipe.fp8).uses_fp8("train")
    problem = whole_weights_problem(recipe.cluster, recipe.trainer.weight_codes, trains_fp8=fp8_training)
    if trains and problem is not None:
        raise UserError(problem)
    deadlines = Deadlines(recipe.cluster.deadlines)
    travels = tokenizer if getattr(tokenizer, "is_fast", False) else None  # others may not be picklable
    build = partial(build_worker, tokenizer=travels)  # arrives sooner than AutoTokenizer is imported
    team = start_team(recipe, Path(recipe.output_dir) if trains else None, deadlines, build=build)
    console.workers = team.lines
    try:
        if recipe.algorithm.name == "reward_model":
            return Workers(team, console, costs=Costs.of(spec), trains=trains)
        admission = admission_of(spec, tokenizer, recipe.model.context_length)
        return workers_on(team, recipe, Costs.of(spec, recipe.cluster), deadlines, console, admission, trains=trains)
    except BaseException:
        team.close()
        raise


def workers_on(
    team: ProcessTeam,
    recipe: Recipe,
    costs: Costs,
    deadlines: Deadlines,
    console: Console,
    admission: Admission,
    *,
    trains: bool,
) -> Workers:
    """The policy's workers in the processes of `team`, as the recipe divides their work."""
    cluster = recipe.cluster
    if trains and cluster.roles is not None:

        def sampler(engines: ProcessTeam) -> ManySampler:
            return ManySampler(engines, admission, deadlines, first=cluster.num_trainers)

        is_ahead, in_flight = cluster.max_staleness > 0, cluster.weights_in_flight != "off"
        return SeparateWorkers(
            team, cluster.roles, console, sampler, costs=costs, is_ahead=is_ahead, in_flight=in_flight
        )
    if trains and recipe.rollout.learn_beside_tail:
        return TailWorkers(team, console, TailSampler(team, admission, deadlines), costs=costs)
    size = cluster.tensor_parallel
    many = ManySampler(team, admission, deadlines, size=size)
    return Workers(team, console, many, costs=costs, size=size, trains=trains)


def admission_of(spec: ModelSpec, tokenizer: Tokenizer, context_length: int) -> Admission:
    """What refuses a request before any worker gets it. Grammars are compiled here too, to refuse a wrong one."""
    return Admission(
        vocab_size=spec.vocab_size,
        context_length=context_length,
        eos_token_ids=frozenset(spec.eos_token_ids),
        decode=decoder_of(tokenizer),
        grammars=Grammars(tokenizer, spec.vocab_size, sorted(spec.eos_token_ids)),
    )


def start_team(
    recipe: Recipe,
    folder: Path | None,
    deadlines: Deadlines,
    *,
    trains: bool | None = None,
    build: BuildWorker = build_worker,
) -> RayTeam:
    """The processes of the workers, without a model. `folder`: of a run that trains. `trains`: by default with a folder
    only; a bench trains without one. `build`: how a worker is built from the recipe. Raises UserError."""
    if find_spec("ray") is None:
        raise UserError("cluster: several workers, or an address, need Ray; pip install 'octetrl[ray]'")
    from octetrl.workers.ray import RayTeam

    team = RayTeam(recipe, folder, deadlines, trains=folder is not None if trains is None else trains, build=build)
    try:
        if not recipe.cluster.starts_ray:
            check_nodes(team, recipe, folder)
    except BaseException:
        team.close()
        raise
    return team

"""Builds a run from a recipe: the only place that constructs everything.

Parts that can be refused cheaply come first (device, folder, tokenizer, tasks). Parts that need time and memory come
last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from octetrl.algorithms.dapo import soft_overlong_penalty
from octetrl.algorithms.table import build_algorithm
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.in_words import cannot_keep
from octetrl.config.objective_settings import DatasetSettings, LengthPenaltySettings, refills_of
from octetrl.config.schema import Recipe
from octetrl.config.several_environments import never_drawn
from octetrl.config.validate import combination_problems, validate_with_spec
from octetrl.data.mixture import Mixture, read_source, steps_of
from octetrl.data.tokenizer import Tokenizer, recipe_tokenizer
from octetrl.environments.code_scorer import packages_line
from octetrl.environments.python_object import Given
from octetrl.environments.reward_workers import FunctionRewards
from octetrl.fp8.parity import refused_gate
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.fp8.slow_paths import slow_paths
from octetrl.process.sandbox import sandbox_for
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.collect import CollectionSettings, ExpectedLengths
from octetrl.run.ahead import Ahead
from octetrl.run.beside_tail import BesideTail
from octetrl.run.device import gpu_capability, gpus_beside, runs_on_gpu, seed_everything
from octetrl.run.environment import (
    NOTHING_GIVEN,
    build_chats,
    build_environments,
    build_rewards,
    build_tasks,
    try_objective,
    unread_by_template,
)
from octetrl.run.folder.contents import Contents, contents_of
from octetrl.run.state import Run, StepMethod
from octetrl.run.step import GenerateThenLearn, LearnFromData
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.telemetry.console import Console
from octetrl.workers.build_workers import build_workers
from octetrl.workers.model_shape import model_spec, with_context_length
from octetrl.workers.roles import SeparateWorkers
from octetrl.workers.tail import TailWorkers
from octetrl.workers.workers import Workers


def build_run(
    recipe: Recipe,
    *,
    trains: bool = True,
    given: Given = NOTHING_GIVEN,
    check_contents: Callable[[Contents], None] | None = None,
) -> Run:
    """Everything for `train` and, without an optimizer, for `eval`. Raises UserError for what the user can correct.

    given: what the recipe names as `given:NAME` (environments/python_object.py). check_contents: called with the
    digests of what the run learns from, before a model is loaded.
    """
    on_gpu = runs_on_gpu(recipe.cluster)
    seed_everything(recipe.seed)
    recipe = with_context_length(recipe)
    spec = model_spec(recipe)
    validate_with_spec(recipe, spec)
    policy = precision_policy(spec, recipe.fp8)
    refused = refused_gate(recipe, policy, on_gpu=on_gpu, capability=gpu_capability())
    if trains and refused is not None:
        raise UserError(refused)
    tokenizer = recipe_tokenizer(recipe, spec.vocab_size)
    environments = build_environments(recipe, given)
    chat = build_chats(recipe, spec, tokenizer, environments)
    try_objective(recipe)
    conversations = build_conversations(recipe, chat, tokenizer)
    recipe = with_steps(recipe, conversations)
    algorithm = build_algorithm(recipe.algorithm)
    console = Console(recipe.logging.console, recipe.steps, mismatch_limit=recipe.mismatch.warn_above)
    _warn(recipe, policy, conversations, console, on_gpu=on_gpu, trains=trains)
    for line in unread_by_template(recipe, tokenizer, environments):
        console.warn(line)
    rewards, eval_rewards = build_rewards(recipe, spec, environments, tokenizer, given)
    if isinstance(rewards, FunctionRewards):
        console.note("the reward runs in this process: a call that hangs is counted, but can't be ended")
    taskset = build_tasks(recipe, environments)
    if check_contents is not None:
        check_contents(contents_of(recipe, given, tokenizer.chat_template, environments, taskset, conversations))
    with console.phase("load"):
        workers = build_workers(recipe, spec, tokenizer, console, trains=trains)  # last: it takes the longest
    return Run(
        config=recipe,
        tokenizer=tokenizer,
        taskset=taskset,
        conversations=conversations,
        rewards=workers if rewards is None else rewards,
        eval_rewards=eval_rewards,
        algorithm=algorithm,
        workers=workers,
        method=method_of(recipe, workers),
        console=console,
        collection=build_collection(recipe, chat),
        lengths=ExpectedLengths(),
    )


def _warn(
    recipe: Recipe, policy: PrecisionPolicy, data: Mixture | None, console: Console, *, on_gpu: bool, trains: bool
) -> None:
    """Names what is slow, what has no effect, and where the model's code runs."""
    lines = [*slow_paths(recipe, policy, on_gpu=on_gpu, trains=trains)]
    if trains:
        lines += [*never_drawn(recipe), *filter(None, [cannot_keep(recipe.cluster, policy.kv_mode)])]
    for name, number in {} if data is None else data.trained_too.items():
        if number:
            of_set = f" of {name}" if name else ""
            lines.append(
                f"data: {number:,} held-out examples{of_set} are trained on too; leave them out of one of both"
            )
    for line in lines:
        console.warn(line)
    count = gpus_beside(recipe.cluster)
    if count > 1:
        console.note(f"this run uses one of {count} GPUs; to use all, add to the recipe: cluster: {{gpus: {count}}}")
    for sandbox in {one.sandbox for one in recipe.each_environment.values() if one.kind == "code"}:
        console.note(f"the model's code runs in {sandbox_for(sandbox)}")
        if lacking := packages_line(sandbox):
            console.warn(lacking)


def method_of(recipe: Recipe, workers: Workers) -> StepMethod:
    """How the recipe's run takes its steps."""
    if recipe.algorithm.learns_from != "rollouts":
        return LearnFromData()
    if recipe.cluster.max_staleness and isinstance(workers, SeparateWorkers):
        return Ahead(recipe, workers)
    return BesideTail(workers) if isinstance(workers, TailWorkers) else GenerateThenLearn()


def full_precision(spec: ModelSpec) -> PrecisionPolicy:
    """The table of a model that is not FP8 anywhere: for loading, saving and export."""
    return precision_policy(spec, Fp8Config())


def build_collection(recipe: Recipe, chat: ChatTokens) -> CollectionSettings:
    """Settings for collecting a step's groups, without the step's number."""
    algorithm, rollout = recipe.algorithm, recipe.rollout
    collection = CollectionSettings.from_config(chat, rollout, seed=recipe.seed)
    sampling = replace(collection.sampling, stop_token_ids=chat.call_ends)
    penalty = None
    if isinstance(algorithm, LengthPenaltySettings) and algorithm.overlong_buffer:
        penalty = partial(soft_overlong_penalty, limit=rollout.max_new_tokens, buffer=algorithm.overlong_buffer)
    return replace(
        collection,
        sampling=sampling,
        max_refills=refills_of(algorithm),
        penalty=penalty,
        context_length=recipe.model.context_length,
    )


def with_steps(recipe: Recipe, data: Mixture | None) -> Recipe:
    """The recipe with the steps of its `epochs`. Raises UserError for settings that do not fit them."""
    if recipe.epochs is None or data is None or not isinstance(recipe.algorithm, DatasetSettings):
        return recipe
    steps = steps_of(recipe.epochs, data.num_examples, recipe.algorithm.batch_size)
    counted = recipe.model_copy(update={"steps": steps, "epochs": None})
    for problem in combination_problems(counted):
        raise UserError(problem.text)
    return counted.model_copy(update={"epochs": recipe.epochs})


def build_conversations(recipe: Recipe, chat: ChatTokens, tokenizer: Tokenizer) -> Mixture | None:
    """The training data of a run without rollouts."""
    kind = recipe.algorithm.learns_from
    if kind == "rollouts":
        return None
    return Mixture(
        [read_source(name, source, kind) for name, source in recipe.sources.items()],
        chat,
        seed=recipe.seed,
        context_length=recipe.model.context_length,
        too_long=recipe.data.too_long,
        pad_token_id=tokenizer.pad_token_id if recipe.algorithm.name == "reward_model" else None,
        held_out={
            name: read_source(name or "eval_dataset", source, kind) for name, source in recipe.held_out_sources.items()
        },
        eval_size=recipe.data.eval_size,
    )

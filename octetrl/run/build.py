"""Builds a run from a recipe: the only place that constructs everything.

Parts that can be refused cheaply come first (device, folder, tokenizer, tasks). Parts that need time and memory come
last.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from octetrl.algorithms.dapo import soft_overlong_penalty
from octetrl.algorithms.table import Algorithm, build_algorithm
from octetrl.config.errors import UserError
from octetrl.config.objective_settings import GroupFilterSettings, LengthPenaltySettings
from octetrl.config.schema import EnvironmentConfig, Fp8Config, Recipe
from octetrl.config.spec import ModelSpec
from octetrl.config.validate import validate_with_spec
from octetrl.config.validate_environment import refuse_for_turns
from octetrl.data.mixture import Mixture, read_source
from octetrl.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_folder, tool_family
from octetrl.environments.base import Environment, Scorer, Taskset
from octetrl.environments.function_rewards import FunctionRewards
from octetrl.environments.given import Given, can_run_elsewhere
from octetrl.environments.judge import Judge
from octetrl.environments.python_reward import named_reward
from octetrl.environments.sandbox.sandbox import sandbox_for
from octetrl.environments.scoring import RewardWorkers
from octetrl.environments.turns.dialogue import Dialogue, Limits, is_dialogue, toolbox_of
from octetrl.fp8.parity import refused_gate, slow_paths
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.collection_settings import CollectionSettings
from octetrl.run.device import gpus_beside, resolve_device, seed_everything
from octetrl.run.environment import NOTHING_GIVEN, build_environment, build_taskset
from octetrl.run.journal import Journal
from octetrl.run.own_objective import try_objective
from octetrl.telemetry.console import Console
from octetrl.telemetry.spans import Spans
from octetrl.workers.build import build_worker, model_scores, model_spec
from octetrl.workers.local import LocalLearningWorkers, LocalWorkers
from octetrl.workers.many.build import build_many_workers
from octetrl.workers.protocol import LearningWorkers, Workers
from octetrl.workers.reward_model_worker import RewardModelWorker

if TYPE_CHECKING:
    from octetrl.run.ahead import Ahead

Rewards = RewardWorkers | FunctionRewards | Judge | Dialogue | Workers


@dataclass(slots=True)
class Run:
    """All objects that a step needs. `step` is the number of the current step, from 1."""

    config: Recipe
    tokenizer: Tokenizer
    taskset: Taskset
    conversations: Mixture | None  # or preference pairs; None: rollouts
    rewards: Rewards
    algorithm: Algorithm
    workers: LearningWorkers
    journal: Journal
    console: Console
    spans: Spans
    base_collection: CollectionSettings
    step: int = field(default=0)
    ahead: Ahead | None = None  # None: a step generates, then learns

    @property
    def rollout_workers(self) -> Workers:
        """The workers, typed as workers that generate. A reward model's run has none and never calls this."""
        assert self.algorithm.reward_loss is None, "these workers sample no rollouts"
        return cast(Workers, self.workers)

    @property
    def collection(self) -> CollectionSettings:
        """Settings for collecting this step's groups. The seeds follow from the step."""
        return self.base_collection.at_step(self.step)

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
        self.rewards.close()
        self.workers.close()


def build_run(recipe: Recipe, *, trains: bool = True, given: Given = NOTHING_GIVEN) -> Run:
    """Everything for `train` and, without an optimizer, for `eval`. Raises UserError for what the user can correct.

    given: what the recipe names as `given:NAME` (environments/given.py).
    """
    cluster = recipe.cluster
    on_gpu = cluster.num_gpus > 0 if cluster.uses_ray else resolve_device(cluster).type == "cuda"
    seed_everything(recipe.seed)
    spec = model_spec(recipe)
    validate_with_spec(recipe, spec)
    policy = precision_policy(spec, recipe.fp8, recipe.numerics)
    refused = refused_gate(recipe, policy, on_gpu=on_gpu)
    if trains and refused is not None:
        raise UserError(refused)
    tokenizer = load_tokenizer(tokenizer_folder(recipe), spec.vocab_size)
    environment = build_environment(recipe.environment, given)
    chat = build_chat(recipe, spec, tokenizer, environment)
    try_objective(recipe)
    algorithm = build_algorithm(recipe.algorithm)
    spans = Spans(torch.cuda.synchronize if on_gpu and not cluster.uses_ray else None)
    console = Console(recipe.logging.console, recipe.steps)
    for line in slow_paths(recipe, policy, on_gpu=on_gpu, trains=trains):
        console.warn(line)
    count = gpus_beside(cluster)
    if count > 1:
        console.note(f"this run uses one of {count} GPUs; to use all, add to the recipe: cluster: {{gpus: {count}}}")
    if recipe.environment.kind == "code":
        console.note(f"the model's code runs in {sandbox_for(recipe.environment.sandbox)}")
    rewards = build_rewards(recipe, environment, tokenizer, given)
    if isinstance(rewards, FunctionRewards):
        console.note("the reward runs in this process: a call that hangs is counted, but can't be ended")
    taskset, conversations = build_taskset(environment, recipe.environment), build_conversations(recipe, chat)
    with console.phase("load"):
        workers = _build_workers(recipe, spec, tokenizer, spans, console, trains)  # last: it takes the longest
    return Run(
        config=recipe,
        tokenizer=tokenizer,
        taskset=taskset,
        conversations=conversations,
        rewards=cast(Workers, workers) if rewards is None else rewards,
        algorithm=algorithm,
        workers=workers,
        journal=Journal(),
        console=console,
        spans=spans,
        base_collection=build_collection(recipe, chat),
    )


def _build_workers(
    recipe: Recipe, spec: ModelSpec, tokenizer: Tokenizer, spans: Spans, console: Console, trains: bool
) -> LearningWorkers:
    if recipe.cluster.uses_ray:
        return build_many_workers(recipe, spec, tokenizer, spans, console, trains=trains)
    device = resolve_device(recipe.cluster)
    built = build_worker(recipe, device, spans, tokenizer=tokenizer, trains=trains)
    if isinstance(built.worker, RewardModelWorker):
        return LocalLearningWorkers(built.worker, console)
    return LocalWorkers(built.worker, console, built.scorer)


def full_precision(spec: ModelSpec) -> PrecisionPolicy:
    """The table of a model that is not FP8 anywhere: for loading, saving and export."""
    return precision_policy(spec, Fp8Config())


def build_collection(recipe: Recipe, chat: ChatTokens) -> CollectionSettings:
    """Settings for collecting a step's groups, without the step's number."""
    algorithm, rollout = recipe.algorithm, recipe.rollout
    collection = CollectionSettings.from_config(chat, rollout, seed=recipe.seed)
    penalty = None
    if isinstance(algorithm, LengthPenaltySettings) and algorithm.overlong_buffer:
        penalty = partial(soft_overlong_penalty, limit=rollout.max_new_tokens, buffer=algorithm.overlong_buffer)
    refills = algorithm.max_refills if isinstance(algorithm, GroupFilterSettings) else 0
    return replace(collection, max_refills=refills, penalty=penalty, context_length=recipe.model.context_length)


def build_chat(recipe: Recipe, spec: ModelSpec, tokenizer: Tokenizer, environment: Environment) -> ChatTokens:
    """The chat tokens with the environment's tools, and with its system prompt if the recipe has none."""
    system_prompt = recipe.rollout.system_prompt
    if system_prompt is None:
        system_prompt = getattr(environment, "system_prompt", None)
    return ChatTokens(
        tokenizer,
        system_prompt,
        tools=toolbox_of(environment).schemas(),
        ends=spec.eos_token_ids,
        context_length=recipe.model.context_length,
    )


def build_rewards(
    recipe: Recipe,
    environment: Environment,
    tokenizer: Tokenizer,
    given: Given = NOTHING_GIVEN,
) -> Rewards | None:
    """The scorer: the environment's in separate processes, or a whole `Dialogue`. None: the workers score."""
    config = recipe.environment
    if is_dialogue(environment):
        refuse_for_turns(recipe)
        return build_dialogue(config, environment, tokenizer, given)
    if model_scores(recipe):
        return None
    if config.judge is not None:
        return Judge(config.judge)
    return _score_rewards(environment.score, config, given)


def build_dialogue(
    config: EnvironmentConfig, environment: Environment, tokenizer: Tokenizer, given: Given = NOTHING_GIVEN
) -> Dialogue:
    """An environment with several turns. `environment.reward` replaces its rewards."""
    scorer: Scorer | None = getattr(environment, "score", None)
    if config.reward is not None:
        scorer = named_reward(config.reward, given)
    scores: RewardWorkers | FunctionRewards | Judge | None = None if config.judge is None else Judge(config.judge)
    if scores is None and scorer is not None:
        scores = _score_rewards(scorer, config, given)
    return Dialogue(
        environment,
        Limits.from_config(config),
        family=tool_family(tokenizer),
        scorer=scores,
        only_scorer=config.reward is not None or config.judge is not None,
    )


def _score_rewards(scorer: Scorer, config: EnvironmentConfig, given: Given) -> RewardWorkers | FunctionRewards:
    """In processes of its own, except what only this process has."""
    gives_up = config.max_failure_share < 1.0  # a step whose rewards all fail ends the run
    if given and not can_run_elsewhere(scorer):
        seconds, at_once = config.reward_timeout_seconds, config.reward_workers or 1
        return FunctionRewards(scorer, timeout_seconds=seconds, at_once=at_once, gives_up=gives_up)
    return RewardWorkers(
        scorer,
        timeout_seconds=config.reward_timeout_seconds,
        processes=config.reward_workers,
        memory_mib=config.reward_memory_mib,
        load_seconds=config.load_timeout_seconds,
        gives_up=gives_up,
    )


def build_conversations(recipe: Recipe, chat: ChatTokens) -> Mixture | None:
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
    )

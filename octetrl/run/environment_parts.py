"""Builds what a run needs of its environments: chat tokens and scorers, of a single one or of several.

Of several, each is built from the recipe that has only this one (config/several_environments.py). The parts are then
joined (environments/mixed.py).
"""

from __future__ import annotations

from collections.abc import Collection

from octetrl.config.environment import EnvironmentConfig
from octetrl.config.rules_environment import refuse_for_turns
from octetrl.config.schema import Recipe
from octetrl.config.several_environments import alone, errors_named
from octetrl.data.tokenizer import Tokenizer, tool_family
from octetrl.environments.dialogue import Dialogue, Dialogues, Limits, is_dialogue, toolbox_of
from octetrl.environments.judge import Judge
from octetrl.environments.mixed import MixedDialogues, MixedScorer
from octetrl.environments.python_object import Given, can_run_elsewhere, named_reward
from octetrl.environments.reward_workers import FunctionRewards, RewardWorkers
from octetrl.environments.scoring import Scorer
from octetrl.environments.tasks import Environment
from octetrl.rollout.chat_tokens import ChatTokenizer, ChatTokens
from octetrl.run.environment import NOTHING_GIVEN, Environments, reward_processes
from octetrl.shapes.spec import ModelSpec
from octetrl.workers.build import model_scores
from octetrl.workers.workers import Workers

TurnScorer = RewardWorkers | FunctionRewards | Judge  # of one environment, for answers of one turn
Rewards = TurnScorer | MixedScorer | Dialogues | Workers


def build_chats(
    recipe: Recipe, spec: ModelSpec | None, tokenizer: ChatTokenizer, environments: Environments
) -> ChatTokens:
    """The chat tokens. Of several environments each has its own; given conversations have those without tools. spec:
    None for a model of which nothing is known (engine.backend: openai)."""
    recipes = alone(recipe)
    if not recipe.environments:
        return build_chat(recipe, spec, tokenizer, environments[""])
    chats = {}
    for name, environment in environments.items():
        with errors_named(name):
            chats[name] = build_chat(recipes[name], spec, tokenizer, environment)
    return ChatTokens(
        tokenizer,
        recipe.rollout.system_prompt,
        ends=_ends(spec),
        context_length=recipe.model.context_length,
        by_environment=chats,
    )


def build_scorers(
    recipe: Recipe, environments: Environments, tokenizer: Tokenizer, given: Given = NOTHING_GIVEN
) -> Rewards | None:
    """What gives rewards, and replies if an environment has several turns. None: the workers score."""
    if not recipe.environments:
        return build_rewards(recipe, environments[""], tokenizer, given)
    has_turns = any(is_dialogue(environment) for environment in environments.values())
    scorers: dict[str, TurnScorer] = {}
    dialogues: dict[str, Dialogue] = {}
    try:
        for name, one in alone(recipe).items():
            with errors_named(name):
                if has_turns:
                    dialogues[name] = build_dialogue(one.environment, environments[name], tokenizer, given)
                    refuse_for_turns(one)
                else:
                    scorers[name] = _scorer(one.environment, environments[name], given)
    except BaseException:
        for opened in (*scorers.values(), *dialogues.values()):
            opened.close()
        raise
    return MixedDialogues(dialogues) if has_turns else MixedScorer(scorers)


def build_chat(
    recipe: Recipe, spec: ModelSpec | None, tokenizer: ChatTokenizer, environment: Environment
) -> ChatTokens:
    """The chat tokens with the environment's tools, and with its system prompt if the recipe has none."""
    system_prompt = recipe.rollout.system_prompt
    if system_prompt is None:
        system_prompt = getattr(environment, "system_prompt", None)
    return ChatTokens(
        tokenizer,
        system_prompt,
        tools=toolbox_of(environment).schemas(),
        ends=_ends(spec),
        context_length=recipe.model.context_length,
    )


def _ends(spec: ModelSpec | None) -> Collection[int]:
    return () if spec is None else spec.eos_token_ids


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
    return _scorer(config, environment, given)


def _scorer(config: EnvironmentConfig, environment: Environment, given: Given) -> TurnScorer:
    """Of an environment with one turn."""
    return _score_rewards(environment.score, config, given) if config.judge is None else Judge(config.judge)


def build_dialogue(
    config: EnvironmentConfig, environment: Environment, tokenizer: Tokenizer, given: Given = NOTHING_GIVEN
) -> Dialogue:
    """An environment with several turns. `environment.reward` replaces its rewards."""
    scorer: Scorer | None = getattr(environment, "score", None)
    if config.reward is not None:
        scorer = named_reward(config.reward, given)
    scores: TurnScorer | None = None if config.judge is None else Judge(config.judge)
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
    return reward_processes(scorer, config, gives_up=gives_up)

"""The part of `octetrl check` for environments with several turns: rewards, tools, limits, and problems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from octetrl.config.validate_environment import FILES, refuse_for_turns
from octetrl.system.errors import UserError

if TYPE_CHECKING:
    from octetrl.config.schema import Recipe
    from octetrl.run.tokenizer_process import TokenizerProcess


def check_turns(recipe: Recipe, tokenizer: TokenizerProcess | None) -> None:
    """Raise UserError for an incomplete environment, or one whose tools the model cannot call. tokenizer: None where
    it is wrong itself, then tools are not checked."""
    from octetrl.environments.turns.dialogue import check_environment, toolbox_of

    environment = _dialogue(recipe)
    if environment is None:
        return
    refuse_for_turns(recipe)
    family = None
    if toolbox_of(environment).tools:
        if tokenizer is None:
            return
        family = tokenizer.tool_family()
    replaced = recipe.environment.reward is not None or recipe.environment.judge is not None
    has_scorer = replaced or hasattr(environment, "score")
    check_environment(environment, family, has_scorer=has_scorer)


def turns_line(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """A line about the rollouts, if they have several turns."""
    from octetrl.environments.turns.components import components_of
    from octetrl.environments.turns.dialogue import toolbox_of

    environment, turns = _dialogue(recipe), recipe.environment.turns
    if environment is None:
        return
    weighted = [f"{one.weight:g} x {one.name}" for one in components_of(environment) if one.weight is not None]
    if recipe.environment.reward is not None:
        weighted = [recipe.environment.reward]
    elif recipe.environment.judge is not None:
        weighted = [f"the judge {recipe.environment.judge.model}"]
    elif hasattr(environment, "score"):
        weighted.append("score")
    parts = [f"at most {turns.max_turns}", f"rewarded by {' + '.join(weighted)}"]
    tools = toolbox_of(environment).tools
    yield "turns", ", ".join([*parts, f"tools {', '.join(tools)}"] if tools else parts)


def _dialogue(recipe: Recipe) -> Any:
    """The recipe's environment, if it has several turns and can be loaded."""
    from octetrl.environments.turns.dialogue import is_dialogue
    from octetrl.run.environment import build_environment

    given = recipe.environment
    if given.dataset is None or (given.kind in ("reasoning_gym", *FILES) and not given.tools):
        return None
    try:
        environment = build_environment(given)
    except UserError:  # said where datasets are read
        return None
    return environment if is_dialogue(environment) else None

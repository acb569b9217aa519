"""What `octetrl check` says of an environment of several turns: its rewards, tools and limits, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octetrl.config.errors import UserError

if TYPE_CHECKING:
    from octetrl.config.schema import Recipe


def check_turns(recipe: Recipe) -> None:
    """Raises UserError for an environment that is not whole, or whose tools the model can't call."""
    from octetrl.environments.turns.dialogue import check_environment, refuse_tools

    environment, tools = _own(recipe), _tools(recipe)
    if environment is None and not tools:
        return
    if recipe.environment.reward_model is not None:
        raise UserError("environment.reward_model: it scores one answer, not several turns; set it to null")
    family = _family(recipe) if tools else None
    if environment is None:
        refuse_tools(tools, family)
    else:
        check_environment(environment, family, has_scorer=_has_scorer(recipe, environment))


def turns_line(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """How its rollouts go, where they have several turns."""
    from octetrl.environments.turns.components import components_of

    environment, tools = _own(recipe), _tools(recipe)
    if environment is None and not tools:
        return
    weighted = [f"{one.weight:g} x {one.name}" for one in components_of(environment) if one.weight is not None]
    if recipe.environment.reward is not None:
        weighted = [recipe.environment.reward]
    elif environment is None or hasattr(environment, "score"):
        weighted.append("score")
    parts = [f"at most {recipe.environment.turns.max_turns}", f"rewarded by {' + '.join(weighted)}"]
    yield "turns", ", ".join([*parts, f"tools {', '.join(tools)}"] if tools else parts)


def _has_scorer(recipe: Recipe, environment: object) -> bool:
    config = recipe.environment
    return config.reward is not None or config.judge is not None or hasattr(environment, "score")


def _family(recipe: Recipe) -> Any:
    from octetrl.run.tokenizer import load_tokenizer, tool_family

    folder = recipe.model.tokenizer or recipe.model.path
    return None if folder is None else tool_family(load_tokenizer(Path(folder)))


def _tools(recipe: Recipe) -> tuple[str, ...]:
    """Names: the environment's own and the recipe's."""
    from octetrl.environments.turns.dialogue import toolbox_of

    return (*toolbox_of(_own(recipe)).tools, *recipe.environment.tools)


def _own(recipe: Recipe) -> Any:
    """The recipe's environment in Python, if it is one of several turns that can be loaded."""
    from octetrl.environments.python_object import load_environment
    from octetrl.environments.turns.dialogue import is_dialogue

    if recipe.environment.kind != "python" or recipe.environment.dataset is None:
        return None
    try:
        environment = load_environment(recipe.environment.dataset)
    except UserError:  # said where datasets are read
        return None
    return environment if is_dialogue(environment) else None

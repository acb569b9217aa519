"""The examples of environments that answer, spoken to by players that know what to say."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from examples.number_game import NumberGame
from examples.tool_agent import Shop
from octetrl.environments.dialogue import ConversationLimits, is_dialogue
from octetrl.environments.python_object import load_environment
from octetrl.environments.tasks import Taskset
from octetrl.records import GenerationRequest, Rollout, RolloutStatus, SamplingParams
from tests.unit.rollout.templates import tokenizer_of
from tests.unit.rollout.test_drive import collect

HERMES = tokenizer_of("qwen2.5")


def rollouts_of(environment: Any, says: Any, tasks: int = 4) -> list[Rollout]:
    environment.tasks = environment.tasks[:tasks]
    groups, _, _ = collect(
        environment, ConversationLimits(), says=says, tokenizer=HERMES, group_size=2, sampling=SamplingParams(200)
    )
    return [rollout for group in groups for rollout in group.rollouts]


def tokens(text: str) -> list[int]:
    return [*HERMES.encode(text), HERMES.eos_token_id]


def test_the_game_is_won_by_halving() -> None:
    def halves(request: GenerationRequest, chance: random.Random) -> list[int]:
        low, high = 1, 20
        said = HERMES.decode(request.prompt_token_ids).split("<|im_start|>")
        for guess, reply in pairwise(said):
            if guess.startswith("assistant\n") and reply.startswith("user"):
                number = int(guess.removeprefix("assistant\n").removesuffix("<|im_end|>\n"))
                low, high = (number + 1, high) if "Higher" in reply else (low, number - 1)
        return tokens(str((low + high) // 2))

    for rollout in rollouts_of(NumberGame(), halves):
        assert rollout.status is RolloutStatus.SCORED
        assert rollout.components == {"found": 1.0, "quick": 1 - len(rollout.turns) / 6}
        assert rollout.reward == 1 + 0.2 * (1 - len(rollout.turns) / 6)
        assert rollout.metrics["repeated"] == 0


def test_who_is_stubborn_loses_the_game() -> None:
    for rollout in rollouts_of(NumberGame(), lambda request, chance: tokens("Is it 21?")):
        assert (rollout.reward, len(rollout.turns), rollout.metrics["repeated"]) == (0.0, 6, 5)
        assert [reply.text for turn in rollout.turns for reply in turn.replies] == ["Lower."] * 5


def test_the_agent_asks_and_says_what_it_was_told() -> None:
    def asks(request: GenerationRequest, chance: random.Random) -> list[int]:
        text = HERMES.decode(request.prompt_token_ids)
        if "<tool_response>" in text:
            return tokens(text.rpartition("<tool_response>\n")[2].partition("\n")[0])
        thing = text.rpartition("Price of ")[2].partition("?")[0]
        return tokens(f'<tool_call>{{"name": "price", "arguments": {{"thing": "{thing}"}}}}</tool_call>')

    for rollout in rollouts_of(Shop(), asks):
        assert rollout.reward == rollout.metrics["asked"] == 1.0


def test_both_are_environments_with_tasks_to_hold_out() -> None:
    for path in ("examples.number_game:NumberGame", "examples.tool_agent:Shop"):
        environment = load_environment(path)
        assert is_dialogue(environment)
        taskset = Taskset(environment.tasks, eval_size=8, seed=0)
        assert len(taskset.held_out()) == 8 and len(taskset.next_batch(4)) == 4
    assert not is_dialogue(load_environment("examples.custom_environment:Backwards"))

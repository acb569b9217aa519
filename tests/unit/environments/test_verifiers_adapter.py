"""verifiers' classic environments as ours, where it is installed (0.1.14 to 0.3); what needs none runs everywhere."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from octetrl.environments.verifiers_adapter import VerifiersEnvironment, verifiers_environment
from octetrl.records import RolloutStatus
from octetrl.system.errors import UserError
from tests.required import missing
from tests.unit.environments.playing import play

try:
    import verifiers as vf
except ImportError:
    vf = None
classic = pytest.mark.usefixtures("_classic_interface")
ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]


@pytest.fixture
def _classic_interface() -> None:
    if not hasattr(vf, "MultiTurnEnv"):
        why = "not installed; `make test` runs them in build/outside" if vf is None else "it has no classic interface"
        missing("verifiers", why)


def rows() -> Any:
    import datasets

    return datasets.Dataset.from_list(ROWS)


def exact(completion: Any, answer: str) -> float:
    return float(completion[-1].content == answer)


def length(completion: Any) -> float:
    return float(len(completion))


def breaks(completion: Any) -> float:
    raise KeyError("no such thing")


def add(a: int, b: int) -> int:
    """The sum.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def single(**options: Any) -> VerifiersEnvironment:
    rubric = options.pop("rubric", None) or vf.Rubric(funcs=[exact, length], weights=[1.0, 0.1])
    return VerifiersEnvironment(vf.SingleTurnEnv(dataset=rows(), rubric=rubric, **options))


def nagging(**options: Any) -> VerifiersEnvironment:
    class Nags(vf.MultiTurnEnv):  # type: ignore[misc, name-defined]
        async def setup_state(self, state: Any) -> Any:
            state["nags"] = 0
            return state

        @vf.stop
        async def said_it(self, state: Any) -> bool:
            return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content == state["answer"]

        async def env_response(self, messages: Any, state: Any, **given: Any) -> Any:
            state["nags"] += 1
            if options.get("fails"):
                raise ValueError("lost the thread")
            return [{"role": "user", "content": f"No ({state['nags']}, {len(messages)} messages)."}]

    rubric = vf.Rubric(funcs=[exact, length], weights=[1.0, 0.1])
    return VerifiersEnvironment(Nags(dataset=rows(), rubric=rubric, max_turns=4))


@classic
def test_one_turn_is_scored_by_the_rubric() -> None:
    environment = single(system_prompt="Be brief.")
    assert environment.system_prompt == "Be brief." and environment.tools == ()
    assert [task.prompt for task in environment.tasks] == [row["question"] for row in ROWS]
    assert play(environment, lambda conversation: "2", task=1).reward == pytest.approx(1.1)
    assert play(environment, lambda conversation: "3", task=1).reward == pytest.approx(0.1)


@classic
def test_replies_come_from_env_response_until_a_stop() -> None:
    words = iter(["5", "6", "3"])
    played = play(nagging(), lambda conversation: next(words), task=2)
    assert played.said[1:] == [
        ("assistant", "5"),
        ("user", "No (1, 2 messages)."),
        ("assistant", "6"),
        ("user", "No (2, 4 messages)."),
        ("assistant", "3"),
    ]
    assert played.reward == pytest.approx(1.5) and played.status is RolloutStatus.SCORED
    played = play(nagging(), lambda conversation: "0")  # to their own limit of turns
    assert played.conversation.turns == 4 and played.status is RolloutStatus.SCORED


@classic
def test_their_tools_are_tools() -> None:
    rubric = vf.Rubric(funcs=[exact], weights=[1.0])
    environment = VerifiersEnvironment(vf.ToolEnv(tools=[add], dataset=rows(), rubric=rubric))
    (tool,) = environment.tools
    assert tool.parameters["properties"]["a"] == {"description": "The first.", "type": "integer"}
    words = iter(['<tool_call>{"name": "add", "arguments": {"a": 2, "b": 1}}</tool_call>', "3"])
    played = play(environment, lambda conversation: next(words), task=2, family="hermes")
    assert played.said[2] == ("tool", "3") and played.reward == 1.0
    state = played.conversation.state.theirs
    assert state["metrics"]["total_tool_calls"] == 1 and state["metrics"]["num_turns"] == 2


@classic
def test_what_raises_is_an_error_and_not_a_zero() -> None:
    environment = single(rubric=vf.Rubric(funcs=[exact, breaks], weights=[1.0, 1.0]))
    played = play(environment, lambda conversation: "1")
    assert (played.status, played.reward) == (RolloutStatus.REWARD_ERROR, None)
    assert "the rubric logged: Error calling reward function breaks" in str(played.detail)
    played = play(nagging(fails=True), lambda conversation: "0")
    assert played.status is RolloutStatus.ENVIRONMENT_ERROR and "ValueError: lost the thread" in str(played.detail)


@classic
def test_what_cannot_be_played_is_refused() -> None:
    def together(completions: list[Any]) -> list[float]:
        return [0.0] * len(completions)

    class Rewrites(vf.MultiTurnEnv):  # type: ignore[misc, name-defined]
        async def get_prompt_messages(self, state: Any) -> Any:
            return state["prompt"]

        async def env_response(self, messages: Any, state: Any, **given: Any) -> Any:
            return []

    class Hides(vf.StatefulToolEnv):  # type: ignore[misc, name-defined]
        def update_tool_args(self, *given: Any, **named: Any) -> dict[str, Any]:
            return {}

    rubric = vf.Rubric(funcs=[exact])
    for make, said in [
        (lambda: single(rubric=vf.Rubric(funcs=[together])), "it rewards whole groups"),
        (lambda: VerifiersEnvironment(Hides(dataset=rows(), rubric=rubric)), "have hidden arguments"),
        (lambda: VerifiersEnvironment(Rewrites(dataset=rows(), rubric=rubric)), "rewrites the conversation"),
        (lambda: VerifiersEnvironment(object()), "it is an object, not a MultiTurnEnv"),
        (lambda: single(few_shot=[{"role": "user", "content": "a"}]).tasks, "its prompt is user, user"),
    ]:
        with pytest.raises(UserError, match=said):
            make()


@classic
def test_loading_is_theirs_and_its_failures_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("nagging_env")
    module.load_environment = lambda **options: single(**options).environment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nagging_env", module)
    assert verifiers_environment("nagging-env", {"system_prompt": "So."}).system_prompt == "So."
    with pytest.raises(UserError, match="verifiers can't load 'no-such-thing-here'"):
        verifiers_environment("no-such-thing-here", {})


@pytest.mark.parametrize(("installed", "said"), [(None, "not installed"), (types.ModuleType("v"), "no load_environ")])
def test_without_the_right_version_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, installed: Any, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", installed)
    with pytest.raises(UserError, match=said) as refusal:
        verifiers_environment("x", {})
    assert "pip install 'verifiers>=0.1.14,<0.4'" in str(refusal.value)

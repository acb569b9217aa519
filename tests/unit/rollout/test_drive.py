"""Conversations over one session: to their end, whatever their environments do, and the same whenever they answer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from octetrl.environments.dialogue import ConversationLimits, Dialogue
from octetrl.environments.tools.definition import tool
from octetrl.environments.tools.formats import format_of
from octetrl.environments.turns import Conversation, reward
from octetrl.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    SamplingParams,
    SessionEvent,
    Task,
)
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.collect import Collecting, CollectionSettings, ExpectedLengths, collect_groups
from octetrl.rollout.drive import Occupancy
from octetrl.run.tiny_model import train_tokenizer
from tests.unit.environments.turns.games import Calculator, Echo
from tests.unit.rollout.talking import TalkingSession, TalkingWorkers
from tests.unit.rollout.templates import tokenizer_of

TOKENIZER: Any = train_tokenizer(["You said 1?"])
LIMITS = ConversationLimits(max_turns=5, reply_seconds=60.0, tool_seconds=60.0, reward_seconds=60.0)


def babble(request: GenerationRequest, chance: random.Random) -> list[int]:
    letters = "".join(chance.choice("abc") for _ in range(chance.randrange(1, 6)))
    return [*TOKENIZER.encode(letters), TOKENIZER.eos_token_id]


def collect(
    environment: Any,
    limits: ConversationLimits = LIMITS,
    says: Any = babble,
    tokenizer: Any = TOKENIZER,
    group_size: int = 4,
    lengths: ExpectedLengths | None = None,
    **changes: Any,
) -> tuple[list[RolloutGroup], TalkingWorkers, Occupancy]:
    dialogue = Dialogue(environment, limits, tool_format=format_of(tokenizer.chat_template or ""))
    workers = TalkingWorkers(tokenizer, says)
    chat = ChatTokens(tokenizer, tools=[one.schema() for one in getattr(environment, "tools", ())])
    collection = CollectionSettings(chat, SamplingParams(9), group_size, max_prompt_tokens=2000, seed=1)
    collection = replace(collection, **changes)
    state = Collecting(lengths or ExpectedLengths(), occupancy=Occupancy())
    try:
        return collect_groups(environment.tasks, dialogue, workers, collection, state), workers, state.occupancy
    finally:
        dialogue.close()


def rollouts_of(environment: Any, limits: ConversationLimits = LIMITS, **changes: Any) -> list[Rollout]:
    groups, _, _ = collect(environment, limits, **changes)
    assert [group.task for group in groups] == list(environment.tasks)
    return [rollout for group in groups for rollout in group.rollouts]


def test_a_conversation_goes_from_turn_to_turn() -> None:
    groups, workers, _ = collect(Echo(turns=3))
    for group in groups:
        assert len({rollout.text for rollout in group.rollouts}) == 4
        for rollout in group.rollouts:
            assert rollout.status is RolloutStatus.SCORED
            said = [turn.completion.text for turn in rollout.turns]
            assert len(said) == 3
            assert [[one.text for one in turn.replies] for turn in rollout.turns] == [
                [f"You said {said[0]}"],
                [f"You said {said[1]}"],
                [],
            ]
            assert rollout.components == {"heard_all": 1.0, "length": len(said[2])}
            assert rollout.reward == 1.0 + 0.5 * len(said[2])
            assert 0 < rollout.metrics["chance"] < 1 and rollout.metrics["turns"] == 3
    requests = workers.sessions[0].submitted
    assert [request.num_siblings for request in requests] == [4] * 3 + [1] * 24
    assert len({request.seed for request in requests}) == len(requests)


def test_the_same_is_drawn_whenever_environments_answer() -> None:
    quick, slow = (
        rollouts_of(Echo(seconds=seconds), limits)
        for seconds, limits in ((0.0, LIMITS), (0.05, replace(LIMITS, max_in_flight=4)))
    )
    assert quick == slow


def test_how_long_conversations_were_is_told_when_their_task_comes_again() -> None:
    lengths = ExpectedLengths()
    expected: list[dict[str, int | None]] = []
    for step in (1, 2):
        groups, workers, _ = collect(Echo(turns=3), lengths=lengths, step=step)
        first = [request for request in workers.sessions[0].submitted if request.num_siblings > 1]
        expected.append({request.id.partition(":")[2]: request.expected_tokens for request in first})
        drawn = {
            group.task.id: [sum(len(turn.completion.token_ids) for turn in one.turns) for one in group.rollouts]
            for group in groups
        }
        assert lengths.of_task == {task: sum(tokens) // 4 for task, tokens in drawn.items()}, "of all turns"
        if step == 1:
            before = dict(lengths.of_task)
    assert expected == [dict.fromkeys(before), before]
    collect(Echo(does="raise"), lengths=lengths)  # each of them breaks off in its second turn
    assert lengths.of_task == {task: sum(tokens) // 4 for task, tokens in drawn.items()}, (
        "as when last they came to an end"
    )


@pytest.mark.parametrize(
    ("does", "status", "detail"),
    [
        ("raise", RolloutStatus.ENVIRONMENT_ERROR, "KeyError: 'nothing here' (games.py:"),
        ("exit", RolloutStatus.ENVIRONMENT_ERROR, "SystemExit: 3"),
        ("hang", RolloutStatus.ENVIRONMENT_TIMEOUT, "TimeoutError: reply returned nothing in 1 s"),
        ("number", RolloutStatus.ENVIRONMENT_ERROR, "TypeError: reply gave int"),
        ("system", RolloutStatus.ENVIRONMENT_ERROR, "TypeError: reply gave the message"),
    ],
)
def test_what_the_environment_fails_is_a_status(does: str, status: RolloutStatus, detail: str) -> None:
    rollouts = rollouts_of(Echo(does=does), replace(LIMITS, reply_seconds=1.0) if does == "hang" else LIMITS)
    for rollout in rollouts:
        assert (rollout.status, rollout.reward) == (status, None)
        assert detail in str(rollout.detail)
        assert len(rollout.turns) == 2  # what was drawn is kept
        assert rollout.trace is None or "games.py" in rollout.trace
    assert does != "raise" or rollouts[0].trace is not None


def test_an_answer_that_a_server_did_not_give_ends_its_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every answer after the first turn is lost. What was drawn before is kept."""
    events = TalkingSession.events

    def losing(session: TalkingSession, wait_seconds: float = 0.0) -> list[SessionEvent]:
        return [_lost(event) if "." in event.request_id.partition(":")[0] else event for event in events(session)]

    monkeypatch.setattr(TalkingSession, "events", losing)
    for rollout in rollouts_of(Echo()):
        assert (rollout.status, rollout.reward) == (RolloutStatus.GENERATION_ERROR, None)
        assert rollout.detail == "status 503"
        assert [bool(turn.completion.token_ids) for turn in rollout.turns] == [True, False]


def _lost(event: SessionEvent) -> SessionEvent:
    failed = Completion((), (), "", FinishReason.FAILED, 0, "none", detail="status 503")
    return replace(event, token_ids=(), logprobs=(), completion=failed)


class Rewarded(Echo):
    """Its rewards misbehave in its first task."""

    def __init__(self, value: Callable[[], Any]) -> None:
        super().__init__(turns=1)
        self.value = value

    @reward(weight=-1.0)
    def odd(self, conversation: Conversation) -> Any:
        return self.value() if conversation.task.id == "t0" else 2


@pytest.mark.parametrize(
    ("value", "status", "detail"),
    [
        (lambda: 1 / 0, RolloutStatus.REWARD_ERROR, "ZeroDivisionError: division by zero (test_drive.py:"),
        (lambda: float("nan"), RolloutStatus.REWARD_ERROR, "odd: the reward is nan, not a finite number"),
        (lambda: None, RolloutStatus.REWARD_ERROR, "odd: the reward is None, not a number"),
        (lambda: time.sleep(3), RolloutStatus.REWARD_TIMEOUT, "TimeoutError: odd returned nothing in 1 s"),
    ],
)
def test_a_reward_that_fails_leaves_none(value: Callable[[], Any], status: RolloutStatus, detail: str) -> None:
    is_late = status is RolloutStatus.REWARD_TIMEOUT
    rollouts = rollouts_of(Rewarded(value), replace(LIMITS, reward_seconds=1.0) if is_late else LIMITS)
    for rollout in rollouts[:4]:
        assert (rollout.status, rollout.reward, rollout.components) == (status, None, {})
        assert detail in str(rollout.detail)
    for rollout in rollouts[4:]:
        assert rollout.status is RolloutStatus.SCORED
        assert rollout.reward == 1.0 + 0.5 * len(rollout.text) - 2


def test_turns_context_and_answers_run_out() -> None:
    endless = Echo(turns=99)
    out_of_turns = rollouts_of(endless)
    assert {(one.status, len(one.turns), one.reward is None) for one in out_of_turns} == {
        (RolloutStatus.UNFINISHED, 5, False)
    }
    assert all(one.turns[-1].replies for one in out_of_turns)  # said, and never heard
    out_of_context = rollouts_of(endless, context_length=30)
    assert {one.status for one in out_of_context} == {RolloutStatus.UNFINISHED}
    assert {len(one.turns) for one in out_of_context} < {1, 2, 3, 4}
    cut = rollouts_of(Echo(turns=2), sampling=SamplingParams(3))
    for one in cut:
        is_cut = len(one.turns[-1].completion.token_ids) == 3 and not one.text.endswith(TOKENIZER.eos_token)
        assert one.status in (RolloutStatus.TRUNCATED, RolloutStatus.SCORED)
        assert one.reward is not None and (is_cut or one.status is RolloutStatus.SCORED)
    assert {one.status for one in cut} == {RolloutStatus.TRUNCATED, RolloutStatus.SCORED}


class Tidy(Echo):
    """Counts what it opened and closed; `finish` may fail."""

    def __init__(self, does: str = "", finish_fails: bool = False) -> None:
        super().__init__(does=does)
        self.closed: list[str] = []
        self.finish_fails = finish_fails

    async def finish(self, conversation: Conversation) -> None:
        self.closed.append(conversation.task.id)
        if self.finish_fails:
            raise OSError("can't close")


def test_every_conversation_is_finished_whatever_happened() -> None:
    for does in ("", "raise"):
        environment = Tidy(does)
        rollouts_of(environment)
        assert sorted(environment.closed) == ["t0"] * 4 + ["t1"] * 4 + ["t2"] * 4
    for does, detail in (("", "OSError: can't close"), ("raise", "KeyError: 'nothing here'")):  # the first is told
        for rollout in rollouts_of(Tidy(does, finish_fails=True)):
            assert (rollout.status, rollout.reward) == (RolloutStatus.ENVIRONMENT_ERROR, None)
            assert str(rollout.detail).startswith(detail)


def test_an_answer_that_was_cut_is_penalized_as_such() -> None:
    def penalty(length: int, *, was_cut: bool) -> float:
        return -100.0 if was_cut else -float(length)

    for rollout in rollouts_of(Echo(turns=2), sampling=SamplingParams(4), penalty=penalty):
        longest = max(len(turn.completion.token_ids) for turn in rollout.turns)
        assert rollout.penalty == (-100.0 if rollout.status is RolloutStatus.TRUNCATED else -longest)


def test_no_more_are_in_flight_than_allowed() -> None:
    _, workers, occupancy = collect(Echo(seconds=0.02), replace(LIMITS, max_in_flight=8), group_size=4)
    assert max(workers.sessions[0].batches) <= 8
    assert occupancy.metrics["rollout/in_flight"] <= 8
    _, workers, _ = collect(Echo(), replace(LIMITS, max_in_flight=1))  # a group is never split
    assert max(workers.sessions[0].batches) == 4


# --- tools --------------------------------------------------------------------------------------------------

HERMES = tokenizer_of("qwen2.5")
CALLS = {
    "add": '<tool_call>{"name": "add", "arguments": {"a": 40, "b": 2}}</tool_call>',
    "two": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>',
    "malformed": "<tool_call>{add 40 and 2}</tool_call>",
    "unknown": '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
    "arguments": '<tool_call>{"name": "add", "arguments": {"a": "many"}}</tool_call>',
    "refuse": '<tool_call>{"name": "refuse", "arguments": {}}</tool_call>',
    "crash": '<tool_call>{"name": "crash", "arguments": {}}</tool_call>',
    "wait": '<tool_call>{"name": "wait", "arguments": {}}</tool_call>',
}


def tool_rollout(first: str, limits: ConversationLimits = LIMITS) -> Rollout:
    """Of a model that says `first`, then 42."""

    def says(request: GenerationRequest, chance: random.Random) -> list[int]:
        text = CALLS[first] if "<tool_response>" not in HERMES.decode(request.prompt_token_ids) else "42"
        return [*HERMES.encode(text), HERMES.eos_token_id]

    environment = Calculator()
    environment.tasks = environment.tasks[:1]
    sampling = SamplingParams(300)
    (rollout,) = rollouts_of(environment, limits, says=says, tokenizer=HERMES, group_size=1, sampling=sampling)
    return rollout


@pytest.mark.parametrize(
    ("first", "told", "refused"),
    [
        ("add", ["42"], 0),
        ("two", ["3", "7"], 0),
        ("malformed", ["Error: the tool call can't be read"], 1),
        ("unknown", ["Error: there is no tool 'sub'"], 1),
        ("arguments", ["Error: add: 'a'"], 1),
        ("refuse", ["Error: not today"], 1),
    ],
)
def test_a_call_is_answered_whatever_it_is(first: str, told: list[str], refused: int) -> None:
    rollout = tool_rollout(first)
    assert (rollout.status, rollout.reward) == (RolloutStatus.SCORED, 1.0)
    replies = rollout.turns[0].replies
    assert [reply.role for reply in replies] == ["tool"] * len(told)
    assert all(reply.text.startswith(text) for reply, text in zip(replies, told, strict=True))
    assert rollout.metrics == {"turns": 2, "tool_calls": len(told), "refused_calls": refused, "failed_calls": 0}


@pytest.mark.parametrize(
    ("first", "error"), [("crash", "ZeroDivisionError: division by zero"), ("wait", "TimeoutError")]
)
def test_a_tool_that_fails_ends_the_rollout_or_is_told(first: str, error: str) -> None:
    limits = replace(LIMITS, tool_seconds=0.2) if first == "wait" else LIMITS
    ended = tool_rollout(first, limits)
    assert (ended.status, ended.reward) == (RolloutStatus.TOOL_ERROR, None)
    assert str(ended.detail).startswith(error) and len(ended.turns) == 1
    told = tool_rollout(first, replace(limits, tool_failure="tell"))
    assert (told.status, told.reward) == (RolloutStatus.SCORED, 1.0)
    assert told.turns[0].replies[0].text.startswith(f"Error: {error}")
    assert told.metrics["failed_calls"] == 1


# --- many ---------------------------------------------------------------------------------------------------


class Flaky:
    """Slow, and one reply in ten fails. A tool fails too."""

    def __init__(self, tasks: int) -> None:
        self.tasks = [Task(id=f"f{number}", prompt=f"{number}") for number in range(tasks)]
        self.under_way = self.most = 0
        self.lock = threading.Lock()

    @tool
    def ask(self) -> str:
        """Nothing."""
        return ""

    def reply(self, conversation: Conversation) -> str | None:
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        time.sleep(0.05 * conversation.random.random())
        with self.lock:
            self.under_way -= 1
        if conversation.random.random() < 0.1:
            raise ConnectionError("gone")
        return "go on" if conversation.turns < 3 else None

    @reward
    async def luck(self, conversation: Conversation) -> float:
        return conversation.random.random()


def test_two_hundred_in_flight_lose_none() -> None:
    environment = Flaky(25)
    groups, _, occupancy = collect(environment, group_size=8)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 200
    failed = [one for one in rollouts if one.status is RolloutStatus.ENVIRONMENT_ERROR]
    scored = [one for one in rollouts if one.status is RolloutStatus.SCORED]
    assert len(failed) + len(scored) == 200
    assert 30 < len(failed) < 80  # 1 - 0.9 ** 3 of 200 are 54
    assert all(len(one.turns) == 3 and one.reward is not None for one in scored)
    assert all("ConnectionError: gone" in str(one.detail) and one.trace for one in failed)
    assert occupancy.metrics["rollout/in_flight"] > 20
    assert environment.most > 1  # replies at once


class Sleepy:
    """Slow for the first task, at once for the second."""

    tasks = (Task(id="slow", prompt="?"), Task(id="quick", prompt="!"))

    def __init__(self) -> None:
        self.order: list[str] = []
        self.quick_is_done = threading.Event()

    def reply(self, conversation: Conversation) -> str | None:
        if conversation.task.id == "slow":
            self.quick_is_done.wait(60.0)
            time.sleep(0.3)
        self.order.append(conversation.task.id)
        if self.order == ["quick"] * 3:
            self.quick_is_done.set()
        return "go on" if conversation.turns < 3 else None

    @reward
    def one(self, conversation: Conversation) -> float:
        return 1.0


def test_who_has_an_answer_goes_on_while_others_wait() -> None:
    environment = Sleepy()
    _, _, occupancy = collect(environment, group_size=1)
    assert environment.order == ["quick"] * 3 + ["slow"] * 3
    assert occupancy.metrics["rollout/waiting_share"] > 0.2  # there was nothing else to draw
    assert 0.2 < occupancy.metrics["rollout/with_environment"] < 1.5

"""Tokens are only appended, whatever the template and whatever the turns: what is trained on is what was sampled."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.algorithms.table import build_algorithm
from octetrl.environments.dialogue import ConversationLimits, Dialogue
from octetrl.environments.tools.definition import Tool, tool
from octetrl.environments.tools.formats import format_of
from octetrl.environments.turns import Conversation, reward
from octetrl.records import GenerationRequest, Reply, RolloutGroup, RolloutStatus, SamplingParams, Task
from octetrl.rollout.chat_tokens import ChatTokens, ReplyError
from octetrl.rollout.collect import Collecting, CollectionSettings, collect_groups
from octetrl.rollout.history import History
from octetrl.rollout.samples import to_samples
from octetrl.run.tiny_model import train_tokenizer
from octetrl.system.errors import UserError
from octetrl.system.text import escaped
from tests.objectives import objective
from tests.unit.rollout.talking import TalkingWorkers, logprob_of
from tests.unit.rollout.templates import FAMILIES, WITH_TOOLS, stop_tokens, tokenizer_of


@tool
def add(a: int, b: int) -> int:
    """The sum of two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Scripted:
    """Says what it was given, one list of messages a turn."""

    def __init__(self, replies: Sequence[Any], tools: Sequence[Tool] = ()) -> None:
        self.tasks = [Task(id="t", prompt="7 + 8 ="), Task(id="u", prompt="")]
        self._replies, self.tools = replies, tools
        self.ended: list[Conversation] = []

    def reply(self, conversation: Conversation) -> Any:
        said = conversation.turns - conversation.tool_calls
        return self._replies[said - 1] if said <= len(self._replies) else None

    def finish(self, conversation: Conversation) -> None:
        self.ended.append(conversation)

    @reward
    def some(self, conversation: Conversation) -> float:
        return conversation.random.random()


def chat_of(family: str, tools: Sequence[Tool] = ()) -> ChatTokens:
    schemas = [each.schema() for each in tools]
    return ChatTokens(tokenizer_of(family), None, tools=schemas, ends=stop_tokens(family))


def drawn(
    family: str, environment: Any, says: Any, group_size: int = 2, history: History = "recorded"
) -> tuple[list[RolloutGroup], TalkingWorkers]:
    dialogue = Dialogue(environment, ConversationLimits(), tool_format=format_of(tokenizer_of(family).chat_template))
    workers = TalkingWorkers(tokenizer_of(family), says)
    chat = chat_of(family, getattr(environment, "tools", ()))
    collection = CollectionSettings(
        chat, SamplingParams(200), group_size, max_prompt_tokens=4000, seed=3, history=history
    )
    try:
        return collect_groups(environment.tasks, dialogue, workers, collection, Collecting()), workers
    finally:
        dialogue.close()


texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["<|im_end|>", "<tool_call>", "</think>", "<|eot_id|>", "PLACEHOLDER-OF-THE-ANSWER", " \n ", "{}"]),
)


def messages_of(roles: Sequence[str]) -> st.SearchStrategy[list[dict[str, str]]]:
    message = st.fixed_dictionaries({"role": st.sampled_from(roles), "content": texts})
    return st.lists(message, min_size=1, max_size=3)


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("history", ["recorded", "template"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_on_is_what_was_sampled(family: str, history: History, data: st.DataObject) -> None:
    """Random tokens of the whole vocabulary, random ends, random replies; siblings go ways of their own. Each sampled
    token is trained on once, after the prompt that it was sampled from."""
    tokenizer, stops = tokenizer_of(family), stop_tokens(family)
    roles = ["user", "tool"] if family in WITH_TOOLS else ["user"]
    replies = data.draw(st.lists(st.one_of(texts, messages_of(roles)), max_size=3))
    call = tokenizer.encode('<tool_call>{"name": "add", "arguments": {"a": 7, "b": 8}}</tool_call>')
    said: dict[tuple[int, ...], list[int]] = {}  # by prompt and draw

    def says(request: GenerationRequest, chance: random.Random) -> list[int]:
        words = [chance.randrange(len(tokenizer)) for _ in range(chance.randrange(6))]
        words = [word for word in words if word not in stops] + (call if chance.random() < 0.3 else [])
        ends = [[stops[0]], [stops[-1]], tokenizer.encode("!")]  # the last: a stop string
        tokens = [*words, *chance.choice(ends)]
        said[*request.prompt_token_ids, *tokens] = tokens
        return tokens

    environment = Scripted(replies, [add] if family in WITH_TOOLS else [])
    groups, workers = drawn(family, environment, says, history=history)
    requested = {request.prompt_token_ids for request in workers.sessions[0].submitted}
    algorithm = build_algorithm(objective(drop_zero_variance=False))
    samples = to_samples(groups, algorithm)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 4 and all(rollout.detail is None for rollout in rollouts)
    segments = [(number, turns) for number, rollout in enumerate(rollouts) for turns in rollout.segments]
    assert len(segments) == len(rollouts) or history == "template"
    for (number, turns), sample in zip(segments, samples, strict=True):
        assert sample.rollout == number and sample.group == number // 2
        position, has_ended = 0, False
        for turn in turns:
            if history == "recorded":
                assert not (has_ended and turn.prompt_token_ids[0] in stops), "the end of an answer is said twice"
            has_ended = turn.completion.token_ids[-1] in stops
            begin = position + len(turn.prompt_token_ids)
            end = begin + len(turn.completion.token_ids)
            prompt = sample.token_ids[:begin]
            assert prompt in requested, "the engine saw other tokens than the trainer"
            assert said[sample.token_ids[:end]] == list(sample.token_ids[begin:end])
            assert sample.loss_mask[position:end] == (False,) * (begin - position) + (True,) * (end - begin)
            position = end
        assert position == len(sample.token_ids)
        assert sample.generator_logprobs == tuple(
            logprob_of(token) if trained else 0.0
            for token, trained in zip(sample.token_ids, sample.loss_mask, strict=True)
        )
    if history == "template":
        assert written_prompts(family, environment) == Counter(
            tokenizer.decode(request.prompt_token_ids)
            for request in workers.sessions[0].submitted
            for _ in range(request.num_siblings)
        )


def written_prompts(family: str, environment: Scripted) -> Counter[str]:
    """The prompt of each answer as transformers renders the messages before it."""
    prompts = Counter[str]()
    for conversation in environment.ended:
        for place, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                prompts[
                    escaped(
                        tokenizer_of(family).apply_chat_template(
                            conversation.messages[:place],
                            tools=[tool.schema() for tool in environment.tools] or None,
                            tokenize=False,
                            add_generation_prompt=True,
                        )
                    )
                ] += 1
    return prompts


def test_a_history_keeps_its_tokens_up_to_what_the_template_changes() -> None:
    """Qwen3 shows thoughts inside a loop of calls, and leaves them out after the next message of the user."""
    tokenizer = tokenizer_of("qwen3")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": 8}}\n</tool_call>'
    answers = iter(
        [f"<think>\nadd\n</think>\n\n{call}", "<think>\nsaid\n</think>\n\n15", "<think>\nno\n</think>\n\n16"]
    )

    def says(request: GenerationRequest, chance: random.Random) -> list[int]:
        return [*tokenizer.encode(next(answers)), tokenizer.eos_token_id]

    environment = Scripted(["Sure?"], [add])
    environment.tasks = environment.tasks[:1]
    groups, _ = drawn("qwen3", environment, says, group_size=1, history="template")
    (rollout,) = groups[0].rollouts
    assert [len(turns) for turns in rollout.segments] == [2, 1]
    first, last = rollout.segments[0][0].prompt_token_ids, rollout.segments[1][0].prompt_token_ids
    assert last[: len(first)] == first and "said" not in tokenizer.decode(last)
    algorithm = build_algorithm(objective(drop_zero_variance=False))
    samples = to_samples(groups, algorithm)
    assert [sum(sample.loss_mask) for sample in samples] == [
        sum(len(turn.completion.token_ids) for turn in turns) for turns in rollout.segments
    ]


def _add(message: Any) -> Any:
    return lambda conversation: conversation.messages.append(message)


PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("edit", "fails"),
    [
        *((_add(message), True) for message in ("x", PICTURE, {"role": "user", "content": None}, {"content": "x"})),
        (lambda conversation: setattr(conversation, "messages", None), True),
        (lambda conversation: conversation.messages.clear(), False),
        (_add({"role": "user", "content": [{"type": "text", "text": "x"}]}), False),
    ],
)
def test_messages_that_an_environment_spoils_end_one_rollout(edit: Any, fails: bool) -> None:
    """Siblings that said something edit them; an answer may have no text."""

    class Editing(Scripted):
        def reply(self, conversation: Conversation) -> Any:
            if conversation.text and conversation.turns == 1:
                edit(conversation)
            return super().reply(conversation)

    def says(request: GenerationRequest, chance: random.Random) -> list[int]:
        said = tokenizer.encode("yes") if chance.random() < 0.5 else []
        return [*said, tokenizer.eos_token_id]

    tokenizer = tokenizer_of("qwen3")
    environment = Editing(["Sure?"])
    environment.tasks = environment.tasks[:1]
    groups, _ = drawn("qwen3", environment, says, group_size=8, history="template")
    for rollout in groups[0].rollouts:
        is_spoilt = fails and bool(rollout.turns[0].completion.text)
        assert rollout.status is (RolloutStatus.ENVIRONMENT_ERROR if is_spoilt else RolloutStatus.SCORED)
    assert len({bool(rollout.turns[0].completion.text) for rollout in groups[0].rollouts}) == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("roles", [("user",), ("tool",), ("tool", "tool"), ("user", "tool")])
def test_the_whole_is_what_the_template_would_write(family: str, roles: tuple[str, ...]) -> None:
    """Where answers are plain words; with thoughts it is not, and that is why tokens are appended."""
    if family == "chatml" and "tool" in roles:
        pytest.skip("it has no tools")
    tokenizer, chat = tokenizer_of(family), chat_of(family)
    replies = [Reply(role, f"told {number}") for number, role in enumerate(roles)]
    conversation: list[dict[str, str]] = [{"role": "user", "content": "7 + 8 ="}]
    tokens = chat.prompt_tokens("7 + 8 =")
    for answer in ("so 15", "and 15 again"):
        said = chat.answer_tokens(answer)
        tokens += said + chat.reply_tokens(replies, said)
        conversation += [{"role": "assistant", "content": answer}]
        conversation += [{"role": reply.role, "content": reply.text} for reply in replies]
    expected = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    if family == "qwen3" and roles[-1] == "tool" and "user" not in roles:
        expected = expected.replace("<think>\n\n</think>\n\n", "")  # which the policy did not say
    assert tokenizer.decode(list(tokens)) == expected


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_tools_stand_in_the_prompt_as_the_template_writes_them(family: str) -> None:
    expected = tokenizer_of(family).apply_chat_template(
        [{"role": "user", "content": "7 + 8 ="}], tools=[add.schema()], tokenize=False, add_generation_prompt=True
    )
    assert '"The sum of two whole numbers."' in expected
    assert tokenizer_of(family).decode(list(chat_of(family, [add]).prompt_tokens("7 + 8 ="))) == expected


def test_an_end_that_is_not_the_templates_is_an_end() -> None:
    tokenizer, chat = tokenizer_of("llama3"), chat_of("llama3")
    replies = [Reply("tool", "15")]
    eot, eom = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|eom_id|>"])
    ended, by_other, unended = (chat.reply_tokens(replies, [9, last]) for last in (eot, eom, 9))
    assert ended == by_other == unended[1:]
    assert unended[0] == eot


def test_replies_that_the_template_refuses_are_told() -> None:
    tokenizer = tokenizer_of("chatml")
    template = tokenizer.chat_template
    refusal = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    tokenizer.chat_template = refusal + template
    try:
        with pytest.raises(ReplyError, match=r"refuses replies of the roles tool \(no tools\)"):
            chat_of("chatml").reply_tokens([Reply("tool", "15")], ())
    finally:
        tokenizer.chat_template = template


def test_without_a_template_the_prompt_is_the_text() -> None:
    plain: Any = train_tokenizer(["State the answer: 1 + 2 = 3, so the sum is 3."])
    plain.chat_template = None
    chat = ChatTokens(plain, "Be brief.")
    assert plain.decode(chat.prompt_tokens("1 + 2 =")) == "Be brief.\n\n1 + 2 ="
    assert plain.decode(ChatTokens(plain).prompt_tokens("1 + 2 =")) == "1 + 2 ="
    assert plain.decode(chat.reply_tokens([Reply("user", "sure?")], ())) == "\nsure?\n"


def test_a_tokenizer_without_eos_is_refused() -> None:
    without: Any = SimpleNamespace(chat_template=None, eos_token_id=None)
    with pytest.raises(UserError, match="no EOS"):
        ChatTokens(without)

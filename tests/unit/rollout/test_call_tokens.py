"""Tool calls of every format, token by token: what a template writes is read back, and results follow an answer as the
template would write them."""

from __future__ import annotations

import json
from copy import copy
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest

from octetrl.environments.dialogue import ConversationLimits, Dialogue
from octetrl.environments.prompts import read_messages
from octetrl.environments.tools.definition import tool
from octetrl.environments.tools.formats.reading import MalformedCall, ParsedMessage, ToolCall
from octetrl.environments.tools.messages import to_message, tool_message
from octetrl.environments.turns import Conversation, reward
from octetrl.records import Completion, FinishReason, GenerationRequest, Reply, Rollout, SamplingParams, Task
from octetrl.rollout.call_text import CallText, call_ends, find_format
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.collect import Collecting, CollectionSettings, collect_groups
from octetrl.rollout.history import History
from octetrl.rollout.message_tokens import Template
from tests.unit.rollout.call_templates import CALL_FAMILIES, call_tokenizer
from tests.unit.rollout.talking import TalkingWorkers
from tests.unit.rollout.templates import tokenizer_of

USER = {"role": "user", "content": "7 + 8 ="}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "note": {"type": "string"},
                "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "parts": {"type": "array"},
            },
        },
    },
}
ARGUMENTS: list[dict[str, Any]] = [
    {"a": 7, "note": "8", "exact": True, "parts": [1, {"x": "é"}]},
    {"a": -1, "note": 'a\n  "b" </parameter>,\n{c} </arg_value>!', "exact": None, "parts": []},
    {},
]


def completion_of(family: str, tokens: list[int]) -> Completion:
    text = call_tokenizer(family).decode(tokens, skip_special_tokens=True)
    return Completion(tuple(tokens), (0.0,) * len(tokens), text, FinishReason.STOP, 0, "")


def calls_of(family: str, pairs: list[dict[str, Any]]) -> tuple[ToolCall, ...]:
    form = find_format(call_tokenizer(family))
    assert form is not None and form.name == CALL_FAMILIES[family].form
    ids = [f"functions.add:{n}" if form.name == "kimi_k2" else form.call_id(n) for n in range(len(pairs))]
    return tuple(ToolCall(id, "add", arguments) for id, arguments in zip(ids, pairs, strict=True))


def chat_of(family: str) -> ChatTokens:
    tokenizer = call_tokenizer(family)
    return ChatTokens(tokenizer, tools=[SCHEMA], tool_format=find_format(tokenizer))


def template_ids(family: str, messages: list[dict[str, Any]], opens: bool) -> list[int]:
    """As transformers renders and tokenizes it; arguments as text for a template that takes no others."""
    tokenizer = call_tokenizer(family)
    if family == "deepseek-v3":
        messages = [{**m, "tool_calls": [as_text(call) for call in m.get("tool_calls", [])]} for m in messages]
    return list(tokenizer.apply_chat_template(messages, [SCHEMA], add_generation_prompt=opens, return_dict=False))


def rendered(family: str, messages: list[dict[str, Any]], opens: bool) -> str:
    return str(call_tokenizer(family).decode(template_ids(family, messages, opens)))


def as_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("family", CALL_FAMILIES)
def test_calls_are_read_and_results_follow_as_the_template_writes_them(family: str, count: int) -> None:
    if family == "harmony":
        count = 1  # a call ends the answer
    tokenizer, chat, calls = call_tokenizer(family), chat_of(family), calls_of(family, ARGUMENTS[:count])
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": to_message_calls(calls)}]
    results = [tool_message(call, str(15 + n)) for n, call in enumerate(calls)]
    prompt = list(chat.prompt_tokens("7 + 8 ="))
    assert prompt == template_ids(family, [USER], True)
    opened = tokenizer.decode(prompt)
    said = rendered(family, messages, False).removeprefix(opened)
    end = CALL_FAMILIES[family].end or CALL_FAMILIES[family].eos
    answer = said[: said.index(end) + len(end)] if end in said else said + end  # GLM's end opens the next turn
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    completion = chat.with_calls(completion_of(family, tokens), ())
    form = find_format(tokenizer)
    assert form is not None
    parsed = form.parse(completion.text, [SCHEMA])
    assert (parsed.content, parsed.calls) == ("", calls)
    replies = chat.reply_tokens([Reply("tool", result["content"]) for result in results], tokens, parsed.calls)
    whole = template_ids(family, [*messages, *results], True)
    assert [*prompt, *tokens, *replies] == whole
    cut = chat.reply_tokens([Reply("tool", result["content"]) for result in results], tokens[:-1], parsed.calls)
    assert [*prompt, *tokens[:-1], *cut] == whole  # ended by a stop string


def to_message_calls(calls: tuple[ToolCall, ...]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = to_message(ParsedMessage("", calls))["tool_calls"]
    return made


@pytest.mark.parametrize("family", CALL_FAMILIES)
def test_a_result_follows_a_call_that_cant_be_read(family: str) -> None:
    chat, tokenizer = chat_of(family), call_tokenizer(family)
    tokens = chat.reply_tokens([Reply("tool", "no")], (), (MalformedCall("x", "no"),))
    assert "no" in tokenizer.decode(tokens)


def test_only_special_tokens_of_the_format_are_kept_and_stops_still_cut() -> None:
    tokenizer = call_tokenizer("mistral")
    form = find_format(tokenizer)
    assert form is not None
    text = CallText(tokenizer, form, {tokenizer.eos_token_id})
    tokens = tokenizer.encode("[INST]a [TOOL_CALLS]f[ARGS]{} stop b</s>", add_special_tokens=False)
    assert text.of(completion_of("mistral", tokens), ()) == "a [TOOL_CALLS]f[ARGS]{} stop b"
    assert text.of(completion_of("mistral", tokens), ("stop",)) == "a [TOOL_CALLS]f[ARGS]{} "
    qwen = tokenizer_of("qwen2.5")
    hermes = find_format(qwen)
    assert hermes is not None and not CallText(qwen, hermes, ()).is_needed


def test_further_ends_of_an_answer_are_tokens_of_the_vocabulary() -> None:
    harmony, qwen = call_tokenizer("harmony"), tokenizer_of("qwen2.5")
    assert call_ends(harmony, find_format(harmony)) == (harmony.convert_tokens_to_ids("<|call|>"),)
    assert call_ends(qwen, find_format(harmony)) == call_ends(qwen, None) == ()
    assert chat_of("harmony").call_ends == (harmony.convert_tokens_to_ids("<|call|>"),)


def test_a_named_format_goes_before_the_template() -> None:
    qwen = tokenizer_of("qwen2.5")
    found = [find_format(qwen, name) for name in ("auto", "mistral", "response_template")]
    assert [None if one is None else one.name for one in found] == ["hermes", "mistral", None]


@tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


class Sums:
    tasks = (Task(id="t", prompt="7 + 8 ="),)
    tools = (add,)

    @reward
    def calls(self, conversation: Conversation) -> float:
        return conversation.tool_calls - conversation.refused_calls


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 7, "b": 8}</s>'),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>7</arg_value>\n<arg_key>b</arg_key>"
         "<arg_value>8</arg_value></tool_call><|observation|>"),
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 7, "b": 8}<|call|>'),
    ],
)  # fmt: skip
def test_a_tool_answers_in_a_rollout(family: str, call: str) -> None:
    rollout = rollout_of(family, call)
    assert (rollout.reward, rollout.metrics["turns"], rollout.detail) == (1.0, 2.0, None)
    assert [reply.text for reply in rollout.turns[0].replies] == ["15"]
    assert "add" in rollout.turns[0].completion.text and "<|call|>" not in rollout.turns[0].completion.text
    assert ("[TOOL_CALLS]" in rollout.turns[0].completion.text) == (family == "mistral")


@pytest.mark.parametrize("history", ["recorded", "template"])
@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("mistral", "[TOOL_CALLS]add(7)</s>"),
        ("harmony", " to=functions.add<|channel|>commentary json<|message|>{7<|call|>"),
        ("minimax", "<minimax:tool_call>add</minimax:tool_call><|im_end|>"),
    ],
)
def test_a_call_that_cant_be_read_is_told_whatever_the_history(family: str, call: str, history: History) -> None:
    rollout = rollout_of(family, call, history)
    assert (rollout.status, rollout.reward, rollout.metrics["refused_calls"]) == ("scored", 0.0, 1.0), rollout.detail
    assert "can't be read" in rollout.turns[0].replies[0].text


def rollout_of(family: str, call: str, history: History = "recorded") -> Rollout:
    """One that says `call`, and then an answer."""
    tokenizer, environment = call_tokenizer(family), Sums()
    form = find_format(tokenizer)
    texts = iter([call, f"so 15{tokenizer.eos_token}"])

    def says(request: GenerationRequest, chance: Any) -> list[int]:
        tokens: list[int] = tokenizer.encode(next(texts), add_special_tokens=False)
        return tokens

    dialogue = Dialogue(environment, ConversationLimits(), tool_format=form)
    chat = ChatTokens(tokenizer, tools=[add.schema()], tool_format=form)
    collection = CollectionSettings(chat, SamplingParams(99), 1, max_prompt_tokens=4000, history=history)
    workers = TalkingWorkers(tokenizer, says)
    (group,) = collect_groups(environment.tasks, dialogue, workers, collection, Collecting())
    dialogue.close()
    (rollout,) = group.rollouts
    return rollout


@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_token_that_opens_the_next_turn_is_never_missing(role: str) -> None:
    """GLM's turns have no end: the engine stops at the token that opens the next one, or at another."""
    tokenizer = call_tokenizer("glm")
    ends = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    chat = ChatTokens(tokenizer, tools=[SCHEMA], tool_format=find_format(tokenizer), ends=ends)
    opener = "<|observation|>" if role == "tool" else "<|user|>"
    own, other, unended = (
        tokenizer.decode(chat.reply_tokens([Reply(role, "15")], [9, tokenizer.convert_tokens_to_ids(last)]))
        for last in (opener, "<|endoftext|>", "!")
    )
    assert other == unended == opener + own


@pytest.mark.parametrize("family", CALL_FAMILIES)
def test_sft_learns_calls_and_their_end_as_they_are_sampled(family: str) -> None:
    """Of rows with arguments as JSON text. GLM's turns have no end: the token that opens the next one is learnt."""
    tokenizer, chat, calls = (
        call_tokenizer(family),
        chat_of(family),
        calls_of(family, ARGUMENTS[: 1 + (family != "harmony")]),
    )
    called = {"role": "assistant", "content": "", "tool_calls": list(map(as_text, to_message_calls(calls)))}
    row = [USER, called, *(tool_message(call, "15") for call in calls), {"role": "assistant", "content": "so 15"}]
    (tokens,) = chat.message_tokens(read_messages(row, "here"), tools=[SCHEMA])
    learnt = zip(tokens.token_ids, tokens.loss_mask, strict=True)
    first, last = ([one for one, _ in part] for learns, part in groupby(learnt, key=itemgetter(1)) if learns)
    ends = {"glm": ("<|observation|>", "<|user|>"), "harmony": ("<|call|>", "<|end|>")}.get(
        family, (tokenizer.eos_token,) * 2
    )
    assert tokenizer.decode([first[-1]]) == ends[0] and tokenizer.decode(last).endswith(f"so 15{ends[1]}")
    form = find_format(tokenizer)
    assert form is not None
    assert form.parse(chat.with_calls(completion_of(family, first), ()).text, [SCHEMA]).calls == calls


@pytest.mark.parametrize("reads", ["{{ m.content + '' }}", "{% if 'x' in m.content %}{% endif %}"])
@pytest.mark.parametrize("family", ["qwen3-coder", "deepseek-v3"])
def test_a_message_of_calls_alone_has_a_text_for_templates_that_need_one(family: str, reads: str) -> None:
    tokenizer, call = copy(call_tokenizer(family)), to_message_calls(calls_of(family, ARGUMENTS[:1]))[0]
    row = read_messages([USER, {"role": "assistant", "content": None, "tool_calls": [as_text(call)]}], "here")
    expected = Template(tokenizer, None).render([USER, {**row[1], "content": ""}])
    tokenizer.chat_template = "{% for m in messages %}" + reads + "{% endfor %}" + tokenizer.chat_template
    whole = Template(tokenizer, None).render(row)
    assert whole.endswith(expected) and '"x": "é"' in whole

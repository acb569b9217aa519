"""Prompts of messages, tools and template variables: what is tokenized is what transformers' own rendering gives."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from octetrl.backends.openai.text import CharacterTokenizer, asked_of
from octetrl.data.conversations import read_conversation
from octetrl.environments.tasks import Taskset
from octetrl.records import Reply, Task
from octetrl.rollout.chat_tokens import ChatTokens, try_prompts
from octetrl.system.errors import UserError
from tests.unit.rollout.templates import FAMILIES, WITH_TOOLS, tokenizer_of

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "7 + 8 = ?"}
SAID, MORE = {"role": "assistant", "content": "15"}, {"role": "user", "content": "and 9 more?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 7, "b": 8}}}
CALLED = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "15"}]
ADD = {"type": "function", "function": {"name": "add", "description": "-", "parameters": {"type": "object"}}}
NO_THOUGHTS = {"enable_thinking": False}


def reference(family: str, messages: list[dict[str, Any]], **options: Any) -> tuple[int, ...]:
    rendered = tokenizer_of(family).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False, **options
    )
    return tuple(rendered)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("messages", [[SYSTEM, USER], [USER, SAID, MORE], [SYSTEM, USER, SAID, MORE]])
def test_messages_are_rendered_as_transformers_renders_them(family: str, messages: list[dict[str, Any]]) -> None:
    chat, task = ChatTokens(tokenizer_of(family)), Task("1", messages)
    assert chat.of(task).prompt_tokens(task.prompt) == reference(family, messages)
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    assert chat.prompt_tokens(parts) == reference(family, messages)


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_a_rows_tools_and_calls_are_rendered(family: str) -> None:
    task = Task("1", CALLED, tools=[ADD])
    assert ChatTokens(tokenizer_of(family)).of(task).prompt_tokens(task.prompt) == reference(
        family, CALLED, tools=[ADD]
    )
    both = ChatTokens(tokenizer_of(family), tools=[ADD]).of(Task("2", "7 + 8 = ?", tools=[{**ADD, "other": 1}]))
    assert both.prompt_tokens("7 + 8 = ?") == reference(family, [USER], tools=[ADD, {**ADD, "other": 1}])


def test_the_system_prompt_comes_before_messages_without_one() -> None:
    chat = ChatTokens(tokenizer_of("qwen3"), "Be brief.")
    assert chat.prompt_tokens([USER]) == reference("qwen3", [SYSTEM, USER])
    own = {"role": "system", "content": "Be long."}
    assert chat.prompt_tokens([own, USER]) == reference("qwen3", [own, USER])


def test_variables_of_the_recipe_and_of_a_row_reach_prompts_replies_and_given_answers() -> None:
    tokenizer = tokenizer_of("qwen3")
    plain, chat = ChatTokens(tokenizer), ChatTokens(tokenizer, variables=NO_THOUGHTS)
    task = Task("1", "7 + 8 = ?", chat_template_kwargs=NO_THOUGHTS)
    expected = reference("qwen3", [USER], **NO_THOUGHTS)
    assert expected != plain.prompt_tokens("7 + 8 = ?")
    assert chat.prompt_tokens("7 + 8 = ?") == plain.of(task).prompt_tokens("7 + 8 = ?") == expected
    over = chat.of(Task("1", "7 + 8 = ?", chat_template_kwargs={"enable_thinking": True}))
    assert over.prompt_tokens("7 + 8 = ?") == plain.prompt_tokens("7 + 8 = ?")

    answer = (*tokenizer.encode("15", add_special_tokens=False), tokenizer.eos_token_id)
    for own in (chat, plain.of(task)):
        turns = (*own.prompt_tokens("7 + 8 = ?"), *answer, *own.reply_tokens([Reply("user", "and 9 more?")], answer))
        assert tokenizer.decode(turns).endswith("assistant\n<think>\n\n</think>\n\n")
    record = {"messages": [USER, SAID], "chat_template_kwargs": NO_THOUGHTS}
    (sample,) = read_conversation(record, "1").tokenized(plain).samples
    trained = [token for token, is_trained in zip(sample.token_ids, sample.loss_mask, strict=True) if is_trained]
    assert sample.token_ids[: len(expected)] == expected and tuple(trained) == answer


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation", "add_generation_prompt"])
def test_an_argument_of_the_tokenizer_is_no_variable(name: str) -> None:
    with pytest.raises(UserError, match=name):
        ChatTokens(tokenizer_of("qwen3"), variables={name: "x"})
    with pytest.raises(UserError, match=name):
        ChatTokens(tokenizer_of("qwen3")).of(Task("1", "-", chat_template_kwargs={name: "x"}))


def test_a_conversation_that_the_template_refuses_is_found_before_the_run() -> None:
    two = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
    good, bad = Task("good", CALLED), Task("row 17", [USER, two, {"role": "tool", "content": "15"}])
    try_prompts(ChatTokens(tokenizer_of("llama3")), [good, good])
    with pytest.raises(UserError, match="row 17"):
        try_prompts(ChatTokens(tokenizer_of("llama3")), [Task("text", "-"), good, bad])


def test_messages_need_a_chat_template() -> None:
    tokenizer = deepcopy(tokenizer_of("qwen3"))
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="chat template"):
        ChatTokens(tokenizer).prompt_tokens([SYSTEM, USER])


def test_held_out_conversations_are_compared_by_what_the_policy_sees() -> None:
    """Key order and lists or tuples make no difference; tools and variables do."""
    shuffled = ({"content": "Be brief.", "role": "system"}, {"content": "7 + 8 = ?", "role": "user"})
    same = [Task("1", [SYSTEM, USER]), Task("2", shuffled)]
    other = [Task("3", [SYSTEM, USER], tools=[ADD]), Task("4", [SYSTEM, USER], chat_template_kwargs=NO_THOUGHTS)]
    assert same[0].problem == same[1].problem and len({task.problem for task in (*same, *other)}) == 3
    parts = [{"role": "user", "content": [{"type": "text", "text": "7 + "}, {"type": "text", "text": "8 = ?"}]}]
    assert Task("6", [USER]).problem == Task("7", parts).problem == Task("8", "7 + 8 = ?").problem
    taskset = Taskset([*same, *other], eval_size=1, seed=0)
    held_out = taskset.held_out()[0].problem
    drawn = taskset.next_batch(8)
    assert all(task.problem != held_out for task in drawn) and Task("5", "7 + 8 = ?").problem == "7 + 8 = ?"


def test_a_plain_task_keeps_what_the_policy_sees_when_the_callers_lists_change() -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    tools, variables = [{"name": "f"}], {"x": [1]}
    plain = Task("t", messages, tools=tools, chat_template_kwargs=variables).plain()
    problem = plain.problem
    messages[0]["content"][0]["text"] = "b"
    messages.append({"role": "assistant", "content": "c"})
    tools[0]["name"], variables["x"][0] = "g", 2
    assert plain.problem == problem and "g" not in problem


def test_variables_reach_a_server_that_takes_messages() -> None:
    chat = ChatTokens(CharacterTokenizer(), variables={"enable_thinking": False})
    asked = asked_of(chat.prompt_tokens("a"))
    messages = [{"role": "user", "content": "a"}]
    assert asked == {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    assert asked_of(ChatTokens(CharacterTokenizer()).prompt_tokens("a")) == {"messages": messages}

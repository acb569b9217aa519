"""Given conversations: the tokens are the template's to the last one, and the mask is what the policy would say."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.backends.openai.text import CharacterTokenizer, asked_of
from octetrl.records import Reply
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.run.tiny_model import ASSISTANT, CHAT_TEMPLATE, END, train_tokenizer
from octetrl.system.errors import UserError
from tests.unit.rollout.templates import tokenizer_of

LOOP = "{% for message in messages %}"
THINKS = (  # as Qwen3's: thoughts stand in the answer after the last question alone, and are written there always
    LOOP
    + "{% set last = loop.last %}{% if message.role == 'assistant' %}"
    + ASSISTANT
    + "\n{% set parts = message.content.split('</think>') %}"
    + "{% if last %}<think>\n{{ parts[0].replace('<think>', '').strip() if parts|length > 1 }}\n</think>\n\n{% endif %}"
    + "{{ parts[-1].strip() }}"
    + END
    + "\n{% else %}<|user|>\n{{ message.content }}"
    + END
    + "\n{% endif %}{% endfor %}{% if add_generation_prompt %}"
    + ASSISTANT
    + "\n{% endif %}"
)
TRIMS = (  # as Llama 2's: blanks of an answer are taken off, and one is put on each side
    LOOP
    + "{% if message.role == 'assistant' %} {{ message.content | trim }} "
    + END
    + "{% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}"
)
TEMPLATES = {"plain": CHAT_TEMPLATE, "trims": TRIMS}
letters = st.text(alphabet="ab 1é\n{|<😀", min_size=1, max_size=12)
answers = letters.filter(lambda text: text.strip())


@pytest.fixture(scope="module")
def tokenizer() -> Any:  # each test sets the template it is about
    return train_tokenizer(["State the answer: 1 + 2 = 3, so the sum is 3. <think>\nab\n</think>\n\n"])


def conversation(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def spoken(tokenizer: Any, tokens: Any) -> list[str]:
    """The decoded runs of trained tokens."""
    runs: list[list[int]] = [[]]
    for token, trained in zip(tokens.token_ids, tokens.loss_mask, strict=True):
        if trained:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@settings(max_examples=60)
@given(turns=st.lists(st.tuples(letters, answers), min_size=1, max_size=4), system=st.none() | answers)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_mask_covers_exactly_what_the_assistant_says(
    tokenizer: Any, name: str, turns: list[tuple[str, str]], system: str | None
) -> None:
    tokenizer.chat_template = TEMPLATES[name]
    messages = conversation(*(text for turn in turns for text in turn), system=system)
    (tokens,) = ChatTokens(tokenizer).message_tokens(messages)
    assert tokens.token_ids == tuple(tokenizer.apply_chat_template(messages, return_dict=False))
    said = [answer + END if name == "plain" else f" {answer.strip()} {END}" for _, answer in turns]
    if not tokens.across_borders:
        assert spoken(tokenizer, tokens) == said
    else:
        assert name == "trims", "tokens across a border where special tokens stand on both sides"


def test_two_forms_of_one_conversation_are_the_same_sample(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = ChatTokens(tokenizer, "Be brief.")
    (tokens,) = chat.message_tokens(conversation("1 + 2 =", "so 3"))
    prompt, answer = chat.prompt_tokens("1 + 2 ="), chat.answer_tokens("so 3")
    assert tokens.token_ids == prompt + answer
    assert tokens.loss_mask == (False,) * len(prompt) + (True,) * len(answer)


def test_only_answers_from_the_given_message_on_are_learnt(tokenizer: Any) -> None:
    tokenizer.chat_template = CHAT_TEMPLATE
    for prompt in (None, "Be brief."):
        (tokens,) = ChatTokens(tokenizer, prompt).message_tokens(conversation("a", "b", "a", "1 + 2"), learn_from=3)
        assert spoken(tokenizer, tokens) == ["1 + 2" + END]


def test_thoughts_are_said_where_the_template_writes_them(tokenizer: Any) -> None:
    tokenizer.chat_template = THINKS
    messages = conversation("a", "<think>\n1\n</think>\n\nb", "a", "<think>\n2\n</think>\n\nb")
    first, second = ChatTokens(tokenizer).message_tokens(messages)
    assert spoken(tokenizer, first) == ["<think>\n1\n</think>\n\nb" + END]
    assert spoken(tokenizer, second) == ["<think>\n2\n</think>\n\nb" + END]
    for part, number in ((first, 1), (second, 3)):
        prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True, return_dict=False)
        assert list(part.token_ids[: len(prompt)]) == prompt and not any(part.loss_mask[: len(prompt)])
    (tokens,) = ChatTokens(tokenizer).message_tokens(conversation("a", "b"))
    assert spoken(tokenizer, tokens) == ["<think>\n\n</think>\n\nb" + END]


def test_the_longest_special_token_ends_a_turn(tokenizer: Any) -> None:
    """One may begin like another."""
    longer = deepcopy(tokenizer)
    longer.add_special_tokens({"additional_special_tokens": [END + "!"]})
    longer.chat_template = TRIMS.replace(END, END + "!")
    assert spoken(longer, ChatTokens(longer).message_tokens(conversation("a", "b"))[0]) == [f" b {END}!"]


def test_a_turn_ends_with_eos_after_another_special_token(tokenizer: Any) -> None:
    """As Cohere 2's. A reply follows the one that was sampled last."""
    two = deepcopy(tokenizer)
    two.add_special_tokens({"additional_special_tokens": ["<|end-of-text|>"]})
    two.chat_template = TRIMS.replace(END, "<|end-of-text|>" + END)
    chat = ChatTokens(two)
    assert spoken(two, chat.message_tokens(conversation("a", "b"))[0]) == [f" b <|end-of-text|>{END}"]
    for sampled in ([END], ["<|end-of-text|>", END]):
        said = two.convert_tokens_to_ids(sampled)
        assert two.decode(chat.reply_tokens([Reply("user", "c")], said)) == "[INST] c [/INST]"


def test_a_token_across_a_border_is_not_trained_on_and_counted() -> None:
    tokenizer = train_tokenizer(["State the answer: 1 + 2 = 3, so the sum is 3."])
    opening = "State the answer: 1 + 2"
    tokenizer.chat_template = (
        LOOP
        + "{% if message.role == 'assistant' %}"
        + opening
        + "{{ message.content }}"
        + END
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + opening
        + "{% endif %}"
    )
    tokenizer.add_tokens(["2 = 3"])
    (tokens,) = ChatTokens(tokenizer).message_tokens(conversation("?", " = 3, so"))
    assert tokens.across_borders == 1
    assert spoken(tokenizer, tokens) == [", so" + END]


# ---------------------------------------------------------------- templates that leave out a part of an answer

THOUGHT = "<think>\nSum.\n</think>\n\n4"


def said_after(family: str, messages: list[dict[str, Any]], **options: Any) -> list[tuple[str, str]]:
    """Of each sample: what comes before the answer, and the answer that is trained."""
    tokenizer = tokenizer_of(family)
    pairs = []
    for part in ChatTokens(tokenizer).message_tokens(messages, **options):
        begin = part.loss_mask.index(True)
        assert all(part.loss_mask[begin : begin + sum(part.loss_mask)]), "one run"
        end = begin + sum(part.loss_mask)
        pairs.append((tokenizer.decode(part.token_ids[:begin]), tokenizer.decode(part.token_ids[begin:end])))
    return pairs


def opened(family: str, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer_of(family).apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("content", [THOUGHT, "<think>Sum.\n</think>\n\n4", "Sum.\n</think>\n\n4"])
def test_a_template_that_cuts_thoughts_trains_what_follows_its_generation_prompt(content: str) -> None:
    messages = conversation("2 + 2?", content)
    assert said_after("r1", messages) == [(opened("r1", messages[:1]), "Sum.\n</think>\n\n4<|end|>")]
    assert opened("r1", messages[:1]).endswith("<think>\n")


def test_each_answer_follows_the_conversation_that_the_policy_would_see() -> None:
    messages = conversation("2 + 2?", THOUGHT, "And 3?", THOUGHT.replace("4", "5"), system="Add.")
    assert said_after("r1", messages) == [
        (opened("r1", messages[:2]), "Sum.\n</think>\n\n4<|end|>"),
        (opened("r1", messages[:4]), "Sum.\n</think>\n\n5<|end|>"),
    ]
    assert said_after("r1", messages, learn_from=3) == said_after("r1", messages)[1:]
    assert said_after("qwen3-thinking", conversation("a", "b", "c", "d")) == [
        (opened("qwen3-thinking", conversation("a")), "\n</think>\n\nb<|im_end|>"),
        (opened("qwen3-thinking", conversation("a", "b", "c")), "\n</think>\n\nd<|im_end|>"),
    ]


def test_thoughts_in_a_field_of_their_own_are_trained_where_the_template_writes_them() -> None:
    messages = conversation("2 + 2?", "4")
    messages[1]["reasoning_content"] = "Sum."
    assert said_after("qwen3-thinking", messages) == [
        (opened("qwen3-thinking", messages[:1]), "Sum.\n</think>\n\n4<|im_end|>")
    ]


@pytest.mark.parametrize(
    ("family", "answer", "what"),
    [
        ("r1", {"content": "4"}, "has no </think>"),
        ("r1", {"content": "4", "reasoning_content": "Sum."}, "'reasoning_content'"),
        ("chatml", {"content": "4", "reasoning_content": "Sum."}, "'reasoning_content'"),
        (
            "llama3",
            {"content": "Hm.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            "write 'content' of",
        ),
        ("chatml", {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "'tool_calls'"),
    ],
)
def test_an_answer_that_the_template_cannot_show_is_refused(family: str, answer: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        ChatTokens(tokenizer_of(family)).message_tokens([*conversation("2 + 2?"), {"role": "assistant", **answer}])


def test_a_prompt_and_its_answer_do_not_open_the_thoughts_twice() -> None:
    chat = ChatTokens(tokenizer_of("r1"))
    decode = tokenizer_of("r1").decode
    for answer in (THOUGHT, THOUGHT.removeprefix("<think>\n")):
        assert decode(chat.answer_tokens(answer)) == "Sum.\n</think>\n\n4<|end|>"
    assert decode(chat.answer_tokens("4")) == "4<|end|>"
    plain = tokenizer_of("qwen3")
    assert plain.decode(ChatTokens(plain).answer_tokens(THOUGHT)) == THOUGHT + "<|im_end|>"


@pytest.mark.parametrize("family", ["qwen2.5", "text calls", "printed calls"])
def test_arguments_are_written_once_as_json_whatever_form_the_template_takes(family: str) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    messages = [*conversation("?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    ((_, said),) = said_after(family, messages)
    assert '{"city": "Zürich"}' in said


def test_a_conversation_to_continue_has_its_arguments_once_too() -> None:
    """Also for a server, whose API has them as JSON text."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    messages = [*conversation("?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    for family in ("qwen2.5", "text calls"):
        tokenizer = tokenizer_of(family)
        assert '{"city": "Zürich"}' in tokenizer.decode(ChatTokens(tokenizer).prompt_tokens(messages))
    asked = asked_of(ChatTokens(CharacterTokenizer()).prompt_tokens(messages))
    assert asked["messages"] == messages


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        (LOOP + "{{ message.content }}\n{% endfor %}", "not with a special token"),
        (LOOP + "{% if message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}", "at a place of its own"),
        (
            "{{ messages[-1].content | length }}" + LOOP + "{{ message.content }}" + END + "{% endfor %}",
            "at a place of its own",
        ),
    ],
)
def test_a_template_that_hides_the_answer_is_refused(tokenizer: Any, template: str | None, message: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        ChatTokens(tokenizer).message_tokens(conversation("a", "b" * 12))

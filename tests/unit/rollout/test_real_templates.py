"""The chat templates that published models have: tokens equal those of transformers, id by id. The templates come with
TRL, in a package of its own; setup/outside_packages.sh runs these tests. Templates in our own words: templates.py."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from octetrl.environments.tools.formats.reading import ParsedMessage, ToolCall
from octetrl.environments.tools.messages import to_message, tool_message
from octetrl.records import Reply
from octetrl.rollout.call_text import find_format
from octetrl.rollout.chat_tokens import ChatTokens
from tests.required import missing

try:
    FOLDER = Path(str(distribution("trl").locate_file("trl/chat_templates")))
    LITELLM = Path(str(distribution("litellm").locate_file("litellm/litellm_core_utils/tokenizers")))
except PackageNotFoundError as error:
    missing("templates", f"{error.name} is not installed; `make test-outside` runs them", whole_module=True)

DEEPSEEK_END = "<｜end▁of▁sentence｜>"
ENDS = {  # EOS of the published tokenizers
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "cohere2": "<|END_OF_TURN_TOKEN|>",
    "deepseek_r1_distill": DEEPSEEK_END,
    "deepseekv3": DEEPSEEK_END,
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "glm4moe": "<|user|>",
    "gptoss": "<|return|>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "phi3": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_5_nothink": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "qwen3_6": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
}
FORMATS = {
    "deepseekv3": "deepseek_v3",
    "glm4moe": "glm45",
    "gptoss": "harmony",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_nothink": "qwen3_coder",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_instruct_2507": "hermes",
}
PREVIOUS = {"cohere2": "<|END_RESPONSE|>"}  # what ends an answer before EOS
INNER = {"gptoss": "<|end|>"}  # what ends an answer that is not the last
OPENS_THOUGHTS = {"deepseek_r1_distill", "deepseekv3", "qwen3_5_think", "qwen3_6"}
MARKS = re.compile(r"<\|[\w▁-]+\|>|<｜[\w▁]+｜>|<(?:start|end)_of_turn>|</?(?:think|tool_call|arg_key|arg_value)>")
USER = {"role": "user", "content": "7 + 8 = é?"}
ANSWER = {"role": "assistant", "content": "It is 15."}
MORE = {"role": "user", "content": "sure?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                key: {"type": kind, "description": key}
                for key, kind in (("a", "integer"), ("note", "string"), ("parts", "array"))
            },
            "required": [],
        },
    },
}
ARGUMENTS: list[dict[str, Any]] = [{"a": 7, "note": "8\n x", "parts": [1, {"x": "é"}]}, {"a": 3}]


@cache
def tokenizer_of(name: str) -> Any:
    """Byte-level BPE with the marks of the template as special tokens; DeepSeek's is the published one."""
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    if name == "deepseekv3":
        tokenizer = Tokenizer.from_file(str(LITELLM / "deepseek_tokenizer.json"))
        bos, marks = "<｜begin▁of▁sentence｜>", []
    else:
        tokenizer, bos = Tokenizer(models.BPE()), "<s>"
        marks = sorted({*MARKS.findall(template), ENDS[name], bos})
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=marks,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(["the sum of two whole numbers, said the user", "7 + 8 = 15.\n\n"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=ENDS[name],
        chat_template=template,
        extra_special_tokens=marks,
    )


def ids_of(name: str, messages: list[Any], opens: bool = True, tools: list[Any] | None = None) -> list[int]:
    """As transformers renders and tokenizes it. DeepSeek's template takes arguments of calls as text alone."""
    if name == "deepseekv3":
        messages = json.loads(json.dumps(messages))
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    tokenizer = tokenizer_of(name)
    return list(tokenizer.apply_chat_template(messages, tools, add_generation_prompt=opens, return_dict=False))


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["plain", "tools"])
def test_a_prompt_is_the_templates_ids(name: str, tools: list[Any]) -> None:
    chat = ChatTokens(tokenizer_of(name), tools=tools)
    wanted = ids_of(name, [USER], tools=tools or None)
    assert list(chat.prompt_tokens(USER["content"])) == list(chat.prompt_tokens([USER])) == wanted
    conversation = [USER, ANSWER, MORE]
    assert list(chat.prompt_tokens(conversation)) == ids_of(name, conversation, tools=tools or None)


@pytest.mark.parametrize("name", ENDS)
def test_a_reply_follows_an_answer_as_in_the_templates_ids(name: str) -> None:
    tokenizer = tokenizer_of(name)
    whole = ids_of(name, [USER, ANSWER, MORE])
    reply = list(ChatTokens(tokenizer).reply_tokens([Reply("user", MORE["content"])], [tokenizer.eos_token_id]))
    assert whole[-len(reply) :] == reply and MORE["content"] in tokenizer.decode(reply)
    end = PREVIOUS.get(name, "") + INNER.get(name, ENDS[name])
    assert tokenizer.decode(whole[: -len(reply)]).rstrip().endswith(ANSWER["content"] + end)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_back_and_results_follow_as_in_the_templates_ids(name: str, count: int) -> None:
    tokenizer, form = tokenizer_of(name), find_format(tokenizer_of(name))
    assert form is not None and form.name == FORMATS[name]
    if form.name in ("harmony", "llama3_json"):
        count = 1  # their templates write one call a message
    calls = tuple(ToolCall(form.call_id(n), "add", arguments) for n, arguments in enumerate(ARGUMENTS[:count]))
    called, results = to_message(ParsedMessage("", calls)), [tool_message(call, "15") for call in calls]
    opened = tokenizer.decode(ids_of(name, [USER], name.startswith("llama"), [TOOL]))  # others may open thoughts
    said = tokenizer.decode(ids_of(name, [USER, called], False, [TOOL])).removeprefix(opened)
    found = form.parse(said.removesuffix(ENDS[name]), [TOOL]).calls
    assert [(each.name, each.arguments) for each in found if isinstance(each, ToolCall)] == [
        ("add", arguments) for arguments in ARGUMENTS[:count]
    ]
    chat = ChatTokens(tokenizer, tools=[TOOL], tool_format=form)
    last = tokenizer.convert_tokens_to_ids({"gptoss": "<|call|>", "glm4moe": "<|observation|>"}.get(name, ENDS[name]))
    reply = list(chat.reply_tokens([Reply("tool", "15")] * count, [last], found))
    whole = ids_of(name, [USER, called, *results], tools=[TOOL])
    assert whole[-len(reply) :] == reply and tokenizer.decode(reply).count("15") == count


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("name", [*sorted(ENDS.keys() - OPENS_THOUGHTS)])
def test_given_answers_are_the_templates_ids_and_trained_to_their_end(name: str, turns: int) -> None:
    tokenizer = tokenizer_of(name)
    messages = [USER, ANSWER, MORE, {"role": "assistant", "content": "Yes é."}][: 2 * turns]
    parts = ChatTokens(tokenizer).message_tokens(messages)
    assert len(parts) == (turns if name == "qwen3_5_nothink" else 1)  # it writes thoughts into the last answer alone
    for number, part in enumerate(parts, turns + 1 - len(parts)):
        trained = [token for token, is_trained in zip(part.token_ids, part.loss_mask, strict=True) if is_trained]
        written = ids_of(name, messages[: 2 * number], False)
        assert list(part.token_ids) == written + ([tokenizer.eos_token_id] if name == "glm4moe" else [])
        said = tokenizer.decode(trained)
        assert ANSWER["content"] in said or number > 1
        assert said.endswith(messages[2 * number - 1]["content"] + PREVIOUS.get(name, "") + ENDS[name])
        assert part.across_borders == 0

"""Tokenizers with the chat templates of the families, in our own words: they do the same to a conversation.

chatml      roles as they are, no tools
qwen2.5     tools in the system prompt, calls in tags, results of tools together in one turn of the user's
qwen3       that, and thoughts left out of answers before the last question; `enable_thinking` false: empty thoughts
llama3      a system header of its own, contents trimmed, tools in the first question, results as role ipython in JSON
r1          thoughts cut off every given answer; the generation prompt opens them
qwen3-thinking   as qwen3, thoughts also in `reasoning_content`; the generation prompt opens them
text calls, printed calls   arguments of calls as they are, so they must be JSON text; objects fail in the first alone
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_SYSTEM = (
    "{% set given = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}"
    "<|im_start|>system\n{{ given }}"
    "{% if tools %}\n\n# Tools\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools>\n"
    'Call with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>{% endif %}<|im_end|>\n'
)
_QWEN_CALLS = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_QWEN_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_OPENED_OR_NOT = (
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_QWEN25 = (
    _QWEN_SYSTEM + "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}" + _QWEN_CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}" + _QWEN_RESULTS + "{% endif %}{% endfor %}" + _OPENED
)
_QWEN3 = (
    _QWEN_SYSTEM + "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.last %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' }}"
    "\n</think>\n\n{% endif %}{{ said }}" + _QWEN_CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}" + _QWEN_RESULTS + "{% endif %}{% endfor %}" + _OPENED_OR_NOT
)
_LLAMA3 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% elif m.role != 'system' %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if tools and loop.index0 == (1 if messages[0].role == 'system' else 0) %}"
    'Respond with {"name": ..., "parameters": ...}. Tools:\n'
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.content is not none %}{% set said = m.content %}"
    "{% if '</think>' in said %}{% set said = said.split('</think>')[-1] %}{% endif %}"
    "<|Assistant|>{{ said }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
_QWEN3_THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set said = m.content %}"
    "{% set thought = m.reasoning_content or '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}{{ said }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
_TEXT_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name + '\n' + c.function.arguments }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}" + _OPENED
)
_QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA_TOKENS = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
]  # fmt: skip
FAMILIES: dict[str, tuple[str, list[str], str]] = {
    "chatml": (_CHATML, _QWEN_TOKENS, "<|im_end|>"),
    "qwen2.5": (_QWEN25, _QWEN_TOKENS, "<|im_end|>"),
    "qwen3": (_QWEN3, _QWEN_TOKENS, "<|im_end|>"),
    "llama3": (_LLAMA3, _LLAMA_TOKENS, "<|eot_id|>"),
}
OTHERS: dict[str, tuple[str, list[str], str]] = {  # for given conversations alone
    "r1": (_R1, ["<|begin|>", "<|User|>", "<|Assistant|>", "<|end|>"], "<|end|>"),
    "qwen3-thinking": (_QWEN3_THINKING, _QWEN_TOKENS, "<|im_end|>"),
    "text calls": (_TEXT_CALLS, _QWEN_TOKENS, "<|im_end|>"),
    "printed calls": (_TEXT_CALLS.replace(" + '\n' + ", " }}\n{{ "), _QWEN_TOKENS, "<|im_end|>"),
}
WITH_TOOLS = ("qwen2.5", "qwen3", "llama3")


@cache
def tokenizer_of(family: str) -> Any:
    """Byte-level BPE, so that any text has tokens; special tokens and EOS as the family has them."""
    template, specials, eos = (FAMILIES | OTHERS)[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["the sum of two whole numbers, said the user; the assistant answers the tool", "7 + 8 = 15 and so 15"]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "</tool_call>")])
    bos = "<|begin_of_text|>" if family == "llama3" else None
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=template, extra_special_tokens=specials
    )


def stop_tokens(family: str) -> list[int]:
    """What the family's generation_config names."""
    names = {"llama3": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]}.get(family, ["<|im_end|>", "<|endoftext|>"])
    return [tokenizer_of(family).convert_tokens_to_ids(name) for name in names]

"""Chat templates of the formats of tool calls, in miniature and in our own words, with tokenizers that have the special
tokens of the formats. Each writes calls and results as the family's documentation shows them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_RESPONSE = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
_AS_TEXT = "{{ v if v is string else v | tojson }}"
_REFUSES = "{% if not m.tool_call_id or m.tool_call_id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"


def _turns(call: str, result: str, answer: str = _CHATML, opening: str = _OPEN, before: str = "") -> str:
    """call: the text of a message with calls; it loops over them itself."""
    return (
        before + "{% for m in messages %}{% if m.role == 'tool' %}" + result + "{% elif m.tool_calls %}" + call
        + "{% else %}" + answer + "{% endif %}{% endfor %}" + opening
    )  # fmt: skip


def _each(text: str) -> str:
    return "{% for c in m.tool_calls %}{% set f = c.function %}" + text + "{% endfor %}"


def _arguments(text: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + text + "{% endfor %}"


_IM = "<|im_start|>assistant\n{{ m.content }}"
_QWEN_VALUE = "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
_DEEP_ANSWER = (
    "{% if m.role == 'assistant' %}{% if messages[loop.index0 - 1].role != 'tool' %}<｜Assistant｜>{% endif %}"
    "{{ m.content }}<｜end▁of▁sentence｜>{% else %}<｜User｜>{{ m.content }}{% endif %}"
)
_DEEP_RESULT = "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
_DEEP_OPEN = "{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜>{% endif %}"
_MISTRAL_ANSWER = "{% if m.role == 'assistant' %}{{ m.content }}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
_HARMONY = (
    "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>"
)
_GLM = "<|{{ m.role }}|>\n{{ m.content }}"


@dataclass(frozen=True)
class Family:
    template: str
    specials: tuple[str, ...]
    plain: tuple[str, ...]  # tokens of their own that are not special
    eos: str
    form: str  # name of the format
    end: str = ""  # with which a message with calls ends, if not with EOS


_IMS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_DEEPS = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
)
_DEEP_CALL = "<｜Assistant｜>{{ m.content or '' }}<｜tool▁calls▁begin｜>@<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
_MISTRALS = ("[INST]", "[/INST]", "</s>", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
CALL_FAMILIES = {
    "qwen3-coder": Family(
        _turns(
            _IM + _each("{{ '\n' if loop.index0 or m.content }}<tool_call>\n<function={{ f.name }}>\n"
            + _arguments("<parameter={{ k }}>\n" + _QWEN_VALUE + "\n</parameter>\n") + "</function>\n</tool_call>")
            + "<|im_end|>\n",
            _RESPONSE, before=_TOOLS,
        ),
        _IMS, ("<tool_call>", "</tool_call>"), "<|im_end|>", "qwen3_coder",
    ),
    "glm": Family(
        _turns(
            "<|assistant|>\n{{ m.content }}" + _each("\n<tool_call>{{ f.name }}\n"
            + _arguments("<arg_key>{{ k }}</arg_key>\n<arg_value>" + _AS_TEXT + "</arg_value>\n") + "</tool_call>"),
            "<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>",
            _GLM, "{% if add_generation_prompt %}<|assistant|>\n{% endif %}", _TOOLS,
        ),
        ("<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "<|endoftext|>", "glm45", "<|observation|>",
    ),
    "deepseek-v3": Family(
        _turns(
            _DEEP_CALL.replace("@", _each("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
            "{{ '' + f.arguments }}\n```<｜tool▁call▁end｜>")),  # text alone
            _DEEP_RESULT, _DEEP_ANSWER, _DEEP_OPEN, _TOOLS,
        ),
        _DEEPS, (), "<｜end▁of▁sentence｜>", "deepseek_v3",
    ),
    "deepseek-v3.1": Family(
        _turns(
            _DEEP_CALL.replace("@", _each("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}"
            "<｜tool▁call▁end｜>")),
            _DEEP_RESULT, _DEEP_ANSWER, _DEEP_OPEN, _TOOLS,
        ),
        _DEEPS[:3], _DEEPS[3:], "<｜end▁of▁sentence｜>", "deepseek_v3",
    ),
    "kimi": Family(
        _turns(
            _IM + "<|tool_calls_section_begin|>" + _each("<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
            "{{ f.arguments | tojson }}<|tool_call_end|>") + "<|tool_calls_section_end|><|im_end|>",
            "<|im_start|>tool\n## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>",
            _CHATML.rstrip(), before=_TOOLS,
        ),
        (*_IMS, "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
         "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        (), "<|im_end|>", "kimi_k2",
    ),
    "minimax": Family(
        _turns(
            _IM + "{% if m.content %}\n{% endif %}<minimax:tool_call>\n" + _each('<invoke name="{{ f.name }}">\n'
            + _arguments('<parameter name="{{ k }}">' + _AS_TEXT + "</parameter>\n") + "</invoke>\n")
            + "</minimax:tool_call><|im_end|>\n",
            "{% if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}"
            "{{ raise_exception('a result without a call') }}{% endif %}" + _RESPONSE, before=_TOOLS,
        ),
        _IMS, ("<minimax:tool_call>", "</minimax:tool_call>"), "<|im_end|>", "minimax_m2",
    ),
    "mistral": Family(
        _turns(
            "{{ m.content }}" + _each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}") + "</s>",
            _REFUSES + "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]", _MISTRAL_ANSWER, "", _TOOLS,
        ),
        _MISTRALS, (), "</s>", "mistral",
    ),
    "mistral-old": Family(
        _turns(
            "[TOOL_CALLS] [" + _each('{{ ", " if loop.index0 }}{"name": "{{ f.name }}", "arguments": '
            '{{ f.arguments | tojson }}, "id": "{{ c.id }}"}') + "]</s>",
            _REFUSES + '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]',
            _MISTRAL_ANSWER, "", _TOOLS,
        ),
        _MISTRALS, (), "</s>", "mistral",
    ),
    "harmony": Family(
        _turns(
            _each("<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
            "{{ f.arguments | tojson }}<|call|>"),
            "{% if not m.name %}{{ raise_exception('whose result?') }}{% endif %}<|start|>functions.{{ m.name }}"
            " to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>",
            _HARMONY, "{% if add_generation_prompt %}<|start|>assistant{% endif %}", _TOOLS,
        ),
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
        (), "<|return|>", "harmony", "<|call|>",
    ),
}  # fmt: skip


@cache
def call_tokenizer(family: str) -> Any:
    """Byte-level BPE, so that any text has tokens."""
    one = CALL_FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(one.specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the sum of two whole numbers, said the user", "7 + 8 = 15"], trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in one.plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=one.eos,
        extra_special_tokens=list(one.specials),
        chat_template=one.template,
    )

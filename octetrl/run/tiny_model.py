"""A model small enough for a laptop: a Qwen3-architecture folder in Hugging Face form, tokenizer included.

The demo and the tests cannot load a model from a hub, so they create one. The tokenizer is byte-level BPE, so any text
can be encoded. Digits are single tokens, so arithmetic can be learnt. Its merges come from the given texts and may span
words, so a phrase that every prompt repeats is one or two tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 384
USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}" + END + ""
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)

# The same with tools, in the Hermes way: their schemas first, calls and results in tags.
TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}" + END + ""
    "{% elif message['role'] == 'tool' %}"
    + USER
    + "<tool_response>{{ message['content'] }}</tool_response>"
    + "{% elif message['role'] == 'user' %}"
    + USER
    + "{{ message['content'] }}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = VOCABULARY, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template; EOS is `<|end|>`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_trained(texts, vocab_size), eos_token=END, pad_token=PAD, chat_template=chat_template
    )


def _trained(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(texts: Iterable[str], folder: Path) -> None:
    """Write the tokenizer of `save_tokenizer`, without transformers, whose import takes seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    _trained(texts, VOCABULARY).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def save_tokenizer(
    texts: Iterable[str], folder: Path, vocab_size: int = VOCABULARY, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(texts, vocab_size, chat_template)
    tokenizer.save_pretrained(folder)
    return tokenizer

"""Turns a given conversation into token ids, and marks the tokens to train on.

The tokens are exactly those of the tokenizer's chat template: the whole conversation is rendered once and tokenized
once. The trained span of each assistant message goes

    from   where the template opens the answer        (found by rendering the messages before it, with generation
    prompt)
    to     the end of its turn: the first special token after the content, if only blanks come between

The policy thus learns the same answers as in a rollout, and to stop. A template that ends turns without a special token
is refused. If a template adds thoughts before the last answer (Qwen3), they are part of the span. Thoughts that it
leaves out of earlier answers are not trained on. If a template renders the beginning of the conversation differently
when it continues, the span is the answer's own text.

To find the end, the conversation is rendered with a placeholder as the answer; the text after the placeholder follows
the answer. A token across such a boundary is half the template's. No rollout could sample it there, so it is not
trained on, and counted.

Rollouts are tokenized piece by piece instead (rollout/chat_tokens.py), because they were sampled that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octetrl.config.errors import UserError
from octetrl.config.text import escaped
from octetrl.environments.chat_template import TEMPLATE_ERRORS
from octetrl.rollout.encode import Encoder

Message = Mapping[str, Any]  # role, content and other keys that the template reads
PLACEHOLDER = "PLACEHOLDER-OF-THE-ANSWER"  # rendered in place of an answer, to find the template's text around it


class OffsetTokenizer(Protocol):
    """The interface that is needed of a tokenizer; transformers' fast tokenizers have it."""

    chat_template: Any
    all_special_tokens: Any

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class TokenizedMessages:
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # the assistant's
    across_borders: int  # tokens half template, half answer: not trained on


def tokenize_messages(
    tokenizer: OffsetTokenizer,
    encoder: Encoder,
    messages: Sequence[Message],
    *,
    learn_from: int = 0,
    tools: Sequence[Any] | None = None,
) -> TokenizedMessages:
    """Tokens of the conversation; those of assistant messages from number `learn_from` on are trained on.

    Raises UserError if the tokenizer has no chat template, or one whose answers cannot be located.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            'tokenizer: it has no chat template, which rows of "messages" need;'
            ' set one in its tokenizer_config.json, or give rows of {"prompt", "answer"}'
        )

    def render(conversation: Sequence[Message], opens_answer: bool = False) -> str:
        given: dict[str, Any] = {} if tools is None else {"tools": list(tools)}
        try:
            text: str = tokenizer.apply_chat_template(
                [dict(message) for message in conversation], tokenize=False, add_generation_prompt=opens_answer, **given
            )
        except TEMPLATE_ERRORS as error:
            reason = " ".join(str(error).split())[:120]
            raise UserError(
                f"tokenizer: its chat template does not take this conversation ({type(error).__name__}: {reason});"
                f" correct the row, or chat_template in its tokenizer_config.json"
            ) from error
        return escaped(text)

    text = render(messages)
    spans = [
        _span(tokenizer, text, messages, index, render)
        for index in range(learn_from, len(messages))
        if messages[index]["role"] == "assistant"
    ]
    ids, offsets = encoder.with_offsets(text)
    loss_mask, across = [], 0
    for start, end in offsets:
        inside = any(first <= start and end <= last for first, last in spans)
        across += not inside and any(start < last and first < end for first, last in spans)
        loss_mask.append(inside)
    return TokenizedMessages(tuple(ids), tuple(loss_mask), across)


def _span(
    tokenizer: OffsetTokenizer, text: str, messages: Sequence[Message], index: int, render: Any
) -> tuple[int, int]:
    """The span of the assistant message `index` in `text`, with the end of its turn."""
    placeholder = {"role": "assistant", "content": PLACEHOLDER}
    before, found, after = render([*messages[:index], placeholder, *messages[index + 1 :]]).partition(PLACEHOLDER)
    opened = render(messages[:index], True)
    if found and text.startswith(opened):
        start = len(opened)
    elif found and text.startswith(before):
        start = len(before)
    else:
        raise UserError(
            f"tokenizer: its chat template does not show answer {index + 1} of a conversation at a place of its own,"
            f" so the answer's tokens can't be found; use a template that does"
        )
    end = len(text) - len(after)
    if end < start or not text.endswith(after):
        raise UserError(
            f"tokenizer: what its chat template writes after answer {index + 1} depends on the answer, so the answer's"
            f" tokens can't be found; use a template that writes the same after each"
        )
    return start, end + _turn_end(tokenizer, after)


def _turn_end(tokenizer: OffsetTokenizer, after: str) -> int:
    """Number of characters that end the turn: blanks, if any, and a special token."""
    blanks = len(after) - len(after.lstrip())
    for special in sorted(tokenizer.all_special_tokens, key=len, reverse=True):
        if after.startswith(special, blanks):
            return blanks + len(special)
    raise UserError(
        f"tokenizer: its chat template ends an answer with {after[:20]!r}, not with a special token, so no answer would"
        f" end; let the template write eos_token there, or declare what it writes a special token"
    )

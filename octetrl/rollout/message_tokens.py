"""A given conversation as token ids, and which of them the policy would have had to say.

The tokens are exactly those of the tokenizer's chat template: the whole conversation is rendered once and tokenized
once. What is trained on is, for each assistant message,

    from   where the template opens the answer        (rendering what came before it, with the generation prompt)
    to     the end of its turn: what follows the content, up to the first special token, if only blanks come between

so the policy learns to say what it would be asked for in a rollout, and to stop: a template that ends no turn by a
special token is refused. Where a template thinks before the last answer (Qwen3), the thoughts are part of what is
said; those that it leaves out of earlier answers are learnt from by nobody. If a template writes the beginning of
the conversation differently once it goes on, the answer's own text is taken instead.

The end is found by rendering the conversation with a placeholder in the answer's place: what then follows the
placeholder is what follows the answer. A token that lies across such a border, half of it the template's, is one that
no rollout could draw there: it is not trained on, and counted.

Rollouts are put into tokens piece by piece instead (rollout/chat_tokens.py), because theirs were drawn so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octetrl.config.errors import UserError
from octetrl.config.text import escaped
from octetrl.environments.chat_template import TEMPLATE_ERRORS
from octetrl.rollout.encode import Encoder

Message = Mapping[str, Any]  # role, content and whatever else the template reads
_PLACEHOLDER = "PLACEHOLDER-OF-THE-ANSWER"


class Tokenizer(Protocol):
    """What is asked of a tokenizer; transformers' fast ones have it."""

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
    tokenizer: Tokenizer,
    encoder: Encoder,
    messages: Sequence[Message],
    *,
    learn_from: int = 0,
    tools: Sequence[Any] | None = None,
) -> TokenizedMessages:
    """Tokens of the conversation; those of assistant messages from number `learn_from` on are trained on.

    Raises UserError when the tokenizer has no chat template, or one whose answers cannot be told from the rest.
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


def _span(tokenizer: Tokenizer, text: str, messages: Sequence[Message], index: int, render: Any) -> tuple[int, int]:
    """Where in `text` the assistant message `index` is, end of turn included."""
    placeholder = {"role": "assistant", "content": _PLACEHOLDER}
    before, found, after = render([*messages[:index], placeholder, *messages[index + 1 :]]).partition(_PLACEHOLDER)
    opened = render(messages[:index], True)
    if found and text.startswith(opened):
        start = len(opened)
    elif found and text.startswith(before):
        start = len(before)
    else:
        raise UserError(
            f"tokenizer: its chat template does not show answer {index + 1} of a conversation at a place of its own,"
            f" so its tokens can't be told from the rest; use a template that does"
        )
    end = len(text) - len(after)
    if end < start or not text.endswith(after):
        raise UserError(
            f"tokenizer: what its chat template writes after answer {index + 1} depends on the answer, so the answer's"
            f" tokens can't be told from the rest; use a template that writes the same after each"
        )
    return start, end + _turn_end(tokenizer, after)


def _turn_end(tokenizer: Tokenizer, after: str) -> int:
    """Letters of what ends the turn: blanks, if any, and a special token."""
    blanks = len(after) - len(after.lstrip())
    for special in sorted(tokenizer.all_special_tokens, key=len, reverse=True):
        if after.startswith(special, blanks):
            return blanks + len(special)
    raise UserError(
        f"tokenizer: its chat template ends an answer with {after[:20]!r}, not with a special token, so no answer would"
        f" end; let the template write eos_token there, or declare what it writes a special token"
    )

"""Turns a given conversation into token ids, and marks the tokens to train on.

The tokens are those of the tokenizer's chat template: the whole conversation is rendered once and tokenized once. The
trained span of each assistant message goes

    from   where the template opens the answer        (found by rendering the messages before it, with generation
    prompt)
    to     the end of its turn: the first special token after the content, if only blanks come between; where EOS
           follows it at once (Cohere 2), EOS

The policy thus learns the same answers as in a rollout, and to stop. A template may end turns with the special token
that opens the next one (GLM), and then a last answer gets that of the user's. One that ends them without a special
token is refused. If a template adds thoughts before the last answer (Qwen3), they are part of the span. If a template
renders the beginning of the conversation differently when it continues, the span is the answer's own text.

To find the end, the conversation is rendered with a placeholder as the answer; the text after the placeholder follows
the answer. A token across such a boundary is half the template's. No rollout could sample it there, so it is not
trained on, and counted.

A template may leave out a part of an answer that it shows again, such as its thoughts, or not show that its generation
prompt opens thoughts (R1-Distill). Nobody samples what it shows then. So each answer becomes a conversation of its own:
the messages before it with the generation prompt, then the answer as the template renders it in the last place. If that
leaves out a part too, the answer's own text follows the generation prompt.

Rollouts are tokenized piece by piece instead (rollout/chat_tokens.py), because they were sampled that way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

from octetrl.environments.tools.messages import TEMPLATE_ERRORS, arguments_of, function_of, with_written_calls
from octetrl.records import Message
from octetrl.rollout.encode import Encoder
from octetrl.system.errors import UserError
from octetrl.system.text import escaped

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message, by template
PLACEHOLDER = "PLACEHOLDER-OF-THE-ANSWER"  # rendered in place of an answer, to find the template's text around it


class OffsetTokenizer(Protocol):
    """The interface that is needed of a tokenizer; transformers' fast tokenizers have it."""

    chat_template: Any
    eos_token: Any
    all_special_tokens: Any

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class TokenizedMessages:
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # the assistant's
    across_borders: int  # tokens half template, half answer: not trained on


def tokenize_messages(
    template: Template, encoder: Encoder, messages: Sequence[Message], *, learn_from: int = 0
) -> tuple[TokenizedMessages, ...]:
    """Tokens of the conversation; those of assistant messages from number `learn_from` on are trained on. Several if
    the template leaves out parts of answers: then one for each of these messages.

    Raises UserError if the tokenizer has no chat template, or one whose answers cannot be located or sampled.
    """
    if not template.exists:
        raise UserError(
            'tokenizer: it has no chat template, which rows of "messages" need;'
            ' set one in its tokenizer_config.json, or give rows of {"prompt", "answer"}'
        )
    said = [index for index in range(learn_from, len(messages)) if messages[index]["role"] == "assistant"]
    text = template.closed(messages)
    spans = [template.span(text, messages, index) for index in said]
    shown = [span for span in spans if span is not None]
    if len(shown) == len(said):
        return (_tokenized(encoder, text, shown),)
    return tuple(_tokenized(encoder, alone, [span]) for alone, span in (template.alone(messages, i) for i in said))


def opened_thoughts(render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message]) -> str:
    """What the template writes at the end of its generation prompt after `messages` and not before a given answer, such
    as "<think>" and a line break. Raises UserError if it shows no given answer, or at another place."""
    before, found, _ = render([*messages, {"role": "assistant", "content": PLACEHOLDER}], False).partition(PLACEHOLDER)
    opened = render(messages, True)
    if not found or not (opened.startswith(before) or before.startswith(opened)):
        raise UserError(
            f"tokenizer: its chat template does not show answer {len(messages) + 1} of a conversation at a place of its"
            f" own, so the answer's tokens can't be found; use a template that does"
        )
    return opened[len(before) :]


def without_opening(answer: str, opening: str) -> str:
    """The answer as it is sampled after a generation prompt that ends with `opening`."""
    tag, begun = opening.strip(), answer.lstrip()
    if not tag or not begun.startswith(tag):
        return answer
    return begun.removeprefix(tag).removeprefix(opening[len(opening.rstrip()) :])


def end_of_turn(after: str, specials: Sequence[str], end: str | None) -> int:
    """Number of characters that end an answer: blanks and a special token, or several without blanks between them up to
    `end`, if it is one of them. 0: no special token comes first."""
    first, position = 0, len(after) - len(after.lstrip())
    while special := max((one for one in specials if after.startswith(one, position)), key=len, default=""):
        position += len(special)
        first = first or position
        if special == end:
            return position
    return first


class Template:
    """A tokenizer's chat template, with the tools that it writes into each conversation, and its variables."""

    def __init__(
        self,
        tokenizer: OffsetTokenizer,
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._tokenizer = tokenizer
        self._given: dict[str, Any] = {**variables, **({} if tools is None else {"tools": list(tools)})}

    @property
    def exists(self) -> bool:
        return self._tokenizer.chat_template is not None

    def render(self, conversation: Sequence[Message], opens_answer: bool = False) -> str:
        """Arguments of calls are objects for most templates; for those that print them as they are, JSON text. The
        content of a message of calls alone is null, or for templates that fail at it an empty text."""
        failures: list[BaseException] = []
        for way, has_objects in self._ways(conversation):
            try:
                text = self._rendered(way, opens_answer)
            except TEMPLATE_ERRORS as error:
                failures.append(error)
                continue
            calls = [call for message in way for call in message.get("tool_calls") or ()] if has_objects else []
            if not any(str(given) in text for given in map(arguments_of, calls) if given and isinstance(given, dict)):
                return text
        failure = failures[:2][-1]
        raise self._refusal(failure) from failure

    def _ways(self, conversation: Sequence[Message]) -> Iterator[tuple[Sequence[Message], bool]]:
        """What to try in turn, and whether arguments of calls are objects in it."""
        yield conversation, True
        if any(message.get("tool_calls") for message in conversation):
            yield [with_written_calls(message) for message in conversation], False
            if any(message.get("content", "") is None for message in conversation):
                yield from self._ways(
                    [{**m, "content": ""} if m.get("content", "") is None else m for m in conversation]
                )

    def closed(self, conversation: Sequence[Message]) -> str:
        """The rendered conversation, with the end of its last turn."""
        return self.render(conversation) + (self._closing if conversation[-1]["role"] == "assistant" else "")

    @cached_property
    def _closing(self) -> str:
        """The special token that opens the user's turn, if it alone ends an answer; else nothing."""
        user, answer = {"role": "user", "content": "-"}, {"role": "assistant", "content": PLACEHOLDER}
        try:
            last, after = (
                self.render(said).partition(PLACEHOLDER)[2] for said in ([user, answer], [user, answer, user])
            )
        except UserError:
            return ""
        if last.strip():
            return ""
        begin = len(after) - len(after.lstrip())
        specials = [special for special in self._tokenizer.all_special_tokens if after.startswith(special, begin)]
        return after[:begin] + max(specials, key=len) if specials else ""

    def span(self, text: str, messages: Sequence[Message], index: int) -> tuple[int, int] | None:
        """The span of the assistant message `index` in `text`, with the end of its turn. None: `text` shows it in
        another way than it is sampled."""
        try:
            before, found, after = self._around(messages, index)
        except UserError:  # results of tools without calls
            if not messages[index].get("tool_calls"):
                raise
            before = found = after = ""
        opened = self.render(messages[:index], True)
        if not found or not text.endswith(after):
            return self._span_of_calls(text, messages, index) if messages[index].get("tool_calls") else None
        begin, end = len(before), len(text) - len(after)
        if text.startswith(opened):
            begin = len(opened)
        elif not (text.startswith(before) and before.endswith(self._opening(messages[:index], opened))):
            return None
        if end < begin or _left_out(self._opening(messages[:index], opened) + text[begin:end], messages[index]):
            return None
        return begin, end + self._turn_end(after)

    def _span_of_calls(self, text: str, messages: Sequence[Message], index: int) -> tuple[int, int] | None:
        """As `span`, where only a message with calls is written in this way."""
        opened, closed = self.render(messages[:index], True), self.closed(messages[: index + 1]).rstrip()
        if not (text.startswith(opened) and text.startswith(closed)) or _left_out(
            closed[len(opened) :], messages[index]
        ):
            return None
        return (len(opened), len(closed)) if closed.endswith(tuple(self._tokenizer.all_special_tokens)) else None

    def alone(self, messages: Sequence[Message], index: int) -> tuple[str, tuple[int, int]]:
        """The messages before `index`, this answer as it is sampled after them, and its span."""
        conversation, message = messages[: index + 1], messages[index]
        text = self.closed(conversation)
        span = self.span(text, conversation, index)
        if span is not None:
            return text, span
        opening = opened_thoughts(self.render, messages[:index])
        apart = [key for key in ("tool_calls", *THOUGHTS) if message.get(key)]
        if apart:
            names = " and ".join(map(repr, dict.fromkeys(_left_out(text, message) or apart)))
            raise UserError(
                f"the chat template does not write {names} of message {index + 1} where the model would; write it into"
                f" 'content' as the model would, or remove it"
            )
        answer = without_opening(escaped(message.get("content") or ""), opening)
        opens = re.fullmatch(r"\s*<(\w+)>\s*", opening)
        if opens and f"</{opens[1]}>" not in answer:
            raise UserError(
                f"the chat template opens each answer with {opening.strip()}, and message {index + 1} has no"
                f" </{opens[1]}>; write its thoughts into 'content' too, or use a template that does not open them"
            )
        opened, after = self.render(messages[:index], True), self._around(conversation, index)[2]
        end = len(opened) + len(answer) + self._turn_end(after)
        return (opened + answer + after)[:end], (len(opened), end)

    def _around(self, messages: Sequence[Message], index: int) -> tuple[str, str, str]:
        placeholder = {"role": "assistant", "content": PLACEHOLDER}
        return self.closed([*messages[:index], placeholder, *messages[index + 1 :]]).partition(PLACEHOLDER)

    def _opening(self, messages: Sequence[Message], opened: str) -> str:
        """The generation prompt alone."""
        return opened.removeprefix(self.render(messages))

    def _rendered(self, conversation: Sequence[Message], opens_answer: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in conversation],
            tokenize=False,
            add_generation_prompt=opens_answer,
            **self._given,
        )
        return escaped(text)

    def _refusal(self, error: BaseException) -> UserError:
        reason = " ".join(str(error).split())[:120]
        return UserError(
            f"tokenizer: its chat template does not take this conversation ({type(error).__name__}: {reason});"
            f" correct the row, or chat_template in its tokenizer_config.json"
        )

    def _turn_end(self, after: str) -> int:
        """Number of characters that end the turn."""
        if end := end_of_turn(after, self._tokenizer.all_special_tokens, self._tokenizer.eos_token):
            return end
        raise UserError(
            f"tokenizer: its chat template ends an answer with {after[:20]!r}, not with a special token, so no answer"
            f" would end; let the template write eos_token there, or declare what it writes a special token"
        )


def _left_out(text: str, message: Message) -> list[str]:
    """The keys of an answer whose texts, or whose calls' names, are not in `text`, blanks aside."""
    parts = [(key, message.get(key)) for key in ("content", *THOUGHTS)]
    parts += [("tool_calls", function_of(call).get("name")) for call in message.get("tool_calls") or ()]
    shown = "".join(text.split())
    return [key for key, part in parts if isinstance(part, str) and "".join(escaped(part).split()) not in shown]


def _tokenized(encoder: Encoder, text: str, spans: Sequence[tuple[int, int]]) -> TokenizedMessages:
    ids, offsets = encoder.with_offsets(text)
    loss_mask, across = [], 0
    for start, end in offsets:
        inside = any(first <= start and end <= last for first, last in spans)
        across += not inside and any(start < last and first < end for first, last in spans)
        loss_mask.append(inside)
    return TokenizedMessages(tuple(ids), tuple(loss_mask), across)

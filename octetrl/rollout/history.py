"""The prompt of each later turn of a conversation: `rollout.history`.

    recorded   the tokens so far, and the tokens of the replies after them: the history never changes
    template   the chat template renders all messages again, as a server does that receives them with every request

A template may show an earlier answer in another form than it was sampled: Qwen3 leaves out its thoughts after the next
message of the user, and any template writes a call's arguments in its own JSON. An environment may edit
`conversation.messages`, for example to shorten a long history. With `template` the policy then sees the changed text.

Tokens are recorded all the same where nothing has changed. A point of the rollout, at the end of a prompt or of an
answer, has a text and its tokens. The longest of these texts that begins the rendered text keeps its tokens, and only
the rest is tokenized. So another tokenization of the same text changes nothing, and a real change begins a new segment
(`Turn.is_fork`), a sample of its own. Answers in its prompt are not trained on again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from octetrl.environments.tools.formats.reading import Call
from octetrl.records import Completion, Message, Prompt, Reply
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.system.text import escaped

History = Literal["recorded", "template"]


class RecordedHistory:
    """Tokens are only appended."""

    def __init__(self, chat: ChatTokens) -> None:
        self._chat = chat

    def add(self, new: Sequence[int], completion: Completion, *, is_fork: bool) -> None:
        pass

    def next_prompt(
        self, messages: Sequence[Message], replies: Sequence[Reply], completion: Completion, calls: Sequence[Call] = ()
    ) -> tuple[tuple[int, ...], bool]:
        """The new tokens before the next answer, and whether they are a whole prompt (`Turn.is_fork`).
        calls: those that the replies answer.

        Raises ReplyError for messages that the template refuses, TextTooLong if they certainly exceed the context.
        """
        return self._chat.reply_tokens(replies, completion.token_ids, calls), False


@dataclass(slots=True)
class _Segment:
    """A token sequence with its text. points: (characters, tokens) at the ends of prompts and answers."""

    text: str
    token_ids: list[int]
    points: list[tuple[int, int]] = field(default_factory=list)

    def add(self, text: str, token_ids: Sequence[int]) -> None:
        self.text += text
        self.token_ids += token_ids
        self.points.append((len(self.text), len(self.token_ids)))


class TemplateHistory(RecordedHistory):
    """The template renders each prompt. prompt: the task's."""

    def __init__(self, chat: ChatTokens, prompt: Prompt) -> None:
        super().__init__(chat)
        self._rendered = escaped(chat.prompt_text(prompt))  # the next prompt
        self._kept = 0  # characters of it whose tokens are recorded
        self._segments: list[_Segment] = []

    def add(self, new: Sequence[int], completion: Completion, *, is_fork: bool) -> None:
        """A turn that was sampled after the last `next_prompt`, or after the task's prompt."""
        if is_fork or not self._segments:
            self._segments.append(_Segment("", []))
            self._kept = 0
        segment, answer = self._segments[-1], completion.token_ids
        segment.add(self._rendered[self._kept :], new)
        if answer and self._chat.is_end(answer[-1]):  # a point before it: the template may end answers in another way
            segment.add(self._chat.text_of(answer[:-1]), answer[:-1])
            answer = answer[-1:]
        segment.add(self._chat.text_of(answer), answer)

    def next_prompt(
        self, messages: Sequence[Message], replies: Sequence[Reply], completion: Completion, calls: Sequence[Call] = ()
    ) -> tuple[tuple[int, ...], bool]:
        self._rendered = self._chat.history_text(messages)
        (self._kept, tokens), segment = max(
            ((_last_common(one, self._rendered), one) for one in self._segments), key=lambda point: point[0]
        )
        rest = self._chat.ids_after(self._rendered[self._kept :])
        is_end = segment is self._segments[-1] and tokens == len(segment.token_ids)
        return (rest, False) if is_end else ((*segment.token_ids[:tokens], *rest), True)


def _last_common(segment: _Segment, text: str) -> tuple[int, int]:
    """The last point of the segment up to which its text is that of `text`."""
    beginnings = (point for point in reversed(segment.points) if text.startswith(segment.text[: point[0]]))
    return next(beginnings, (0, 0))

"""What the policy has seen and said in one rollout, and the prompt of each later turn: `rollout.history`.

    recorded   the tokens so far, and the tokens of the messages after them: the history never changes
    template   the chat template renders all messages again, as a server does that receives them with every request

A template may show an earlier answer in another form than it was sampled: Qwen3 leaves out its thoughts after the next
message of the user, and any template writes a call's arguments in its own JSON. An environment may edit
`conversation.messages`, for example to shorten a long history. With `template` the policy then sees the changed text.

Tokens are recorded all the same where nothing has changed. A point of the rollout, at the end of a prompt or of an
answer, has a text and its tokens. The longest of these texts that begins the rendered text keeps its tokens, and only
the rest is tokenized. So another tokenization of the same text changes nothing, and a real change begins a new segment
(`Turn.is_fork`), a sample of its own. Answers in its prompt are not trained on again.

Points are a tree (`Piece`), in which each holds only what comes after its parent. agents/ records the calls of programs
in the same tree.
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


@dataclass(slots=True, eq=False)
class Piece:
    """Tokens that follow those of `parent`, and their text. text: None: not known yet, so no text is compared."""

    parent: Piece | None = None
    token_ids: tuple[int, ...] = ()
    text: str | None = ""
    num_tokens: int = 0  # from the root to its end
    children: list[Piece] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], text: str | None) -> Piece:
        """The piece of these tokens after this one. Equal tokens are the same piece."""
        token_ids = tuple(token_ids)
        if not token_ids:
            return self
        for child in self.children:
            if child.token_ids == token_ids:
                return child
        self.children.append(Piece(self, token_ids, text, self.num_tokens + len(token_ids)))
        return self.children[-1]

    def all_tokens(self) -> tuple[int, ...]:
        """From the root to its end."""
        pieces: list[Piece] = []
        piece: Piece | None = self
        while piece is not None:
            pieces.append(piece)
            piece = piece.parent
        return tuple(token for one in reversed(pieces) for token in one.token_ids)

    def longest(self, text: str) -> tuple[Piece, int]:
        """The piece below this one whose whole text is the longest beginning of `text`, and its characters."""
        best, waiting = (self, 0), [(self, 0)]
        while waiting:
            piece, characters = waiting.pop()
            if characters > best[1] or (characters == best[1] and piece.parent is best[0]):
                best = (piece, characters)
            for child in reversed(piece.children):  # of equally long ones the first
                if child.text is not None and text.startswith(child.text, characters):
                    waiting.append((child, characters + len(child.text)))
        return best


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


class TemplateHistory(RecordedHistory):
    """The template renders each prompt. prompt: the task's."""

    def __init__(self, chat: ChatTokens, prompt: Prompt) -> None:
        super().__init__(chat)
        self._new = escaped(chat.prompt_text(prompt))  # the text that the next prompt adds to `_at`
        self._root = self._at = self._last = Piece()  # _at: what the next prompt follows; _last: the last answer's end

    def add(self, new: Sequence[int], completion: Completion, *, is_fork: bool) -> None:
        """A turn that was sampled after the last `next_prompt`, or after the task's prompt."""
        prompt = self._at.add(new[self._at.num_tokens :] if is_fork else new, self._new)
        answer = completion.token_ids
        if answer and self._chat.is_end(answer[-1]):  # a point before it: the template may end answers in another way
            prompt = prompt.add(answer[:-1], self._chat.text_of(answer[:-1]))
            answer = answer[-1:]
        self._last = prompt.add(answer, self._chat.text_of(answer))

    def next_prompt(
        self, messages: Sequence[Message], replies: Sequence[Reply], completion: Completion, calls: Sequence[Call] = ()
    ) -> tuple[tuple[int, ...], bool]:
        rendered = self._chat.history_text(messages)
        self._at, kept = self._root.longest(rendered)
        self._new = rendered[kept:]
        rest = self._chat.ids_after(self._new)
        is_end = self._at is self._last
        return (rest, False) if is_end else ((*self._at.all_tokens(), *rest), True)

"""One choice of an answer while it is sampled: the text that may be shown, its tokens, log-probs and tool calls.

The same code handles a whole answer as one piece and a streamed answer as several, so the pieces of a stream add up to
the whole. Text is held back if it ends with

    an unfinished character                                    a character may take several tokens
    a possible beginning of a stop string                      the text ends before a stop string
    a possible tool call, with the white space before it       calls are parsed when the message is complete

Log-probs are those of training (records.SamplingParams), after the temperature and before top_p. Every sampled token
has one, also the token that ended the answer. `token` is the text of a single token, `bytes` what it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from octetrl.engine.stopping import TextDecoder, TextStream
from octetrl.environments.tools.formats.reading import ParsedMessage, ToolCall, ToolFormat
from octetrl.environments.tools.messages import to_message
from octetrl.records import Completion, EventDetails, FinishReason, PromptLogprobs, SessionEvent, Top
from octetrl.rollout.call_text import CallText


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """The part that one event adds to a choice."""

    index: int  # index of the choice
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    offsets: tuple[int, ...]  # start of each token's text in the choice's; past its end for a cut-off stop string
    finish_reason: str | None  # None: the choice is not finished
    calls: tuple[ToolCall, ...] = ()
    tops: tuple[Top, ...] = ()  # of each token, if asked for
    prompt: PromptLogprobs | None = None  # with the choice's first piece, if asked for
    is_first: bool = True


class Choice:
    """Choice `index` of an answer. `tool_format`: of the calls to look for; None: everything is text."""

    def __init__(
        self,
        index: int,
        *,
        decode: TextDecoder,
        stops: tuple[str, ...],
        tool_format: ToolFormat | None,
        logprobs: bool,
        empty: bool = False,
        tools: Sequence[Any] = (),
        call_text: CallText | None = None,
    ) -> None:
        """tools: their schemas. call_text: decodes the special tokens of calls; None: there are none.

        `empty`: the client wants no answer; the one token that the engine samples is dropped."""
        self._empty = empty
        self._index, self._format, self._logprobs, self._tools = index, tool_format, logprobs, tools
        self._call_text = call_text
        decode = decode if call_text is None else TextDecoder(call_text.decode, decode.byte_tokens)
        self._stops = stops
        self._marks = () if tool_format is None else tool_format.openings
        self._stream = TextStream(decode)
        self._shown = 0  # characters
        self._offset = 0  # of the last token; a byte may take back what the bytes before it had spelt
        self._begun = False

    def take(self, drawn: SessionEvent) -> ChoicePiece:
        completion = drawn.completion
        offsets: list[int] = []
        if self._empty:
            reason = FinishReason.LENGTH.value if completion is not None else None
            return self._piece(replace(drawn, token_ids=(), logprobs=()), "", offsets, reason)
        if completion is None or self._logprobs:
            for token in drawn.token_ids:
                self._offset = max(self._offset, len(self._stream.so_far()))
                offsets.append(self._offset)
                self._stream.push(token)
        if completion is None:
            text = self._stream.text[: self._showable(self._stream.text)]
            return self._piece(drawn, text if self._format is None else text.strip(), offsets)
        return self._last_piece(drawn, completion, offsets)

    def _last_piece(self, drawn: SessionEvent, completion: Completion, offsets: list[int]) -> ChoicePiece:
        text = completion.text
        calls: tuple[ToolCall, ...] = ()
        reason = completion.finish_reason.value
        if self._format is not None:
            parsed = read_answer(completion, self._format, self._tools, self._call_text, self._stops)
            text = to_message(parsed)["content"]
            calls = tuple(call for call in parsed.calls if isinstance(call, ToolCall))
            if calls and completion.finish_reason is FinishReason.STOP:
                reason = "tool_calls"
        return self._piece(drawn, text, offsets, reason, calls)

    def _piece(
        self,
        drawn: SessionEvent,
        text: str,
        offsets: list[int],
        reason: str | None = None,
        calls: tuple[ToolCall, ...] = (),
    ) -> ChoicePiece:
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))  # less of the text before a tool call may be sure than was shown
        is_first, self._begun = not self._begun, True
        details = drawn.details or EventDetails()
        return ChoicePiece(
            self._index, new, drawn.token_ids, drawn.logprobs, tuple(offsets), reason, calls,
            () if self._empty else details.tops, details.prompt, is_first,
        )  # fmt: skip

    def _showable(self, text: str) -> int:
        """Return the number of characters that no later token can change."""
        end = min((at for at in (text.find(mark) for mark in self._marks) if at >= 0), default=len(text))
        held = max((_begins(text[:end], string) for string in (*self._stops, *self._marks)), default=0)
        return end - held


def read_answer(
    completion: Completion, form: ToolFormat, tools: Sequence[Any], call_text: CallText | None, stops: Sequence[str]
) -> ParsedMessage:
    """Content and calls of a whole answer, as a client gets them."""
    return form.parse(completion.text if call_text is None else call_text.of(completion, stops), tools)


def _begins(text: str, string: str) -> int:
    """Return the length of the longest end of `text` with which `string` begins."""
    longest = min(len(text), len(string) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(string[:length])), 0)

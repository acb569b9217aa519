"""Formats whose calls stand between tags. Each is a row of `TAGGED`; `docs/environment_tools.md` shows them.

A call is read from the beginning, so its arguments may contain any text, even the closing tag. The closing tag may be
missing at the very end, because it may have been the stop string. A call that can't be read ends at the next tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octetrl.environments.tools.formats.reading import (
    THINK,
    UNTHINK,
    Call,
    Draft,
    ParsedMessage,
    ToolFormat,
    Unreadable,
    draft_of,
    join,
    parameters_of,
    read_arguments,
    read_json,
    shown,
    skip_blanks,
    typed,
)

Drafts = tuple[list[Draft | str], int]  # with the end of what was read
_NAME = re.compile(r"""\s*([^\s<>{}\[\]"]+)\s*""")


@dataclass(frozen=True)
class Tagged(ToolFormat):
    """opening, closing: of a call; no closing: its body ends by itself. section: around the calls of a message.
    read: the body of a call at a position, with the tools' schemas; it raises Unreadable. bare: whether a call may also
    stand outside a section."""

    opening: str = ""
    closing: str = ""
    section: tuple[str, str] = ("", "")
    read: Callable[[str, int, Sequence[Any]], Drafts] = lambda text, start, tools: ([], start)
    bare: bool = True

    @cached_property
    def _landmark(self) -> re.Pattern[str]:
        tags = [self.section[0], self.opening if self.bare or not self.section[0] else "", THINK, UNTHINK]
        return re.compile("|".join(map(re.escape, filter(None, tags))))

    @cached_property
    def _ending(self) -> re.Pattern[str]:
        """Where a call that can't be read ends."""
        tags = filter(None, [self.closing, self.section[1], self.section[0], self.opening, THINK, UNTHINK])
        return re.compile("|".join(map(re.escape, tags)))

    def parse(self, text: str, tools: Sequence[Any] = ()) -> ParsedMessage:
        pieces: list[str] = []  # of content
        calls: list[Call] = []
        done = position = 0  # content is taken up to `done`, read up to `position`
        thoughts_may_be_open = True
        if isinstance(self.read, _Pairs):  # a value without an end would run on into the call after the thoughts
            thoughts, end_of_thoughts, rest = text.partition(UNTHINK)
            if end_of_thoughts and THINK not in thoughts and not self._is_in_a_value(thoughts, rest):
                position, thoughts_may_be_open = len(thoughts) + len(UNTHINK), False
        while found := self._landmark.search(text, position):
            if found[0] == THINK:
                end = text.find(UNTHINK, found.end())
                position = len(text) if end < 0 else end + len(UNTHINK)
                thoughts_may_be_open = False
            elif found[0] == UNTHINK:
                if thoughts_may_be_open:  # all of it was thought, what looked like calls too
                    pieces, calls, done = [], [], 0
                thoughts_may_be_open = False
                position = found.end()
            else:
                pieces.append(text[done : found.start()])
                done = position = self._read_calls(text, found.start(), calls, tools)
        pieces.append(text[done:])
        return self.message(join(*pieces), calls)

    def _is_in_a_value(self, before: str, after: str) -> bool:
        """Whether what stands between these texts is in a call: one is open, and ends before the next begins."""
        end = after.find(self.closing)
        is_open = before.rfind(self.opening) > before.rfind(self.closing)
        return is_open and end >= 0 and self.opening not in after[:end]

    def _read_calls(self, text: str, position: int, calls: list[Call], tools: Sequence[Any]) -> int:
        """Append the calls that begin at `position`, with a section or without. Returns where they end."""
        opening, (section, section_end) = self.opening, self.section
        begin = skip_blanks(text, position + len(section)) if section and text.startswith(section, position) else None
        shown_from, position = position, position if begin is None else begin
        while True:
            position = self._read_call(text, shown_from, position, calls, tools)
            after = skip_blanks(text, position)
            if section_end and text.startswith(section_end, after):
                return after + len(section_end)
            if begin is None or not text.startswith(opening, after):
                return position
            shown_from = position = after

    def _read_call(self, text: str, shown_from: int, opened: int, calls: list[Call], tools: Sequence[Any]) -> int:
        """Append the call at `opened`, whose text begins at `shown_from`. Returns its end."""
        start = opened + len(self.opening)
        try:
            if not text.startswith(self.opening, opened):
                start = opened
                raise Unreadable(f"{shown(text[opened:])} stands where {self.opening} should")
            drafts, end = self.read(text, start, tools)
            after = skip_blanks(text, end) if self.closing else end
            closed = after + len(self.closing) if text.startswith(self.closing, after) else after
            is_missing = self.closing and closed == after and after < len(text)
            if is_missing and not (self.section[1] and text.startswith(self.section[1], after)):
                raise Unreadable(f"{shown(text[after:])} stands where {self.closing} should")
            for draft in drafts:
                calls.append(self.call(draft, text[shown_from:closed]))
            return closed
        except Unreadable as error:
            ending = self._ending.search(text, start)
            ends = ending is not None and ending[0] == self.closing
            end = len(text) if ending is None else ending.end() if ends else ending.start()
            calls.append(self.malformed(text[shown_from:end], error))
            return end


def _hermes(text: str, start: int, tools: Sequence[Any]) -> Drafts:
    value, end = read_json(text, start)
    return [draft_of(value, "arguments")], end


@dataclass(frozen=True, slots=True)
class _Pairs:
    """A name, then pairs of key and value: `key` matches up to where a value begins, `value_end` after it. Values are
    text as it is, or JSON, by the tool's schema. A value without an end is read up to `next_key`, if the tool has that
    parameter. lines: whether a value stands in lines of its own."""

    name: re.Pattern[str]
    key: re.Pattern[str]
    value_end: re.Pattern[str]
    next_key: re.Pattern[str]
    lines: bool = False

    def __call__(self, text: str, start: int, tools: Sequence[Any]) -> Drafts:
        named = self.name.match(text, start)
        if named is None:
            raise Unreadable("it has no name of a tool")
        schemas, position = parameters_of(tools, named[1]), named.end()
        arguments: dict[str, Any] = {}
        while found := self.key.match(text, position):
            key, ended = found[1].strip(), self.value_end.search(text, found.end())
            if ended is None:
                raise Unreadable(f"the value of '{key[:40]}' does not end")
            value, position = text[found.end() : ended.start()], ended.end()
            for another in self.next_key.finditer(value):
                if another[1].strip() in schemas.keys() - {key, *arguments}:
                    value, position = value[: another.start()], found.end() + another.start()
                    break
            if self.lines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = typed(value, schemas.get(key))
        return [Draft(named[1], arguments)], position


def _pattern(key: str, close: str, *following: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """The patterns of a key, of the value's end, which is the tag before which nothing else can follow, and of the next
    key."""
    after = "|".join(map(re.escape, following))
    return re.compile(rf"\s*{key}"), re.compile(rf"{re.escape(close)}(?=\s*(?:{after}|\Z))"), re.compile(key)


_SEP = "<｜tool▁sep｜>"


def _deepseek(text: str, start: int, tools: Sequence[Any]) -> Drafts:
    """V3 and R1: function<sep>NAME, and the arguments in a fence. V3.1: NAME<sep> and the arguments."""
    named = _NAME.match(text, start)
    begin = start if named is None else named.end()
    if not text.startswith(_SEP, begin):
        raise Unreadable(f"it has no {_SEP} after its name")
    position = begin + len(_SEP)
    if not text.startswith("{", skip_blanks(text, position)):
        named = _NAME.match(text, position)
        if named is None:
            raise Unreadable("it has no name of a tool")
        position = named.end()
    fence = text.startswith("```", position)
    if fence:
        position += len("```json") if text.startswith("```json", position) else len("```")
    arguments, position = read_arguments(text, position)
    after = skip_blanks(text, position)
    if fence and text.startswith("```", after):
        position = after + len("```")
    return [Draft(named[1], arguments) if named is not None else "it has no name of a tool"], position


_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_NAME = re.compile(r"(?:functions\.)?([^\s<>]+?)(?::\d+)?")


def _kimi(text: str, start: int, tools: Sequence[Any]) -> Drafts:
    end = text.find(_ARGUMENTS, start)
    if end < 0:
        raise Unreadable(f"it has no {_ARGUMENTS}")
    id = text[start:end].strip()
    named = _KIMI_NAME.fullmatch(id)
    if named is None:
        raise Unreadable(f"{shown(id)} is no functions.NAME:INDEX")
    arguments, end = read_arguments(text, end + len(_ARGUMENTS))
    return [Draft(named[1], arguments, id)], end


_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+?)\s*(?:\[CALL_ID\]\s*(\w*)\s*)?(?:\[ARGS\]|(?=\{))")


def _mistral(text: str, start: int, tools: Sequence[Any]) -> Drafts:
    """NAME[ARGS]{...}, or before v11 a list of objects, or one of them."""
    begin = skip_blanks(text, start)
    if begin == len(text) or text[begin] in "[{":
        value, end = read_json(text, start)
        values = value if isinstance(value, list) else [value]
        return [_with_id(draft_of(each, "arguments"), each) for each in values] or ["the list is empty"], end
    named = _MISTRAL_NAME.match(text, start)
    if named is None:
        raise Unreadable(f"{shown(text[begin:])} is no name of a tool with [ARGS] behind it")
    arguments, end = read_arguments(text, named.end())
    return [_with_id(Draft(named[1], arguments), {"id": named[2]})], end


def _with_id(draft: Draft | str, value: Any) -> Draft | str:
    id = value.get("id") if isinstance(value, dict) else None
    if isinstance(draft, str) or not isinstance(id, str) or not re.fullmatch("[A-Za-z0-9]{9}", id):
        return draft
    return Draft(draft.name, draft.arguments, id)


_QWEN_NAME = re.compile(r"\s*([^\s<>]+?)\s*>")
_MINIMAX_NAME = re.compile(r'([^\s<>"]+)"\s*>')
TAGGED = (
    Tagged(
        "hermes",
        '<tool_call>{"name": <tool name>, "arguments": <JSON object>}</tool_call>',
        ("<tool_call>",),
        marks=("<tool_call>", "</tool_call>"),
        arguments_key="arguments",
        opening="<tool_call>",
        closing="</tool_call>",
        read=_hermes,
    ),
    Tagged(
        "qwen3_coder",
        "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, a parameter for each"
        " argument",
        ("<tool_call>", "<function="),
        marks=("<tool_call>", "</tool_call>"),
        opening="<function=",
        closing="</function>",
        section=("<tool_call>", "</tool_call>"),
        read=_Pairs(
            _QWEN_NAME,
            *_pattern(r"<parameter=([^<>]+)>", "</parameter>", "<parameter=", "</function>", "</tool_call>"),
            lines=True,
        ),
    ),
    Tagged(
        "glm45",
        "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>, a pair for each argument",
        ("<tool_call>",),
        marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ends=("<|observation|>",),
        opening="<tool_call>",
        closing="</tool_call>",
        read=_Pairs(
            _NAME,
            *_pattern(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>", "</arg_value>", "<arg_key>", "</tool_call>"),
        ),
    ),
    Tagged(
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{_SEP}NAME, a line break, the arguments as JSON between"
        " ```json and ```, <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        marks=(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            _SEP,
        ),
        names_calls=True,
        opening="<｜tool▁call▁begin｜>",
        closing="<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        read=_deepseek,
    ),
    Tagged(
        "kimi_k2",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:INDEX{_ARGUMENTS}<JSON object>"
        "<|tool_call_end|><|tool_calls_section_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        marks=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_end|>", _ARGUMENTS),
        ),
        names_calls=True,
        ids="own",
        opening="<|tool_call_begin|>",
        closing="<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        read=_kimi,
    ),
    Tagged(
        "minimax_m2",
        '<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>, a'
        " parameter for each argument",
        ("<minimax:tool_call>",),
        marks=("<minimax:tool_call>", "</minimax:tool_call>"),
        names_calls=True,
        opening='<invoke name="',
        closing="</invoke>",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        read=_Pairs(
            _MINIMAX_NAME,
            *_pattern(
                r'<parameter name="([^<>"]+)"\s*>',
                "</parameter>",
                "<parameter name=",
                "</invoke>",
                "</minimax:tool_call>",
            ),
        ),
        bare=False,
    ),
    Tagged(
        "mistral",
        '[TOOL_CALLS]NAME[ARGS]<JSON object>, or [TOOL_CALLS] [{"name": <tool name>, "arguments": <JSON object>}]',
        ("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        names_calls=True,
        ids="nine",
        opening="[TOOL_CALLS]",
        read=_mistral,
    ),
)

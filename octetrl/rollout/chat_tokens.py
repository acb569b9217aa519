"""Conversations as token ids.

The first prompt is rendered by the tokenizer's chat template (without one it is the plain text) and tokenized once.
Variables of the template (`rollout.chat_template_kwargs`, a task's own) are the same in all that is rendered.
Later, tokens are only appended. The policy's tokens stay as they were generated, and a reply adds the tokens that the
template puts around it. Text does not always tokenize back to the same tokens, and templates drop earlier reasoning: a
conversation that is rendered again may be a sequence that the policy never saw. rollout/history.py renders it again all
the same where a recipe asks for it, and then begins a new sample.

To find the tokens around replies, a conversation is rendered with a placeholder as the answer. The part after the
placeholder is kept: the end of the answer's turn, the replies' turns, the opening of the next answer. If an answer
ended with a stop token, of the template or of the model, the template's end token is not added again. If it ended with
a stop string, the end token is added, and masked like the replies. Some templates write a call's name or id with its
result, and refuse results without calls. There the answer is rendered with its calls, without the results and with
them: what is added is kept.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from inspect import signature
from types import MappingProxyType
from typing import Any, Protocol

import jinja2
from jinja2.meta import find_undeclared_variables

from octetrl.environments.prompts import read_messages
from octetrl.environments.tools.formats.reading import Call, ToolCall, ToolFormat
from octetrl.environments.tools.messages import TEMPLATE_ERRORS, template_fails
from octetrl.records import Completion, Message, Prompt, Reply, Task
from octetrl.rollout.call_text import CallText, call_ends
from octetrl.rollout.encode import Encoder
from octetrl.rollout.message_tokens import (
    PLACEHOLDER,
    Template,
    TokenizedMessages,
    end_of_turn,
    opened_thoughts,
    tokenize_messages,
    without_opening,
)
from octetrl.system.errors import UserError, nearest
from octetrl.system.text import escaped


class ChatTokenizer(Protocol):
    """The interface that is needed of a tokenizer; transformers' tokenizers have it."""

    chat_template: Any
    eos_token: Any
    eos_token_id: Any

    all_special_tokens: Any

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[Any]: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


TRIED_PROMPTS = 5_000  # of each environment, before a run; later ones by their shape


class ReplyError(ValueError):
    """The chat template can't write these replies."""


class ChatTokens:
    """Token ids of prompts, replies and answers. Raises UserError for a tokenizer without EOS.

    tools: their schemas, which the template writes into the prompt. variables: of the template, such as
    `enable_thinking`; a UserError names one that is none. ends: further stop tokens of the model. context_length: a
    text that certainly has more tokens is not tokenized; every method then raises TextTooLong.
    by_environment: the chat tokens of each environment of several, with its own tools and system prompt. tool_format:
    in which answers call the environment's tools; None: it has none.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        system_prompt: str | None = None,
        *,
        tools: Sequence[Any] = (),
        ends: Collection[int] = (),
        context_length: int | None = None,
        by_environment: Mapping[str, ChatTokens] = MappingProxyType({}),
        variables: Mapping[str, Any] = MappingProxyType({}),
        tool_format: ToolFormat | None = None,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "tokenizer: it has no EOS token, so no answer could end; set eos_token in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, context_length)
        self._system_prompt = system_prompt
        self._tools = tuple(tools)
        check_variables(tokenizer, variables)
        self._variables = dict(variables)
        own_ends = call_ends(tokenizer, tool_format)
        self._ends = frozenset((tokenizer.eos_token_id, *ends, *own_ends))
        self._by_environment = by_environment
        self._format = tool_format
        self._call_text = None if tool_format is None else CallText(tokenizer, tool_format, self._ends)
        self.call_ends: tuple[int, ...] = (
            *own_ends,
            *(end for each in by_environment.values() for end in each.call_ends),
        )

    def of(self, task: Task) -> ChatTokens:
        """The chat tokens of the task's environment, with the task's own tools and variables of the template."""
        chat = self._by_environment.get(task.environment, self)
        return chat.with_template(task.tools, task.chat_template_kwargs)

    def with_template(self, tools: Sequence[Any], variables: Mapping[str, Any]) -> ChatTokens:
        """The same with these tools besides, and these variables over its own. Raises UserError for variables that the
        template cannot have."""
        if not tools and not variables:
            return self
        check_variables(self._tokenizer, variables)
        chat = copy(self)
        chat.__dict__.pop("_opened_thoughts", None)
        chat._tools, chat._variables = (*self._tools, *tools), {**self._variables, **variables}
        return chat

    def prompt_tokens(self, prompt: Prompt, limit: int | None = None) -> tuple[int, ...]:
        """The first turn: system prompt, `prompt` as the user's message, and the opening of the answer. Messages follow
        the system prompt if they do not begin with one of their own.

        Without a chat template: the system prompt, a blank line and `prompt`, with the tokenizer's own BOS; messages
        are a UserError. `limit`: it may raise TextTooLong above this number of tokens; None: the context length.
        """
        text, special = self._prompt_text(prompt)
        return tuple(self._encoder.ids(text, special=special, limit=limit))

    def plain_tokens(self, text: str) -> tuple[int, ...]:
        """The text itself, with the tokenizer's own BOS and without the chat template."""
        return tuple(self._encoder.ids(text, special=True))

    def tokens_of(self, prompt: Prompt, *, plain: bool) -> tuple[int, ...]:
        """A user's message (`plain`: the text alone, without a template), or a conversation's messages."""
        return self.plain_tokens(prompt) if plain and isinstance(prompt, str) else self.prompt_tokens(prompt)

    def prompt_text(self, prompt: Prompt) -> str:
        """The first turn as text, as the model reads it."""
        return self._prompt_text(prompt)[0]

    def history_text(self, messages: Sequence[Message]) -> str:
        """A conversation with answers of the policy, and the opening of the next answer. Raises ReplyError."""
        try:
            read = read_messages(messages, "conversation.messages", may_be_empty=True)
            template = Template(self._tokenizer, self._tools or None, self._variables)
            return escaped(template.render(self._with_system(read), True))
        except UserError as error:
            raise ReplyError(str(error)) from error

    def ids_after(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that follows others."""
        return tuple(self._encoder.ids(text, special=False))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, those that are special too."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def is_end(self, token_id: int) -> bool:
        """Whether it is a stop token of the tokenizer or the model."""
        return token_id in self._ends

    def first_prompt_tokens(self, prompt: Prompt, limit: int) -> tuple[int, ...]:
        """The first `limit` of `prompt_tokens`, of a prompt of any length."""
        text, special = self._prompt_text(prompt)
        return tuple(self._encoder.ids(self._encoder.beginning(text, limit), special=special, limit=limit + 1)[:limit])

    def answer_tokens(self, answer: str) -> tuple[int, ...]:
        """A given answer as the policy would have generated it, EOS included. An answer that begins with the thoughts'
        tag loses it if the template's generation prompt ends with it."""
        said = without_opening(answer, self._opened_thoughts)
        return (*self._encoder.ids(said, special=False), self._tokenizer.eos_token_id)

    def with_calls(self, completion: Completion, stops: Sequence[str]) -> Completion:
        """The completion with the special tokens of tool calls in its text, where the environment has tools."""
        return completion if self._call_text is None else self._call_text.with_calls(completion, stops)

    def reply_tokens(
        self, replies: Sequence[Reply], completion_token_ids: Sequence[int], calls: Sequence[Call] = ()
    ) -> tuple[int, ...]:
        """What to append after a completion for the environment's replies and the opening of the next answer. calls:
        those that the replies answer, one each.

        Without a chat template: each reply between line breaks. Raises ReplyError for replies that the template
        refuses, UserError for a template that leaves out earlier answers.
        """
        if self._tokenizer.chat_template is None:
            text = "".join(f"\n{reply.text}\n" for reply in replies)
            return tuple(self._encoder.ids(text, special=False))
        made: list[Message] = []
        said: list[Message] = [{"role": reply.role, "content": reply.text} for reply in replies]
        if calls and self._format is not None and self._format.names_calls:
            for place, (call, reply) in enumerate(
                zip(calls, replies, strict=True)
            ):  # one that can't be read gets a name
                id, name = (call.id, call.name) if isinstance(call, ToolCall) else (self._format.call_id(place), "tool")
                made.append({"id": id, "type": "function", "function": {"name": name, "arguments": {}}})
                said[place] = {"role": reply.role, "tool_call_id": id, "name": name, "content": reply.text}
        return self.tokens_after(made, said, completion_token_ids)

    def tokens_after(
        self, calls: Sequence[Message], messages: Sequence[Message], completion_token_ids: Sequence[int]
    ) -> tuple[int, ...]:
        """What to append after a completion for the messages and the opening of the next answer. calls: those that
        the completion made and the messages answer, as a chat template takes them.

        Raises ReplyError for messages that the template refuses, UserError for one that leaves out earlier answers.
        """
        has_ended = bool(completion_token_ids) and self.is_end(completion_token_ids[-1])
        if calls and self._format is not None and self._format.names_calls:
            return self.ids_after(self._after_calls(calls, messages, has_ended=has_ended))
        conversation = [{"role": "user", "content": "-"}, {"role": "assistant", "content": PLACEHOLDER}, *messages]
        try:
            _, found, after = self._render(conversation).partition(PLACEHOLDER)
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ReplyError(f"the chat template refuses replies of the roles {roles} ({error})") from error
        if not found:
            raise UserError("tokenizer: its chat template leaves out earlier answers, so turns can't be appended")
        after = escaped(after)
        ids, offsets = self._encoder.with_offsets(after)
        begin = self._end_of_turn(after, completion_token_ids[-1]) if has_ended else 0
        return tuple(token for token, (_, end) in zip(ids, offsets, strict=True) if begin == 0 or end > begin)

    def _after_calls(self, calls: Sequence[Message], messages: Sequence[Message], *, has_ended: bool) -> str:
        """The text after an answer with these calls."""
        said: list[Message] = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        template = Template(self._tokenizer, None, self._variables)
        try:
            before, after = template.render(said), template.render([*said, *messages], True)
        except UserError as error:
            raise ReplyError(f"the chat template refuses the results of tools ({error})") from error
        if not after.startswith(before):
            raise UserError("tokenizer: its chat template writes a call in another way after its result")
        kept = before.rstrip()
        ended = max((text for text in self._specials if kept.endswith(text)), key=len, default="")
        return ("" if has_ended else ended) + before[len(kept) :] + after[len(before) :]

    @cached_property
    def _specials(self) -> list[str]:
        """Special tokens and those that end an answer."""
        ends = self._tokenizer.convert_ids_to_tokens(sorted(self._ends))
        return [text for text in (*self._tokenizer.all_special_tokens, *ends) if text]

    def _end_of_turn(self, after: str, last: int) -> int:
        """Number of characters that end an answer whose `last` token ended it. 0: there is no special token, or it
        opens the next turn and is not the last token of the answer."""
        (said,) = self._tokenizer.convert_ids_to_tokens([last])
        end = end_of_turn(after, self._specials, said)
        return 0 if self._opens_turns and (said is None or not after[:end].endswith(said)) else end

    @cached_property
    def _opens_turns(self) -> bool:
        """Whether the special token after an answer opens the next turn, as GLM's: a last answer has none."""
        said: list[Message] = [{"role": "user", "content": "-"}, {"role": "assistant", "content": PLACEHOLDER}]
        try:
            after = Template(self._tokenizer, None, self._variables).render(said).partition(PLACEHOLDER)[2]
        except UserError:
            return False
        return not after.lstrip().startswith(tuple(self._specials))

    def message_tokens(
        self, messages: Sequence[Message], *, learn_from: int = 0, tools: Sequence[Any] | None = None
    ) -> tuple[TokenizedMessages, ...]:
        """A given conversation as the chat template writes it, in one or several (rollout/message_tokens.py). The
        system prompt comes before one that begins without a system message of its own."""
        said = self._with_system(messages)
        template = Template(self._tokenizer, tools, self._variables)
        return tokenize_messages(template, self._encoder, said, learn_from=learn_from + len(said) - len(messages))

    @cached_property
    def _opened_thoughts(self) -> str:
        if self._tokenizer.chat_template is None:
            return ""
        try:
            template = Template(self._tokenizer, None, self._variables)
            return opened_thoughts(template.render, [{"role": "user", "content": "-"}])
        except UserError:  # it takes no given answers, which only rows of messages need
            return ""

    def _prompt_text(self, prompt: Prompt) -> tuple[str, bool]:
        """The text of the first turn, and whether the tokenizer's own BOS belongs before it."""
        has_template, tools = self._tokenizer.chat_template is not None, self._tools or None
        if not isinstance(prompt, str):
            if not has_template:
                raise UserError("tokenizer: it has no chat template, so it can't write messages; give a prompt instead")
            messages = self._with_system(read_messages(prompt, "the prompt"))
            return Template(self._tokenizer, tools, self._variables).render(messages, True), False
        if not has_template:
            return (prompt if self._system_prompt is None else f"{self._system_prompt}\n\n{prompt}"), True
        try:
            given = {} if tools is None else {"tools": list(tools)}
            return self._render(self._with_system([{"role": "user", "content": prompt}]), **given), False
        except TEMPLATE_ERRORS as error:
            raise template_fails(error) from error

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The messages after the system prompt, if they have none of their own."""
        if self._system_prompt is None or messages[0]["role"] in ("system", "developer"):
            return list(messages)
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def _render(self, conversation: Sequence[Message], **options: Any) -> str:
        """The rendered conversation with the opening of the next answer."""
        text: str = self._tokenizer.apply_chat_template(
            list(conversation), tokenize=False, add_generation_prompt=True, **self._variables, **options
        )
        return text


def check_variables(tokenizer: ChatTokenizer, variables: Iterable[str]) -> None:
    """Raise UserError for a name that is an argument of the tokenizer's, such as `chat_template`, a program that would
    run here."""
    for name in variables:
        if name in {"self", "messages", "conversations", *signature(tokenizer.apply_chat_template).parameters}:
            raise UserError(f"chat_template_kwargs: {name!r} is no variable of the model's template; leave it out")


_EVERY_TEMPLATE = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}


def template_names(tokenizer: Any) -> frozenset[str] | None:
    """The names that the chat template reads. None: it has none, or several, or one that can't be told."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return None
    syntax = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # as transformers reads templates
    try:
        names = find_undeclared_variables(syntax.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)))
    except TEMPLATE_ERRORS:  # such as a tag of transformers' own
        return None
    return frozenset(names) if "messages" in names else None


def own_variables(names: Iterable[str], tokenizer: Any) -> list[str]:
    """Those of the names that only some templates read."""
    return sorted(set(names) - _EVERY_TEMPLATE - set(tokenizer.special_tokens_map))


def unread(names: frozenset[str] | None, variables: Iterable[str], tools: Sequence[Any] = ()) -> str | None:
    """Which of these variables and tools a template that reads `names` would ignore. None: none of them, or unknown."""
    if names is None:
        return None
    lost = next((name for name in variables if name not in names), None)
    if lost is not None:
        known = names - _EVERY_TEMPLATE
        shown = ", ".join(sorted(known)) or "none"
        return (
            f"chat_template_kwargs: the chat template does not read '{lost}'{nearest(lost, known)}; it reads: {shown}"
        )
    if tools and "tools" not in names:
        return "tools: the chat template reads none, so the model sees none; give one that does (model.chat_template)"
    return None


def try_prompts(chat: ChatTokens, tasks: Iterable[Task]) -> None:
    """Render the first conversations, then one of each shape (roles, calls, tools, variables), so that one that the
    template refuses is found before the run. Raises UserError with the task's id."""
    seen, rendered = set(), 0
    for task in tasks:
        if isinstance(task.prompt, str) and not task.tools and not task.chat_template_kwargs:
            continue
        said = tuple((one.get("role"), len(one.get("tool_calls") or ()), *sorted(one)) for one in task.messages)
        shape = (task.environment, said, bool(task.tools), *sorted(map(str, task.chat_template_kwargs.items())))
        if rendered < TRIED_PROMPTS or shape not in seen:
            seen.add(shape)
            rendered += 1
            try:
                chat.of(task).prompt_text(task.prompt)
            except UserError as error:
                raise UserError(f"task '{task.id}': {error}") from error

"""Convert messages or text to prompt tokens, and check that the context has room for an answer.

Messages are rendered by the model's chat template, as everywhere in the project. The rendered text is tokenized without
adding special tokens. Long prompts take long to tokenize, so a separate thread does it with its own tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from octetrl.environments.tools.formats.reading import ToolFormat
from octetrl.environments.tools.messages import json_arguments
from octetrl.rollout.call_text import CallText, call_ends, find_format
from octetrl.rollout.chat_tokens import ChatTokenizer, check_variables, template_names, unread
from octetrl.rollout.encode import Encoder
from octetrl.rollout.message_tokens import Template
from octetrl.server.errors import ApiError, wrong
from octetrl.server.requests import ChatBody, CompletionBody, GenerationBody, Message, TokenizeBody
from octetrl.system.errors import UserError
from octetrl.system.text import TextTooLong, escaped

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class AskedChat:
    """A chat whose prompt is to be made. render: its text, special tokens included. encode: the tokens of a text that
    follows others. Both raise ApiError."""

    messages: Sequence[Mapping[str, Any]]  # as chat templates take them
    tools: Sequence[Any] | None
    variables: Mapping[str, Any]  # of the request
    render: Callable[[Sequence[Mapping[str, Any]]], str]
    encode: Callable[[str], tuple[int, ...]]


Recorded = Callable[[AskedChat], tuple[int, ...]]


class Prompts:
    """Converts prompts for one model with `vocab_size` tokens.

    context_length: largest number of tokens of prompt and answer together. variables: of the chat template, unless a
    request gives others. tool_format: name of the format of tool calls. ends: stop tokens of the model.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        vocab_size: int,
        context_length: int,
        variables: Mapping[str, Any] = MappingProxyType({}),
        tool_format: str = "auto",
        ends: Collection[int] = (),
    ) -> None:
        self._tokenizer = deepcopy(tokenizer)
        self._encoder = Encoder(self._tokenizer, context_length)
        self._vocab_size, self._context_length = vocab_size, context_length
        self._variables, self._template_names = dict(variables), template_names(self._tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self.tool_format: ToolFormat | None = find_format(tokenizer, tool_format, variables)
        self.call_ends = call_ends(tokenizer, self.tool_format)
        self.call_text: CallText | None = None  # where the format has special tokens
        if self.tool_format is not None:
            text = CallText(tokenizer, self.tool_format, (*ends, *self.call_ends))
            self.call_text = text if text.is_needed else None

    async def of_chat(self, body: ChatBody, recorded: Recorded | None = None) -> tuple[int, ...]:
        """recorded: makes the tokens in place of template and tokenizer alone. It may raise TextTooLong."""
        tokens = await self._beside_the_loop(lambda: self._chat_tokens(body, recorded))
        self._check(tokens, body, "messages")
        return tokens

    async def of_completion(self, body: CompletionBody) -> list[tuple[int, ...]]:
        token_lists = await self._beside_the_loop(lambda: [self._text_tokens(prompt) for prompt in body.prompts])
        if not token_lists:
            raise wrong("prompt", "prompt: the list is empty; give at least one prompt")
        for tokens in token_lists:
            self._check(tokens, body, "prompt")
        return token_lists

    async def tokens_of(self, body: TokenizeBody, recorded: Recorded | None = None) -> list[int]:
        """Tokens of a text or a conversation. They may exceed the context. recorded: as of `of_chat`."""
        prompt = body.prompt
        if prompt is not None and (body.messages is not None or body.tools):
            raise wrong("prompt", "prompt: messages or tools are given as well; give one of them")
        if prompt is not None:
            special = body.add_special_tokens
            return list(await self._beside_the_loop(lambda: self._encoded(prompt, "prompt", special=special)))
        if body.messages is None:
            raise wrong("prompt", "prompt and messages are missing; give one of them", "missing_required_parameter")
        chat = ChatBody(
            model="", messages=body.messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs
        )
        return list(await self._beside_the_loop(lambda: self._chat_tokens(chat, recorded)))

    def check_known(self, tokens: Sequence[int]) -> None:
        """Raises ApiError for a token that the model does not have."""
        if tokens and max(tokens) >= self._vocab_size:
            message = f"tokens: token {max(tokens)} is unknown; the model has 0 to {self._vocab_size - 1}"
            raise wrong("tokens", message, "invalid_value")

    def room(self, tokens: tuple[int, ...]) -> int:
        """Return the largest number of tokens that an answer to this prompt may have."""
        return self._context_length - len(tokens)

    async def _beside_the_loop(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _text_tokens(self, prompt: str | list[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._encoded(prompt, "prompt", special=True)
        return tuple(prompt)

    def _encoded(self, text: str, param: str, *, special: bool) -> tuple[int, ...]:
        try:
            return tuple(self._encoder.ids(text, special=special))
        except TextTooLong as error:
            raise self._too_long(param, error) from error

    def _too_long(self, param: str, error: TextTooLong) -> ApiError:
        message = f"this model's context is {self._context_length} tokens; the prompt has {error}; shorten it"
        return wrong(param, message, "context_length_exceeded")

    def _chat_tokens(self, body: ChatBody, recorded: Recorded | None = None) -> tuple[int, ...]:
        if self._tokenizer.chat_template is None:
            raise wrong("messages", "this model has no chat template; use /v1/completions")
        tools = body.tool_schemas
        if tools is not None and self.tool_format is None:
            how = "name one by --tool-format or rollout.tool_format, or leave tools out"
            raise wrong("tools", f"tools: the chat template shows no known format of tool calls; {how}")
        try:
            check_variables(self._tokenizer, body.chat_template_kwargs)
            if tools and (lost := unread(self._template_names, (), tools)):
                raise wrong("tools", lost)
        except UserError as error:
            raise wrong("chat_template_kwargs", str(error), "unsupported_parameter") from error
        conversation = [_message(message, place) for place, message in enumerate(body.messages)]
        template = Template(self._tokenizer, tools, {**self._variables, **body.chat_template_kwargs})

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            try:
                return escaped(template.render(messages, True))
            except UserError as error:
                reason = " ".join(str(error.__cause__ or error).split())[:200]
                message = f"messages: the model's chat template does not accept them: {reason}"
                raise wrong("messages", message) from error

        encode = partial(self._encoded, param="messages", special=False)
        if recorded is None:
            return encode(render(conversation))
        try:
            return recorded(AskedChat(conversation, tools, body.chat_template_kwargs, render, encode))
        except TextTooLong as error:
            raise self._too_long("messages", error) from error

    def _check(self, tokens: tuple[int, ...], body: GenerationBody, param: str) -> None:
        if not tokens:
            raise wrong(param, f"{param}: it has no tokens; give at least one")
        if max(tokens) >= self._vocab_size:
            raise wrong(param, f"{param}: token {max(tokens)} is unknown; the model has 0 to {self._vocab_size - 1}")
        wanted = max_tokens_of(body)
        if len(tokens) + (wanted or 1) > self._context_length:
            answer = "no token of an answer" if wanted is None else f"an answer of {wanted}"
            raise wrong(
                param,
                f"this model's context is {self._context_length} tokens; the prompt has {len(tokens)}, which leaves no"
                f" room for {answer}; shorten one of them",
                "context_length_exceeded",
            )


def max_tokens_of(body: GenerationBody) -> int | None:
    """Return the request's limit of an answer's tokens. None: no limit except the context."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def _message(message: Message, place: int) -> dict[str, Any]:
    """Convert a message to the form that chat templates expect."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, place)},
            }
            for call in message.tool_calls
        ]
    return found


def _arguments(text: str, place: int) -> dict[str, Any]:
    try:
        return json_arguments(text)
    except ValueError:
        message = f"messages.{place}.tool_calls: the arguments {text[:60]!r} are not a JSON object"
        raise wrong("messages", message) from None

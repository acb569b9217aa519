"""Prompts that are conversations: messages of a row or of a user's task, checked, with their content as one text.

    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "3 + 4 ="}]}]

The next answer is the policy's. Content in parts is joined to one text; a part of another kind, such as an image, is
refused by name. A single message of the user is the same prompt as its text, so both forms of a file have the same
held-out tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

from octetrl.config.limits import LEAST_OWN_TEMPERATURE, MOST_COMPLETIONS, MOST_TEMPERATURE
from octetrl.environments.tools.messages import with_read_calls
from octetrl.records import Message, Prompt, plain_prompt
from octetrl.system.errors import UserError, nearest
from octetrl.system.json_file import kind_of, parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")  # kinds of parts, as OpenAI's two interfaces name them


def read_messages(messages: object, where: str, *, may_be_empty: bool = False) -> tuple[Message, ...]:
    """Messages with known roles, text and calls whose arguments are objects. where: of the list, for a UserError.
    may_be_empty: the assistant's text, where it was sampled."""
    if not isinstance(messages, list | tuple) or not messages:
        given = "an empty list" if messages in ([], ()) else kind_of(messages)
        raise UserError(f'{where} is {given}; it must be a list of {{"role", "content"}}')
    return tuple(_read_message(message, f"{where}, message {n}", may_be_empty) for n, message in enumerate(messages, 1))


def read_prompt(prompt: object, where: str) -> Prompt:
    """A text, or the messages of a conversation whose next answer is the policy's. Raises UserError."""
    if isinstance(prompt, str) and prompt.strip():
        return prompt
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # an array of numpy's, as pandas reads lists
    if isinstance(prompt, str) or not isinstance(prompt, list | tuple):
        raise UserError(f"{where} is {kind_of(prompt)}; it must be a string that is not empty, or a list of messages")
    messages = read_messages(prompt, where)
    if messages[-1]["role"] == "assistant":
        raise UserError(f"{where} ends with a message of the assistant; end it with one of the user or of a tool")
    plain = plain_prompt(messages)
    return read_prompt(plain, where) if isinstance(plain, str) else plain


def read_tools(tools: object, where: str) -> tuple[Any, ...]:
    """Schemas of tools, a list or its JSON text, which the chat template writes; none for null. Raises UserError."""
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, where, "give a list of tools, or its JSON text")
    if tools is not None and not isinstance(tools, list | tuple):
        raise UserError(f"{where} is {kind_of(tools)}; it must be a list of what the chat template takes")
    for number, tool in enumerate(tools or (), 1):
        if not isinstance(tool, Mapping):
            raise UserError(f"{where}, tool {number} is {kind_of(tool)}; it must be an object, a tool's schema")
    return tuple(tools or ())


def read_variables(variables: object, where: str) -> Mapping[str, Any]:
    """Variables of the chat template; none for null. Raises UserError."""
    if variables is not None and not isinstance(variables, Mapping):
        raise UserError(f'{where} is {kind_of(variables)}; it must be an object, such as {{"enable_thinking": false}}')
    return dict(variables or {})


def read_temperature(value: object, where: str) -> float | None:
    """Sampling temperature of a task's training answers; None for null. Raises UserError."""
    number = _number(value)
    if value is not None and (number is None or not LEAST_OWN_TEMPERATURE <= number <= MOST_TEMPERATURE):
        most = f"{MOST_TEMPERATURE:g}, or null for the recipe's"
        raise UserError(f"{where} is {_given(value)}; it must be a number from {LEAST_OWN_TEMPERATURE:g} to {most}")
    return number


def read_group_size(value: object, where: str) -> int | None:
    """Number of a task's training answers; None for null. Raises UserError."""
    number = _number(value)
    if value is not None and (number is None or number != int(number) or not 1 <= number <= MOST_COMPLETIONS):
        most = f"{MOST_COMPLETIONS:,}, or null for the recipe's"
        raise UserError(f"{where} is {_given(value)}; it must be a whole number from 1 to {most}")
    return None if number is None else int(number)


def _number(value: object) -> float | None:
    """The value of a finite number, also of numpy's and a Decimal."""
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _given(value: object) -> str:
    return kind_of(value) if _number(value) is None else f"{value}"


def with_prompt_template(prompt: Prompt, template: str) -> Prompt:
    """The prompt with `template` around its text, of a conversation around that of the user's last message."""
    if template == "{prompt}":
        return prompt
    if isinstance(prompt, str):
        return template.replace("{prompt}", prompt)
    users = [place for place, message in enumerate(prompt) if message["role"] == "user"]
    last = users[-1] if users else None
    return tuple(
        {**message, "content": template.replace("{prompt}", message["content"])} if place == last else message
        for place, message in enumerate(prompt)
    )


def _read_message(message: Any, at: str, may_be_empty: bool) -> Message:
    if not isinstance(message, Mapping):
        raise UserError(f"{at} is {kind_of(message)}; it must be an object with role and content")
    role, content, calls = message.get("role"), _text_of(message.get("content"), at), message.get("tool_calls")
    if role not in ROLES:
        hint = nearest(role, ROLES) if isinstance(role, str) else ""
        raise UserError(f"{at}: role {role!r} is not allowed; it must be one of {', '.join(ROLES)}{hint}")
    if role != "assistant" or not calls or content:
        if not isinstance(content, str):
            raise UserError(f"{at}: 'content' is {kind_of(content)}; it must be a string, or a list of text parts")
        if role == "assistant" and not (content.strip() or calls or may_be_empty):
            raise UserError(f"{at}: the assistant's 'content' is empty; give its answer, or remove the message")
    return with_read_calls({**message, **({"content": content} if "content" in message else {})}, at)


def _text_of(content: Any, at: str) -> Any:
    """Content in parts as one text; anything else as it is."""
    if not isinstance(content, list | tuple):
        return content
    texts = []
    for number, part in enumerate(content, 1):
        kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
        text = part.get("text") if kind in TEXT_PARTS else None
        if not isinstance(text, str):
            raise UserError(f"{at}, part {number} is {kind!r}; models here read text alone, so give text parts")
        texts.append(text)
    return "".join(texts)

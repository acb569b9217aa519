"""A stand-in tokenizer for a server that takes messages and gives text: its "tokens" are the characters of JSON.

A request carries its prompt as token ids. For such a server these spell the messages, so nothing is lost on the way:

    chat template     messages -> {"messages": [...]}       a prompt without the template: {"prompt": "..."}
    encode            one code point, one id
    `asked_of`        ids -> the JSON object

The server's own tokens are counted by its `usage`. Their ids are not known: a completion has UNKNOWN for each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

UNKNOWN = -1  # the id of a token of which only the number is known
VOCABULARY = 0x110000 + 1  # code points, and one for the end


class CharacterTokenizer:
    """The tokenizer of `ChatTokens` and `Admission` for messages as text."""

    chat_template: Any = "messages"
    eos_token = None
    eos_token_id = VOCABULARY - 1
    all_special_tokens: Sequence[str] = ()

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any:
        raise AssertionError("several turns are refused where a server gives text")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Characters of a rendered conversation; of a plain prompt (`add_special_tokens`) those of its JSON."""
        return [ord(letter) for letter in (json.dumps({"prompt": text}) if add_special_tokens else text)]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[Any]:
        return [chr(id) for id in ids]

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        """The messages as JSON, with variables of the template, which servers like vLLM read. Tools are for several
        turns. Raises TypeError for arguments that are no text."""
        assert "tools" not in options, "tools are refused where a server gives text"
        calls = (call for message in conversation for call in message.get("tool_calls") or ())
        if any(not isinstance(call.get("function", call).get("arguments", ""), str) for call in calls):
            raise TypeError("arguments of calls must be JSON text")  # the caller gives them as such
        variables = {
            name: value for name, value in options.items() if name not in ("tokenize", "add_generation_prompt")
        }
        given = {"chat_template_kwargs": variables} if variables else {}
        return json.dumps({"messages": conversation, **given})

    def get_chat_template(self, **options: Any) -> str:
        return str(self.chat_template)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool = False
    ) -> str:
        return "".join(chr(id) for id in token_ids if 0 <= id < self.eos_token_id)


def asked_of(prompt_token_ids: Sequence[int]) -> dict[str, Any]:
    """The fields that a prompt stands for: `messages`, or `prompt`."""
    fields: dict[str, Any] = json.loads("".join(map(chr, prompt_token_ids)))
    return fields

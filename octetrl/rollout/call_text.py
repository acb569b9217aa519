"""The format of a model's tool calls, and the text in which its calls are read.

Some formats are made of special tokens, which a completion's text leaves out. `CallText` decodes a completion again
with those of the format, and without all others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from octetrl.environments.tools.formats import FORMATS, RESPONSE_TEMPLATE, by_tokenizer, format_of
from octetrl.environments.tools.formats.reading import ToolFormat
from octetrl.environments.tools.messages import TEMPLATE_ERRORS
from octetrl.records import Completion


def find_format(
    tokenizer: Any, name: str = "auto", variables: Mapping[str, Any] = MappingProxyType({})
) -> ToolFormat | None:
    """The format of `name`, or with "auto" that of the chat template. None: no template, or no known format. variables:
    of the template, for a tokenizer that parses by a `response_template`."""
    if tokenizer.chat_template is None:
        return None
    if name == "auto":
        found = format_of(tokenizer.get_chat_template(tools=[]))
        if found is not None:
            return found
    if name in FORMATS:
        return FORMATS[name]
    if not isinstance(getattr(tokenizer, RESPONSE_TEMPLATE, None), dict) or not hasattr(tokenizer, "parse_response"):
        return None
    said = [{"role": "user", "content": "-"}]
    try:
        opened, closed = (
            tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=opens, **variables)
            for opens in (True, False)
        )
    except TEMPLATE_ERRORS:
        opened = closed = ""
    return by_tokenizer(tokenizer, opened.removeprefix(closed))


def call_ends(tokenizer: Any, form: ToolFormat | None) -> tuple[int, ...]:
    """The tokens that end an answer with calls, besides EOS."""
    vocabulary = tokenizer.get_vocab() if form is not None and form.ends else {}
    return tuple(vocabulary[end] for end in (() if form is None else form.ends) if end in vocabulary)


class CallText:
    """Decodes completions with the special tokens of a format. ends: stop tokens, which are in no text.

    is_needed: whether the tokenizer has special tokens of the format; without, a completion's own text has all of it.
    """

    def __init__(self, tokenizer: Any, form: ToolFormat, ends: Collection[int]) -> None:
        self._tokenizer, self._ends = tokenizer, frozenset(ends)
        added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token: str(text) for token, text in added.items() if text.special}
        self._dropped = {token for token, text in special.items() if form.marks is not None and text not in form.marks}
        self.is_needed = len(self._dropped) < len(special)

    def decode(self, token_ids: Sequence[int]) -> str:
        kept = [token for token in token_ids if token not in self._dropped]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def of(self, completion: Completion, stops: Sequence[str]) -> str:
        """The text of a whole completion, up to the token or the string that ended it."""
        token_ids = completion.token_ids
        text = self.decode(token_ids[:-1] if token_ids and token_ids[-1] in self._ends else token_ids)
        found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
        return text[: min(found, default=len(text))]

    def with_calls(self, completion: Completion, stops: Sequence[str]) -> Completion:
        return replace(completion, text=self.of(completion, stops)) if self.is_needed else completion

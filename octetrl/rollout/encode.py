"""Turns texts into token ids. All texts of tasks, environments, files and requests pass here, and may contain anything.

Two problems that would end a run are handled here.

- No tokenizer accepts half of a surrogate pair. It is written out as an escape (system/text.py).
- Tokenizing takes time in proportion to the text, or worse: 5 MB can take a minute. A text with too many characters for
  a limit in tokens is refused before it is tokenized. With a byte-level or byte-fallback BPE each character has at
  least one byte. A token covers at most as many bytes as the longest entry of the vocabulary has characters. So

      tokens >= characters / (longest entry * characters that the normalizer may join into one)

  A text that fits is never refused. If a tokenizer may drop text (unknown characters, stripped blanks), there is no
  such bound, and the text is tokenized whatever its length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from octetrl.system.text import TextTooLong, escaped

_JOINED = 4  # largest number of code points that NFC and NFKC join into one: the longest canonical decomposition
_NORMALIZERS = {"NFC": _JOINED, "NFKC": _JOINED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}  # that drop nothing
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation")


class Encoder:
    """A tokenizer's `encode` for any text. `limit`: longer texts are refused; in tokens; None: no limit."""

    def __init__(self, tokenizer: Any, limit: int | None = None) -> None:
        self._tokenizer, self._limit = tokenizer, limit
        self.characters_per_token = characters_per_token(tokenizer)

    def ids(self, text: str, *, special: bool, limit: int | None = None) -> list[int]:
        """Token ids; `special`: with the tokenizer's own BOS and EOS. `limit` takes the place of the encoder's. Raises
        TextTooLong."""
        self._refuse_too_long(text, self._limit if limit is None else limit)
        ids: list[int] = self._tokenizer.encode(escaped(text), add_special_tokens=special)
        return ids

    def with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and where in `escaped(text)` each begins and ends. Raises TextTooLong."""
        self._refuse_too_long(text, self._limit)
        encoded = self._tokenizer(escaped(text), add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def beginning(self, text: str, tokens: int) -> str:
        """A beginning of `text` that contains at least its first `tokens` tokens."""
        most = self.characters_per_token
        return text if most is None else text[: most * (tokens + 1)]

    def _refuse_too_long(self, text: str, limit: int | None) -> None:
        most = self.characters_per_token
        if most is not None and limit is not None and len(text) > most * limit:
            raise TextTooLong(len(text), -(-len(text) // most), limit)


def characters_per_token(tokenizer: Any) -> int | None:
    """Largest number of characters that one token can cover; None: there is no bound, or it is not known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # includes any number of blanks
        return None
    joined = 1
    for normalizer in _parts(backend.normalizer, "normalizers"):
        of_one = _NORMALIZERS.get(normalizer["type"])
        if normalizer["type"] == "Replace" and len(normalizer["content"]) >= len(_literal(normalizer["pattern"])) > 0:
            of_one = 1
        if of_one is None:
            return None
        joined *= of_one
    pre_tokenizers = list(_parts(backend.pre_tokenizer, "pretokenizers"))
    if any(one["type"] not in _PRE_TOKENIZERS or one.get("behavior") == "Removed" for one in pre_tokenizers):
        return None
    vocabulary = tokenizer.get_vocab()
    is_byte_level = any(one["type"] == "ByteLevel" for one in pre_tokenizers)
    if not _covers_all_bytes(backend.model, is_byte_level, vocabulary):
        return None
    return joined * max(map(len, vocabulary))


def _covers_all_bytes(model: Any, is_byte_level: bool, vocabulary: Mapping[str, int]) -> bool:
    """Whether there is a token for every byte, so that no text is unknown and dropped."""
    if type(model).__name__ != "BPE":
        return False
    if is_byte_level:
        from tokenizers.pre_tokenizers import ByteLevel

        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _parts(component: Any, key: str) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, with sequences flattened."""
    pending = [] if component is None else [json.loads(component.__getstate__())]
    while pending:
        settings = pending.pop(0)
        if settings["type"] == "Sequence":
            pending = [*settings[key], *pending]
        else:
            yield settings


def _literal(pattern: Mapping[str, str]) -> str:
    """The text that is replaced; empty for a regular expression, which may match any length."""
    return pattern.get("String", "")

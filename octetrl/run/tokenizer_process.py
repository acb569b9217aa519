"""A tokenizer that loads in a process of its own while `octetrl check` does everything else.

transformers imports torch where there is torch, and `octetrl check` needs neither. Tokenizers do not use torch, so the
process refuses its import: it starts in about 2 seconds instead of 5. Where transformers is imported already, the
tokenizer is loaded in this process, without a second one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from octetrl.data.conversations import refuse_padded_end
from octetrl.data.mixture import Source
from octetrl.data.tokenizer import Tokenizer, check_tokenizer_files, load_tokenizer, tool_family
from octetrl.environments.tools import Family
from octetrl.process.callable_process import CallableProcess, CallFailed, NoAnswer, ProcessDied
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.system.errors import UserError
from octetrl.system.text import TextTooLong

SECONDS = 300.0  # for loading, and for the prompts of a sample: a machine may be busy


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and what `octetrl check` asks of it."""

    tokenizer: Tokenizer

    def tool_family(self) -> Family | None:
        """The form in which a model with this tokenizer writes tool calls. None: no form, or an unknown one."""
        return tool_family(self.tokenizer)

    def prompt_lengths(
        self, prompts: Sequence[str], system_prompt: str | None, tools: Sequence[Any], limit: int
    ) -> list[int]:
        """Tokens of each prompt with the chat template: exact, or a lower bound above `limit`."""
        chat = ChatTokens(self.tokenizer, system_prompt, tools=tools)
        return [_num_tokens(chat, prompt, limit) for prompt in prompts]

    def row_problem(self, source: Source, system_prompt: str | None, rows: int, ranks: bool = False) -> str | None:
        """What the chat template makes impossible in the first `rows` rows of a source, of the first such row.

        ranks: a reward model learns from them."""
        chat = ChatTokens(self.tokenizer, system_prompt)
        for example, place in zip(source.examples[:rows], source.places[:rows], strict=True):
            try:
                refuse_padded_end(example.tokenized(chat), self.tokenizer.pad_token_id if ranks else None)
            except UserError as error:
                return f"{place}: {error}"
        return None


class TokenizerProcess:
    """The tokenizer of a folder, with the methods of `LoadedTokenizer`; `close` it, or use it as a context manager.

    The constructor raises UserError for missing or wrong files. The methods wait until the tokenizer is loaded, and
    raise UserError if it can't be. Each message begins with `field`, the recipe's field that names the folder.
    """

    def __init__(self, folder: Path, vocab_size: int | None, field: str = "") -> None:
        self._folder, self._vocab_size, self._field = folder, vocab_size, field
        try:
            check_tokenizer_files(folder)
        except UserError as error:
            raise UserError(f"{field}{error}") from error
        self._loaded: LoadedTokenizer | None = None
        self._problem: str | None = None  # of the first call that failed: no later one can succeed
        self._process = None if "transformers" in sys.modules else CallableProcess(_Calls(str(folder), vocab_size))

    def tool_family(self) -> Family | None:
        return cast(Family | None, self._call("tool_family"))

    def prompt_lengths(
        self, prompts: Sequence[str], system_prompt: str | None, tools: Sequence[Any], limit: int
    ) -> list[int]:
        return cast(list[int], self._call("prompt_lengths", prompts, system_prompt, tools, limit))

    def row_problem(self, source: Source, system_prompt: str | None, rows: int, ranks: bool = False) -> str | None:
        return cast(str | None, self._call("row_problem", source, system_prompt, rows, ranks))

    def wait(self) -> None:
        """Return when the tokenizer is loaded."""
        self._call(None)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, method: str | None, *args: Any) -> Any:
        if self._problem is not None:
            raise UserError(self._problem)
        try:
            if self._process is not None:
                return self._process.call(method, *args, seconds=SECONDS)
            if self._loaded is None:
                self._loaded = LoadedTokenizer(load_tokenizer(self._folder, self._vocab_size))
            return None if method is None else getattr(self._loaded, method)(*args)
        except UserError as error:
            self._problem = f"{self._field}{error}"
            raise UserError(self._problem) from error
        except (CallFailed, NoAnswer, ProcessDied) as error:
            self._problem = f"{self._field}tokenizer: '{self._folder}' can't be tried ({error}); try again"
            raise UserError(self._problem) from error


@dataclass(frozen=True)
class _Calls:
    """`(method, *args) -> what the method of LoadedTokenizer returns`, to be run in a process of its own."""

    folder: str
    vocab_size: int | None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # of which one says that there is no torch
        sys.modules["torch"] = cast(Any, None)  # an import of it now raises
        self.__dict__["loaded"] = LoadedTokenizer(load_tokenizer(self.folder, self.vocab_size))

    def __call__(self, method: str | None, *args: Any) -> Any:
        return None if method is None else getattr(self.__dict__["loaded"], method)(*args)


def _num_tokens(chat: ChatTokens, prompt: str, limit: int) -> int:
    try:
        return len(chat.prompt_tokens(prompt, limit))
    except TextTooLong as error:
        return max(error.tokens, limit + 1)

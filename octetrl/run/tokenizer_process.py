"""A tokenizer that loads in a process of its own while `octetrl check` does everything else.

transformers imports torch where there is torch, and `octetrl check` needs neither. Tokenizers do not use torch, so the
process refuses its import: it starts in about 2 seconds instead of 5. Where transformers is imported already, the
tokenizer is loaded in this process, without a second one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import jinja2
from jinja2.meta import find_undeclared_variables

from octetrl.data.conversations import refuse_padded_end
from octetrl.data.mixture import Source
from octetrl.data.tokenizer import Tokenizer, check_tokenizer_files, load_tokenizer, tool_family
from octetrl.environments.tools.messages import TEMPLATE_ERRORS, Family
from octetrl.process.callable_process import CallableProcess, CallFailed, NoAnswer, ProcessDied
from octetrl.records import Task
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.system.errors import UserError
from octetrl.system.text import TextTooLong

SECONDS = 300.0  # for loading, and for the prompts of a sample: a machine may be busy
ChatOptions = Mapping[str, Any]  # arguments of ChatTokens
_EVERY_TEMPLATE = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
_Result = TypeVar("_Result")


class TokenizerProcess:
    """The tokenizer of a folder; `close` it, or use it as a context manager.

    The constructor raises UserError for missing or wrong files. The methods wait until the tokenizer is loaded, and
    raise UserError if it can't be. Each message begins with `field`, the recipe's field that names the folder.
    """

    def __init__(self, folder: Path, vocab_size: int | None, field: str = "") -> None:
        self._folder, self._vocab_size, self._field = folder, vocab_size, field
        try:
            check_tokenizer_files(folder)
        except UserError as error:
            raise UserError(f"{field}{error}") from error
        self._loaded: Tokenizer | None = None
        self._problem: str | None = None  # of the first call that failed: no later one can succeed
        self._process = None if "transformers" in sys.modules else CallableProcess(_Calls(str(folder), vocab_size))

    def tool_family(self) -> Family | None:
        """The form in which a model with this tokenizer writes tool calls. None: no form, or an unknown one."""
        return self._call(tool_family)

    def prompt_lengths(self, tasks: Sequence[Task], chat: ChatOptions, limit: int) -> list[int]:
        """Tokens of each prompt with the chat template: exact, or a lower bound above `limit`."""
        return self._call(_prompt_lengths, tasks, chat, limit)

    def prompt_text(self, task: Task, chat: ChatOptions) -> str:
        """The task's prompt as the model reads it."""
        return self._call(_prompt_text, task, chat)

    def template_variables(self) -> dict[str, str]:
        """Variables that change what the chat template writes for a short conversation, besides those of every
        template, and what each is where none is given: "true", "false", or "" for neither."""
        return self._call(_template_variables)

    def row_problem(self, source: Source, chat: ChatOptions, rows: int, ranks: bool = False) -> str | None:
        """What the chat template makes impossible in the first `rows` rows of a source, of the first such row.

        ranks: a reward model learns from them."""
        return self._call(_row_problem, source, chat, rows, ranks)

    def wait(self) -> None:
        """Returns when the tokenizer is loaded."""
        self.tool_family()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Calls `function(tokenizer, *args)` where the tokenizer is."""
        if self._problem is not None:
            raise UserError(self._problem)
        try:
            if self._process is not None:
                return cast(_Result, self._process.call(function, *args, seconds=SECONDS))
            if self._loaded is None:
                self._loaded = load_tokenizer(self._folder, self._vocab_size)
            return function(self._loaded, *args)
        except UserError as error:
            self._problem = f"{self._field}{error}"
            raise UserError(self._problem) from error
        except (CallFailed, NoAnswer, ProcessDied) as error:
            self._problem = f"{self._field}tokenizer: '{self._folder}' can't be tried ({error}); try again"
            raise UserError(self._problem) from error


class _Calls:
    """Loads the tokenizer where it is unpickled, in a process of its own, and calls functions of it there."""

    def __init__(self, folder: str, vocab_size: int | None) -> None:
        self._state = {"folder": folder, "vocab_size": vocab_size}

    def __getstate__(self) -> dict[str, Any]:
        return self._state

    def __setstate__(self, state: dict[str, Any]) -> None:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # of which one says that there is no torch
        sys.modules["torch"] = cast(Any, None)  # an import of it now raises
        self._tokenizer = load_tokenizer(**state)

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self._tokenizer, *args)


def _prompt_lengths(tokenizer: Tokenizer, tasks: Sequence[Task], options: ChatOptions, limit: int) -> list[int]:
    chat = ChatTokens(tokenizer, **options)

    def num_tokens(task: Task) -> int:
        try:
            return len(chat.of(task).prompt_tokens(task.prompt, limit))
        except TextTooLong as error:
            return max(error.tokens, limit + 1)

    return [num_tokens(task) for task in tasks]


def _prompt_text(tokenizer: Tokenizer, task: Task, options: ChatOptions) -> str:
    return ChatTokens(tokenizer, **options).of(task).prompt_text(task.prompt)


def _template_variables(tokenizer: Tokenizer) -> dict[str, str]:
    template = tokenizer.chat_template
    if not isinstance(template, str):
        return {}
    syntax = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # as transformers reads templates
    try:
        names = find_undeclared_variables(syntax.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)))
    except jinja2.TemplateSyntaxError:  # of a tag of transformers' own
        return {}
    found = {}
    for name in sorted(names - _EVERY_TEMPLATE - set(tokenizer.special_tokens_map)):
        unset, if_true, if_false = (_rendered(tokenizer, given) for given in ({}, {name: True}, {name: False}))
        if if_true != if_false:
            found[name] = "true" if unset == if_true else "false" if unset == if_false else ""
    return found


def _rendered(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> str | None:
    """A user's message with the opening of the answer; None if the template refuses it."""
    try:
        said = [{"role": "user", "content": "-"}]
        return str(tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, **variables))
    except TEMPLATE_ERRORS:
        return None


def _row_problem(tokenizer: Tokenizer, source: Source, options: ChatOptions, rows: int, ranks: bool) -> str | None:
    chat = ChatTokens(tokenizer, **options)
    for example, place in zip(source.examples[:rows], source.places[:rows], strict=True):
        try:
            refuse_padded_end(example.tokenized(chat), tokenizer.pad_token_id if ranks else None)
        except UserError as error:
            return f"{place}: {error}"
    return None

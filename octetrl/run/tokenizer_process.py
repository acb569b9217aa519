"""A tokenizer that loads in a process of its own while `octetrl check` does everything else.

transformers imports torch where there is torch, and `octetrl check` needs neither. Tokenizers do not use torch, so the
process refuses its import: it starts in about 2 seconds instead of 5. Where transformers is imported already, the
tokenizer is loaded in this process, without a second one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from octetrl.data.conversations import refuse_padded_end
from octetrl.data.mixture import Source
from octetrl.data.tokenizer import Tokenizer, check_tokenizer_files, load_tokenizer
from octetrl.environments.tools.messages import TEMPLATE_ERRORS
from octetrl.process.callable_process import CallableProcess, CallFailed, NoAnswer, ProcessDied
from octetrl.records import Task
from octetrl.rollout.call_text import find_format
from octetrl.rollout.chat_tokens import ChatTokens, check_variables, own_variables, template_names, unread
from octetrl.system.errors import UserError
from octetrl.system.text import TextTooLong
from octetrl.telemetry.rollouts import Span, spans_of

SECONDS = 300.0  # for loading, and for the prompts of a sample: a machine may be busy
ChatOptions = Mapping[str, Any]  # arguments of ChatTokens
_Result = TypeVar("_Result")


class TokenizerProcess:
    """The tokenizer of a folder; `close` it, or use it as a context manager.

    The constructor raises UserError for missing or wrong files. The methods wait until the tokenizer is loaded, and
    raise UserError if it can't be. Each message begins with `field`, the recipe's field that names the folder.
    """

    def __init__(self, folder: Path, vocab_size: int | None, field: str = "", template: str | None = None) -> None:
        self._field: str = field
        self._given: dict[str, Any] = {"folder": str(folder), "vocab_size": vocab_size, "template": template}
        try:
            check_tokenizer_files(folder)
        except UserError as error:
            raise UserError(f"{field}{error}") from error
        self._loaded: Tokenizer | None = None
        self._problem: str | None = None  # of the first call that failed: no later one can succeed
        self._process = None if "transformers" in sys.modules else CallableProcess(_Calls(self._given))

    def tool_format(self, name: str = "auto") -> str | None:
        """The format in which a model with this tokenizer writes tool calls, with `rollout.tool_format` as `name`.
        None: no format, or an unknown one."""
        return self._call(_tool_format, name)

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

    def template_names(self) -> frozenset[str] | None:
        """The names that the chat template reads; None if that can't be told."""
        return self._call(template_names)

    def unread_variable(self, variables: Mapping[str, Any]) -> str | None:
        """Which of the recipe's variables the chat template ignores. None: none, or they are refused as a whole."""
        return self._call(_unread_variable, variables)

    def row_problem(self, source: Source, chat: ChatOptions, rows: int, ranks: bool = False) -> str | None:
        """What the chat template makes impossible in the first `rows` rows of a source, of the first such row.

        ranks: a reward model learns from them."""
        return self._call(_row_problem, source, chat, rows, ranks)

    def row_spans(self, source: Source, chat: ChatOptions, rows: int) -> list[tuple[str, list[tuple[str, list[Span]]]]]:
        """Of the first `rows` rows the place of each, and its token sequences with a title."""
        found = self._call(_row_spans, source, chat, rows)  # of another process: plain tuples
        return [(place, [(title, [Span(*one) for one in spans]) for title, spans in each]) for place, each in found]

    def wait(self) -> None:
        """Returns when the tokenizer is loaded."""
        self.tool_format()

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
                self._loaded = load_tokenizer(**self._given)
            return function(self._loaded, *args)
        except UserError as error:
            self._problem = str(error) if str(error).startswith("model.chat_template") else f"{self._field}{error}"
            raise UserError(self._problem) from error
        except (CallFailed, NoAnswer, ProcessDied) as error:
            self._problem = f"{self._field}tokenizer: '{self._given['folder']}' can't be tried ({error}); try again"
            raise UserError(self._problem) from error


class _Calls:
    """Loads the tokenizer where it is unpickled, in a process of its own, and calls functions of it there."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._state = given

    def __getstate__(self) -> dict[str, Any]:
        return self._state

    def __setstate__(self, state: dict[str, Any]) -> None:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # of which one says that there is no torch
        sys.modules["torch"] = cast(Any, None)  # an import of it now raises
        self._tokenizer = load_tokenizer(**state)

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self._tokenizer, *args)


def _row_spans(
    tokenizer: Tokenizer, source: Source, options: ChatOptions, rows: int
) -> list[tuple[str, list[tuple[str, list[Span]]]]]:
    chat, found = ChatTokens(tokenizer, **options), []
    for example, place in zip(source.examples[:rows], source.places[:rows], strict=True):
        sequences = []
        for sample in example.tokenized(chat).samples:
            title = "" if sample.pair is None else ", chosen" if sample.chosen else ", rejected"
            spans = spans_of(sample.token_ids, sample.loss_mask)
            sequences.append((title, [Span(trained, chat.text_of(ids), len(ids)) for trained, ids in spans]))
        found.append((place, sequences))
    return found


def _tool_format(tokenizer: Tokenizer, name: str) -> str | None:
    found = find_format(tokenizer, name)
    return None if found is None else found.name


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
    found = {}
    for name in own_variables(template_names(tokenizer) or (), tokenizer):
        unset, if_true, if_false = (_rendered(tokenizer, given) for given in ({}, {name: True}, {name: False}))
        if if_true != if_false:
            found[name] = "true" if unset == if_true else "false" if unset == if_false else ""
    return found


def _unread_variable(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> str | None:
    try:
        check_variables(tokenizer, variables)
    except UserError:
        return None  # which ChatTokens reports
    return unread(template_names(tokenizer), variables)


def _rendered(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> str | None:
    """A user's message with the opening of the answer; None if the template refuses it."""
    try:
        said = [{"role": "user", "content": "-"}]
        return str(tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, **variables))
    except TEMPLATE_ERRORS:
        return None


def _row_problem(tokenizer: Tokenizer, source: Source, options: ChatOptions, rows: int, ranks: bool) -> str | None:
    chat, names = ChatTokens(tokenizer, **options), template_names(tokenizer)
    for example, place in zip(source.examples, source.places, strict=True):
        given: Any = getattr(example, "chosen", example)  # both answers of a pair have the same
        if lost := unread(names, given.variables, getattr(given, "tools", None) or ()):
            return f"{place}: {lost}"
    for example, place in zip(source.examples[:rows], source.places[:rows], strict=True):
        try:
            refuse_padded_end(example.tokenized(chat), tokenizer.pad_token_id if ranks else None)
        except UserError as error:
            return f"{place}: {error}"
    return None

"""Read conversations for SFT and pairs of answers for preference objectives, and convert them to samples.

A conversation is a row of one of three forms, which a file may mix:

    {"prompt": ..., "answer": ...}               tokenized like a rollout: the prompt with the start of the answer's
                                                 turn, then the answer and EOS
    {"messages": [{"role", "content"}, ...]}     several turns, exactly as the chat template writes them
    {"prompt": [...], "completion": [...]}       the same in two parts, as TRL has them; only the second is trained on

`completion` is another name of `answer`. `tools` and `chat_template_kwargs` of a row go to the template.

A pair is a better and a worse answer to the same prompt. `prompt` may also be a list of messages:

    {"prompt": "...", "chosen": "...", "rejected": "..."}       tokenized like a rollout
    {"messages": [...], "chosen": ..., "rejected": ...}         as the chat template writes them; each answer is a text,
                                                                or a list of the messages that follow
    {"chosen": [...], "rejected": [...]}                        two whole conversations; their common beginning is the
                                                                prompt

The loss covers only the assistant's text after the prompt, including the end of its turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from octetrl.data.rows import required_text
from octetrl.environments.prompts import read_messages, read_tools, read_variables
from octetrl.records import Message, Prompt, Sample
from octetrl.system.errors import UserError, nearest

PAIR = ("chosen", "rejected")
VARIABLES = "chat_template_kwargs"  # of a row: variables of the chat template


class MaskedTokens(Protocol):
    """A tokenized conversation (rollout/message_tokens.py)."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def loss_mask(self) -> tuple[bool, ...]: ...

    @property
    def across_borders(self) -> int: ...


class TurnTokens(Protocol):
    """The interface that tokenizes turns: `ChatTokens` (rollout/chat_tokens.py)."""

    def with_template(self, tools: Sequence[Any], variables: Mapping[str, Any], /) -> TurnTokens: ...

    def prompt_tokens(self, prompt: Prompt, /) -> tuple[int, ...]: ...

    def answer_tokens(self, answer: str, /) -> tuple[int, ...]: ...

    def message_tokens(
        self, messages: Sequence[Message], *, learn_from: int = 0, tools: Sequence[Any] | None = None
    ) -> Sequence[MaskedTokens]: ...


class Tokenized(NamedTuple):
    """A tokenized example: one conversation, or one for each of its answers (rollout/message_tokens.py), or the two of
    a preference pair with the chosen one first."""

    samples: tuple[Sample, ...]
    across_borders: int = 0  # number of tokens only partly in an answer, which are not trained on

    @property
    def longest(self) -> int:
        return max(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the answer to train on."""

    prompt: str
    answer: str
    variables: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the digest of rows is of their repr

    def tokenized(self, chat: TurnTokens) -> Tokenized:
        chat = chat.with_template((), self.variables)
        prompt, answer = chat.prompt_tokens(self.prompt), chat.answer_tokens(self.answer)
        return Tokenized((supervised(prompt + answer, (False,) * len(prompt) + (True,) * len(answer)),))


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Several turns. The assistant's text from message `learn_from` on is trained on."""

    messages: tuple[Message, ...]
    learn_from: int = 0
    tools: tuple[Any, ...] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def tokenized(self, chat: TurnTokens) -> Tokenized:
        chat = chat.with_template((), self.variables)
        parts = chat.message_tokens(self.messages, learn_from=self.learn_from, tools=self.tools)
        samples = tuple(supervised(tokens.token_ids, tokens.loss_mask) for tokens in parts)
        return Tokenized(samples, sum(tokens.across_borders for tokens in parts))


def supervised(token_ids: tuple[int, ...], loss_mask: tuple[bool, ...]) -> Sample:
    """Create a sample for supervised training, without the engine's log-probs."""
    return Sample(token_ids, loss_mask, generator_logprobs=None, advantage=1.0, policy_version=None)


def read_conversation(record: Mapping[str, Any], where: str) -> Conversation | Dialogue:
    """Read the conversation of a row. Raises UserError that begins with `where`."""
    if "messages" in record:
        messages = _messages(record, "messages", where)
        if all(message["role"] != "assistant" for message in messages):
            raise UserError(f"{where}: 'messages' has no assistant message to train on; add its answers")
        return Dialogue(messages, **_template(record, where))
    answer = "completion" if "answer" not in record and "completion" in record else "answer"
    if isinstance(record.get("prompt"), list):
        context = _messages(record, "prompt", where)
        return Dialogue((*context, *_answer(record, answer, where)), len(context), **_template(record, where))
    refuse_tools(record, where)
    texts = required_text(record, "prompt", where), required_text(record, answer, where)
    return Conversation(*texts, _template(record, where)["variables"])


def _messages(record: Mapping[str, Any], key: str, where: str) -> tuple[Message, ...]:
    return read_messages(record[key], f"{where}: '{key}'")


def _template(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The tools and variables of the chat template that a row gives."""
    tools = read_tools(record.get("tools"), f"{where}: 'tools'") or None
    return {"tools": tools, "variables": read_variables(record.get(VARIABLES), f"{where}: '{VARIABLES}'")}


def refuse_tools(record: Mapping[str, Any], where: str) -> None:
    """Raise UserError if a row whose prompt is a text has tools, which only the template of messages could write."""
    if read_tools(record.get("tools"), f"{where}: 'tools'"):
        raise UserError(
            f"{where}: 'tools' is only read beside 'messages', which the chat template writes; give the prompt as"
            " \"messages\", or remove 'tools'"
        )


@dataclass(frozen=True, slots=True)
class Preference:
    """Two conversations with the same prompt and different answers."""

    chosen: Conversation | Dialogue
    rejected: Conversation | Dialogue

    def tokenized(self, chat: TurnTokens) -> Tokenized:
        better, worse = self.chosen.tokenized(chat), self.rejected.tokenized(chat)
        if len(better.samples) + len(worse.samples) > 2:
            raise UserError(
                "the chat template leaves out parts of an earlier answer of 'chosen' or 'rejected', and a pair compares"
                " one answer each; give the earlier answers in the prompt, or remove their thoughts"
            )
        if better.samples[0].token_ids == worse.samples[0].token_ids:
            raise UserError(
                "'chosen' and 'rejected' have the same tokens, since the chat template leaves out where they differ;"
                " write the difference into 'content', or remove the row"
            )
        pair = (replace(better.samples[0], pair=0), replace(worse.samples[0], pair=0, chosen=False))
        return Tokenized(pair, better.across_borders + worse.across_borders)


def refuse_padded_end(item: Tokenized, pad_token_id: int | None) -> None:
    """Raise UserError if an answer ends with padding: its reward would be read before its end."""
    if pad_token_id is not None and any(sample.token_ids[-1] == pad_token_id for sample in item.samples):
        raise UserError(
            f"an answer ends with the tokenizer's pad token ({pad_token_id}), before which its reward would be read;"
            f" give the tokenizer another pad_token"
        )


def read_preference(record: Mapping[str, Any], where: str) -> Preference:
    """Read the pair of a row. Raises UserError that begins with `where`."""
    for key in PAIR:
        if key not in record:
            raise UserError(f"{where}: no '{key}'{nearest(key, record)}; the line has {', '.join(record) or 'no keys'}")
    if record["chosen"] == record["rejected"]:
        raise UserError(f"{where}: 'chosen' and 'rejected' are the same, so neither is better; remove the row")
    given = next((key for key in ("messages", "prompt") if key in record), None)
    if given is None:
        return Preference(*_two_dialogues(record, where))
    if given == "messages" or isinstance(record[given], list):
        context, template = _messages(record, given, where), _template(record, where)
        answers = [(*context, *_answer(record, key, where)) for key in PAIR]
        return Preference(*(Dialogue(messages, len(context), **template) for messages in answers))
    prompt = required_text(record, "prompt", where)
    if any(isinstance(record[key], list) for key in PAIR):
        chosen, rejected = _two_dialogues(record, where)
        if prompt not in [message.get("content") for message in chosen.messages[: chosen.learn_from]]:
            raise UserError(
                f"{where}: 'prompt' is not in the common beginning of 'chosen' and 'rejected';"
                f" give \"messages\" and two answers, or remove 'prompt'"
            )
        return Preference(chosen, rejected)
    refuse_tools(record, where)
    variables = _template(record, where)["variables"]
    return Preference(*(Conversation(prompt, required_text(record, key, where), variables) for key in PAIR))


def _two_dialogues(record: Mapping[str, Any], where: str) -> tuple[Dialogue, Dialogue]:
    """Read two whole conversations. Their common beginning is the prompt."""
    for key in PAIR:
        if not isinstance(record[key], list):
            raise UserError(f"{where}: '{key}' is a text without a prompt; give 'prompt' or 'messages' too")
    chosen, rejected = (_messages(record, key, where) for key in PAIR)
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    template = _template(record, where)
    for key, messages in zip(PAIR, (chosen, rejected), strict=True):
        if all(message["role"] != "assistant" for message in messages[common:]):
            raise UserError(
                f"{where}: '{key}' has no assistant message that differs from the other's; give two answers"
            )
    return Dialogue(chosen, common, **template), Dialogue(rejected, common, **template)


def _answer(record: Mapping[str, Any], key: str, where: str) -> tuple[Message, ...]:
    if not isinstance(record[key], list):
        return ({"role": "assistant", "content": required_text(record, key, where)},)
    messages = _messages(record, key, where)
    if all(message["role"] != "assistant" for message in messages):
        raise UserError(f"{where}: '{key}' has no assistant message; give its answer")
    return messages

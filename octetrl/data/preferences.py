"""Read preference pairs: a better and a worse answer to the same prompt.

    {"prompt": "...", "chosen": "...", "rejected": "..."}             tokenized like a rollout
    {"messages": [...], "chosen": ..., "rejected": ...}               as the chat template writes them; each answer is a
                                                                      text, or a list of the messages that follow
    {"chosen": [...], "rejected": [...]}                              two whole conversations; their common beginning is
                                                                      the prompt

`prompt` may also be a list of messages. The loss covers only the assistant's text after the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octetrl.data.conversations import (
    Conversation,
    Dialogue,
    Message,
    Tokenized,
    TurnTokens,
    messages_of,
    refuse_tools,
    tools_of,
)
from octetrl.data.rows import required_text
from octetrl.system.errors import UserError, nearest


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


def preference_of(record: Mapping[str, Any], where: str) -> Preference:
    """Read the pair of a row. Raises UserError that begins with `where`."""
    for key in ("chosen", "rejected"):
        if key not in record:
            raise UserError(f"{where}: no '{key}'{nearest(key, record)}; the line has {', '.join(record) or 'no keys'}")
    if record["chosen"] == record["rejected"]:
        raise UserError(f"{where}: 'chosen' and 'rejected' are the same, so neither is better; remove the row")
    prompt = "prompt" if "messages" not in record else "messages"
    if prompt in record and not isinstance(record[prompt], list):
        if prompt == "messages":
            messages_of(record, prompt, where)  # raises an error that describes the problem
        return _of_texts(record, where)
    if prompt not in record:
        return _of_whole_conversations(record, where)
    context = messages_of(record, prompt, where)
    tools = tools_of(record, where)

    def answered(key: str) -> Dialogue:
        messages = (*context, *_answer(record, key, where))
        return Dialogue(messages, learn_from=len(context), tools=tools)

    return Preference(answered("chosen"), answered("rejected"))


def _of_texts(record: Mapping[str, Any], where: str) -> Preference:
    prompt = required_text(record, "prompt", where)
    if isinstance(record["chosen"], list) or isinstance(record["rejected"], list):
        pair = _of_whole_conversations(record, where)
        context = pair.chosen.messages[: pair.chosen.learn_from] if isinstance(pair.chosen, Dialogue) else ()
        if prompt not in [message.get("content") for message in context]:
            raise UserError(
                f"{where}: 'prompt' is not in the common beginning of 'chosen' and 'rejected';"
                f" give \"messages\" and two answers, or remove 'prompt'"
            )
        return pair
    refuse_tools(record, where)
    return Preference(
        Conversation(prompt, required_text(record, "chosen", where)),
        Conversation(prompt, required_text(record, "rejected", where)),
    )


def _of_whole_conversations(record: Mapping[str, Any], where: str) -> Preference:
    for key in ("chosen", "rejected"):
        if not isinstance(record[key], list):
            raise UserError(f"{where}: '{key}' is a text without a prompt; give 'prompt' or 'messages' too")
    chosen, rejected = messages_of(record, "chosen", where), messages_of(record, "rejected", where)
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    tools = tools_of(record, where)
    for key, messages in (("chosen", chosen), ("rejected", rejected)):
        if all(message["role"] != "assistant" for message in messages[common:]):
            raise UserError(
                f"{where}: '{key}' has no assistant message that differs from the other's; give two answers"
            )
    return Preference(Dialogue(chosen, common, tools), Dialogue(rejected, common, tools))


def _answer(record: Mapping[str, Any], key: str, where: str) -> tuple[Message, ...]:
    if not isinstance(record[key], list):
        return ({"role": "assistant", "content": required_text(record, key, where)},)
    messages = messages_of(record, key, where)
    if all(message["role"] != "assistant" for message in messages):
        raise UserError(f"{where}: '{key}' has no assistant message; give its answer")
    return messages

"""Write a page of rollouts for a browser: one file that needs no other file and no network.

`rollout_page.html` is the template. The groups are inserted as JSON, in a script element of a type that browsers do not
run. The JSON is ASCII with `<` escaped, so no text of a model can end the element. The page adds texts to the document
as text, never as markup. Its Content-Security-Policy forbids every connection.

A token is highlighted if the engine gave it a low probability, or if trainer and engine disagree about it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from octetrl.records import RolloutStatus
from octetrl.system.text import visible
from octetrl.telemetry.rollouts import MODEL, Filter, Interval, SampledGroup, SampledRow, Selection, Utterance

UNLIKELY = 0.1  # probability
VERY_UNLIKELY = 0.01
DISAGREEMENT = 0.1  # difference of log-probs
_PLACE = '{"groups": []}'  # placeholder in the template

Pieces = Callable[[Sequence[int]], list[str]]  # token ids -> text of each token


def rollout_page(title: str, selection: Selection, wanted: Filter, pieces: Pieces | None = None) -> str:
    """Return the page's HTML.

    wanted: initial values of the page's filters.
    pieces: the text of each token. None: the page shows whole texts without tokens.
    """
    content = {
        "title": title,
        "found": selection.found,
        "statuses": [status.value for status in RolloutStatus],
        "filter": _filter(wanted),
        "unlikely": UNLIKELY,
        "disagreement": DISAGREEMENT,
        "groups": [_group(group, pieces) for group in selection.groups],
    }
    template = files("octetrl.telemetry").joinpath("rollout_page.html").read_text(encoding="utf-8")
    before, found, after = template.partition(_PLACE)
    assert found, "rollout_page.html has no placeholder for its data"
    content = _visible(content)
    return before + json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c") + after


def _visible(value: Any) -> Any:
    """The value with `visible` texts, at any depth."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {key: _visible(part) for key, part in value.items()}
    return [_visible(part) for part in value] if isinstance(value, list) else value


def write_page(path: Path, title: str, selection: Selection, wanted: Filter, pieces: Pieces | None = None) -> None:
    path.write_text(rollout_page(title, selection, wanted, pieces), encoding="utf-8")


def _filter(wanted: Filter) -> dict[str, Any]:
    return {
        "steps": _span(wanted.steps),
        "rewards": _span(wanted.rewards or Interval()),
        "statuses": sorted(wanted.statuses),
        "task": wanted.task,
        "text": wanted.text,
    }


def _span(span: Interval) -> list[float | None]:
    return [end if math.isfinite(end) else None for end in (span.low, span.high)]


def _group(group: SampledGroup, pieces: Pieces | None) -> dict[str, Any]:
    first = group.rows[0].line
    return {
        "step": group.step,
        "task": group.rows[0].task_id,
        "prompt": first["prompt"],
        "answer": first.get("answer"),
        "read": "" if pieces is None else "".join(pieces(first.get("prompt_token_ids", []))),
        "rows": [_row(row, pieces) for row in group.rows],
    }


def _row(row: SampledRow, pieces: Pieces | None) -> dict[str, Any]:
    line = row.line
    return {
        "sibling": line["sibling"],
        "status": row.status,
        "reward": row.reward,
        "components": row.components,
        "metrics": row.metrics,
        "tokens": len(row.token_ids),
        "versions": row.versions_text,
        "trained": row.trained_text,
        **_sequences(row, pieces),
        **{key: line.get(key) for key in ("finish_reason", "policy_version", "answered", "detail", "trace")},
        "said": [_part(row, part, pieces) for part in row.said],
    }


def _sequences(row: SampledRow, pieces: Pieces | None) -> dict[str, Any]:
    """Its token sequences as texts, each with whether the model sampled it. None for one of prompt and answer alone."""
    if pieces is None or len(row.said) < 2:
        return {}
    return {"sequences": [[[by, "".join(pieces(ids))] for by, ids in each if ids] for each in row.sequences]}


def _part(row: SampledRow, part: Utterance, pieces: Pieces | None) -> dict[str, Any]:
    place = {"by": part.by, "text": part.text, "depth": part.depth, "call": part.is_call}
    if part.by != MODEL or pieces is None or not row.logprobs:
        return place
    engine = row.logprobs[part.tokens]
    tokens: dict[str, Any] = {
        **place,
        "pieces": pieces(row.token_ids[part.tokens]),
        "logprobs": [round(logprob, 2) for logprob in engine],
    }
    if row.trainer_logprobs:
        trainer = row.trainer_logprobs[part.tokens]
        tokens["apart"] = [round(other - logprob, 3) for logprob, other in zip(engine, trainer, strict=True)]
    return tokens


# ---------------------------------------------------------------- tokens as texts

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_LETTER = 8  # tokens


class Decodes(Protocol):
    def decode(self, token_ids: list[int], /) -> Any: ...


def token_pieces(tokenizer: Decodes, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token; joined they are the decoded text.

    In a byte-level vocabulary a character outside ASCII may take several tokens. The last of them has the character,
    the others are empty."""
    pieces: list[str] = []
    before: list[int] = []  # the last complete tokens: a piece may begin with a space only after others
    pending: list[int] = []
    for token_id in token_ids:
        pending.append(token_id)
        text = str(tokenizer.decode([*before, *pending]))[len(str(tokenizer.decode(before))) :]
        if text.endswith(_BROKEN) and len(pending) < _LONGEST_LETTER:
            pieces.append("")
        else:
            pieces.append(text)
            before, pending = pending, []
    if pending:
        pieces[-1] = text
    return pieces

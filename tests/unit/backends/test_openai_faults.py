"""`engine.backend: openai`: failures that concern one answer end no run."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from octetrl.backends.openai.answers import sibling_seed
from octetrl.backends.openai.session import GIVES_UP
from octetrl.config.errors import UserError
from octetrl.environments.endpoint import Endpoint
from octetrl.records import FinishReason
from tests.unit.backends.test_openai import asked, one, replaced, said, texts
from tests.unit.environments.judge_double import judge_double


def test_failures_after_good_answers_never_end_the_run() -> None:
    def by_prompt(body: dict[str, Any]) -> Any:
        return (500, "out of order", {}) if body["messages"][1]["content"] == "bad" else said()

    with judge_double(by_prompt) as double:
        asked_for = [asked("good"), replaced(asked("bad", siblings=GIVES_UP + 1), "8:task")]
        (good,), bad = texts(double.url, concurrency=1, retries=0).generate(asked_for)
    assert good.text == "four" and {one.finish_reason for one in bad} == {FinishReason.FAILED}


@pytest.mark.parametrize("kind", [httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError])
def test_a_connection_that_is_lost_in_an_answer_is_no_missing_server(
    kind: type[httpx.TransportError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was reached, so this answer is lost and not the whole evaluation."""

    def lose(*_: object) -> None:
        raise kind("reset by peer")

    monkeypatch.setattr(Endpoint, "_exchange", lose)
    found = one(texts("http://127.0.0.1:9/v1", retries=0), asked())
    assert found.finish_reason is FinishReason.FAILED and f"{kind.__name__}: reset by peer" in str(found.detail)


@pytest.mark.parametrize("status", [405, 413, 415, 422, 501])
def test_a_request_that_would_fail_again_in_any_form_ends_the_run_at_once(status: int) -> None:
    expected = "refuses the request .*unknown field.*; correct the setting that it names"
    with judge_double((status, "unknown field", {})) as double, pytest.raises(UserError, match=expected) as error:
        one(texts(double.url), asked())
    assert "\n" not in str(error.value) and len(double.asked) == 1


def test_seeds_of_siblings_are_signed_integers_of_64_bits() -> None:
    """Servers take no larger ones."""
    assert 1 << 62 < max(sibling_seed(5, sibling) for sibling in range(1, 200)) < 1 << 63

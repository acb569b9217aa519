"""`engine.backend: openai`: failures that concern one answer end no run."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import pytest

from octetrl.backends.openai.answers import sibling_seed
from octetrl.backends.openai.session import GIVES_UP
from octetrl.config.errors import UserError
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


def test_a_connection_that_is_lost_in_an_answer_is_no_missing_server() -> None:
    """The server was reached, so the fault concerns this answer: what it was must not end a whole evaluation."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def reset() -> None:
            connection = listening.accept()[0]
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()  # with a reset

        threading.Thread(target=reset, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        found = one(texts(url, retries=0), asked())
    assert found.finish_reason is FinishReason.FAILED and "ReadError" in str(found.detail)


@pytest.mark.parametrize("status", [405, 413, 415, 422, 501])
def test_a_request_that_would_fail_again_in_any_form_ends_the_run_at_once(status: int) -> None:
    expected = "refuses the request .*unknown field.*; correct the setting that it names"
    with judge_double((status, "unknown field", {})) as double, pytest.raises(UserError, match=expected) as error:
        one(texts(double.url), asked())
    assert "\n" not in str(error.value) and len(double.asked) == 1


def test_seeds_of_siblings_are_signed_integers_of_64_bits() -> None:
    """Servers take no larger ones."""
    assert 1 << 62 < max(sibling_seed(5, sibling) for sibling in range(1, 200)) < 1 << 63

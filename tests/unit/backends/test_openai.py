"""`engine.backend: openai` against a server that answers as a test wants: what is asked, what is read, every fault."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from octetrl import endpoint
from octetrl.backends.openai import session as server_session
from octetrl.backends.openai.answers import sibling_seed
from octetrl.backends.openai.backend import OpenaiBackend
from octetrl.backends.openai.session import GIVES_UP
from octetrl.backends.openai.text import UNKNOWN, CharacterTokenizer, asked_of
from octetrl.config.schema import OpenaiConfig
from octetrl.endpoint import Endpoint, EndpointError
from octetrl.records import Completion, FinishReason, GenerationRequest, LogitOptions, SamplingParams
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.system.errors import UserError
from tests.unit.backends.setting import CONTEXT_LENGTH, SPEC, Letters
from tests.unit.environments.judge_double import judge_double

KEY = "sk-quite-secret"
CHAT = ChatTokens(CharacterTokenizer(), "Be short.")


def settings(url: str, **changes: Any) -> OpenaiConfig:
    given: dict[str, Any] = {
        "base_url": url,
        "model": "m",
        "retries": 1,
        "backoff_seconds": 0.0,
        "timeout_seconds": 5.0,
    }
    return OpenaiConfig(**given | changes)


def texts(url: str, **changes: Any) -> OpenaiBackend:
    return OpenaiBackend.of_text(settings(url, answers="text", **changes))


def tokens(url: str, **changes: Any) -> OpenaiBackend:
    given: dict[str, Any] = {"spec": SPEC, "tokenizer": Letters(), "context_length": CONTEXT_LENGTH}
    return OpenaiBackend.of_tokens(settings(url, **changes), **given)


def asked(prompt: str = "hi", siblings: int = 1, **sampling: Any) -> GenerationRequest:
    given = SamplingParams(**{"max_new_tokens": 8, **sampling})
    return GenerationRequest("7:task", CHAT.prompt_tokens(prompt), given, siblings, seed=5)


def said(text: str = "four", reason: str = "stop", model: str = "m", **usage: int) -> dict[str, Any]:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return {"model": model, "choices": [choice], "usage": usage or {"completion_tokens": 3}}


def drawn(token_ids: list[int], logprobs: list[float], reason: str = "stop") -> dict[str, Any]:
    choice = {"token_ids": token_ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
    return {"model": "m", "choices": [choice]}


def one(backend: OpenaiBackend, request: GenerationRequest) -> Completion:
    try:
        ((found,),) = backend.generate([request])
    finally:
        backend.close()
    return found


# ---------------------------------------------------------------- what is asked, and read


def test_messages_and_sampling_travel_by_name() -> None:
    with judge_double(said("four", "length", completion_tokens=8)) as double:
        found = one(texts(double.url), asked("2 + 2 =", temperature=0.5, top_p=0.9, stop=("\n",)))
    ((path, body, headers),) = double.asked
    assert path == "/v1/chat/completions" and "Authorization" not in headers
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2 ="}],
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 5,
        "stop": ["\n"],
        "max_completion_tokens": 8,
    }
    assert (found.text, found.finish_reason, found.token_ids) == ("four", FinishReason.LENGTH, (UNKNOWN,) * 8)
    assert found.logprobs == ()


def test_a_plain_prompt_is_completed_without_a_template() -> None:
    answer = said() | {"choices": [{"text": " four", "finish_reason": "stop"}]}
    with judge_double(answer) as double:
        request = GenerationRequest("p", CHAT.plain_tokens("2 + 2 é ="), SamplingParams(8))
        assert one(texts(double.url), request).text == " four"
    ((path, body, _),) = double.asked
    assert path == "/v1/completions" and (body["prompt"], body["max_tokens"]) == ("2 + 2 é =", 8)


def test_token_ids_go_and_come() -> None:
    with judge_double(drawn([7, 9, 4], [-0.5, -1, -0.25])) as double:
        double.models = {"data": [{"id": "m", "max_model_len": CONTEXT_LENGTH}]}
        request = GenerationRequest("t", (1, 2), SamplingParams(30, top_k=4, min_p=0.1, stop=("JE",)), seed=3)
        found = one(tokens(double.url), request)
    ((path, body, _),) = double.asked
    assert path == "/v1/completions" and body["prompt"] == [1, 2] and body["max_tokens"] == 30
    assert (body["top_k"], body["min_p"], body["stop"]) == (4, 0.1, ["JE"])
    assert body["stop_token_ids"] == sorted({Letters.eos_token_id, *SPEC.eos_token_ids})
    assert (body["ignore_eos"], body["logprobs"], body["return_token_ids"]) == (True, 0, True)
    assert (found.token_ids, found.logprobs, found.text) == ((7, 9, 4), (-0.5, -1, -0.25), "H"), (
        "cut at the stop string"
    )


def test_what_the_server_cannot_take_is_refused_by_name() -> None:
    for changes, expected in (
        ({"top_k": 4}, "top_k cannot be asked"),
        ({"min_p": 0.1}, "min_p cannot be asked"),
        ({"stop_token_ids": (4,)}, "stop_token_ids cannot be asked"),
        ({"ignore_eos": True}, "ignore_eos cannot be asked"),
        ({"stop": ("a", "b", "c", "d", "e")}, "more than 4 stop strings"),
        ({"logits": LogitOptions(num_top=2)}, "penalties, grammars and further log-probs"),
    ):
        with pytest.raises(UserError, match=expected):
            one(texts("http://127.0.0.1:9/v1"), asked(**changes))


def test_any_text_survives_the_stand_in_tokenizer() -> None:
    for text in ("", "naïve 数学 🙂\x00\n", "\ud800 half", '"}]'):
        fields = asked_of(CHAT.prompt_tokens(text))
        assert fields["messages"][1]["content"] == text or "\ud800" in text
        assert asked_of(CHAT.plain_tokens(text)).keys() == {"prompt"}


def test_siblings_have_seeds_of_their_own_and_requests_in_flight_are_limited() -> None:
    with judge_double(said()) as double:
        backend = texts(double.url)
        backend.generate([asked(siblings=4)])
        backend.close()
    seeds = sorted(body["seed"] for _, body, _ in double.asked)
    assert len(set(seeds)) == 4 and 5 in seeds and seeds == sorted(sibling_seed(5, sibling) for sibling in range(4))
    with judge_double(said()) as double:
        backend = texts(double.url, concurrency=3)
        (answers,) = backend.generate([asked(siblings=20)])
        assert backend.metrics is not None and backend.metrics.completions == 20
        backend.close()
    assert len(answers) == 20 and double.most == 3


def test_a_cancelled_request_has_no_event() -> None:
    with judge_double(said()) as double:
        backend = texts(double.url, concurrency=1)
        with backend.session() as session:
            session.submit(asked("a", siblings=2))
            session.cancel("7:task")
            assert not session.has_work and session.events() == []
            session.submit(asked("b"))
            events = []
            while session.has_work:
                events += session.events(1.0)
        backend.close()
    assert [event.completion is not None for event in events] == [True]


# ---------------------------------------------------------------- faults


def test_a_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"engine.openai.api_key_variable: the environment variable MY_KEY is not set"):
        texts("http://h/v1", api_key_variable="MY_KEY")
    monkeypatch.setenv("MY_KEY", KEY)
    with judge_double((401, f"wrong key {KEY}", {})) as double:
        with pytest.raises(UserError, match=r"refuses access .*; correct the key in MY_KEY") as error:
            one(texts(double.url, api_key_variable="MY_KEY"), asked())
        assert KEY not in str(error.value) and "***" in str(error.value)
    assert double.asked[0][2]["Authorization"] == f"Bearer {KEY}" and len(double.asked) == 1


def _with_key(where: str) -> Any:
    header = f"Bearer {KEY}"
    return {
        "model": said(model=header),
        "a field's name": said() | {header: 1},
        "escaped": (200, json.dumps(said(model=KEY)).replace("sk-", "\\u0073k-"), {}),
        "cut": (500, "x" * 295 + KEY, {}),
        "location": (302, "", {"Location": f"http://there/{KEY}"}),
        "message": (400, json.dumps({"error": {"message": KEY}}).replace("sk-", "\\u0073k-"), {}),
    }[where]


@pytest.mark.parametrize("where", ["model", "a field's name", "escaped", "cut", "location", "message"])
def test_a_key_that_the_server_echoes_is_shown_nowhere(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    with judge_double(_with_key(where)) as double:
        try:
            found = str(one(texts(double.url, api_key_variable="MY_KEY", retries=0), asked()))
        except UserError as error:
            found = str(error)
    assert "sk-q" not in found and ("***" in found or "contains the key" in found or where == "cut")


def test_a_key_that_stands_for_none_may_be_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "EMPTY")
    with judge_double(said("EMPTY set")) as double:
        assert one(texts(double.url, api_key_variable="MY_KEY"), asked()).text == "EMPTY set"


def test_a_dated_name_of_the_model_is_the_model() -> None:
    for name in ("m-2024-08-06", "m-20240806", "m-0613", "m"):
        with judge_double(said(model=name)) as double:
            assert one(texts(double.url), asked()).text == "four"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((404, "no model m", {}), "it has no model 'm', or no such path"),
        ((403, "no", {}), "refuses access .*name the key's variable in engine.openai.api_key_variable"),
        ((400, "temperature: unknown field", {}), "refuses the request .*temperature: unknown field"),
        (said(model="another"), "'m' was asked and 'another' answered"),
        (said(model="m-mini"), "'m' was asked and 'm-mini' answered"),
        ((302, "", {"Location": "https://there/v1"}), "the server redirects.* to https://there/v1.*give that address"),
        ((400, '{"error": {"message": "max_tokens is too large: 8"}}', {}), "8.; lower rollout.max_new_tokens"),
        (said() | {"usage": None}, "gives no usage.completion_tokens"),
        (said(completion_tokens=9), "answered with 9 tokens where at most 8 were asked"),
    ],
)
def test_what_no_request_is_spared_ends_the_run(answer: Any, expected: str) -> None:
    with judge_double(answer) as double, pytest.raises(UserError, match=expected) as error:
        one(texts(double.url), asked())
    assert "\n" not in str(error.value) and len(double.asked) == 1
    assert "answers=text" not in str(error.value), "it asks for texts"


def test_a_server_with_chat_completions_only_is_to_be_asked_for_texts() -> None:
    with judge_double((404, "no such path", {})) as double:
        double.models = {"data": [{"id": "m"}]}
        with pytest.raises(UserError, match=r"or set engine\.openai\.answers=text for a server"):
            one(tokens(double.url), GenerationRequest("t", (1, 2), SamplingParams(8)))


CUT = {"Content-Length": "4096", "Connection": "close"}


@pytest.mark.parametrize(
    ("answer", "expected", "tries"),
    [
        ((400, '{"error": {"code": "context_length_exceeded"}}', {}), "context_length_exceeded", 1),
        (
            (400, '{"error": {"message": "%s", "code": "context_length_exceeded"}}' % ("no room " * 50), {}),
            "...; lower rollout.max_new_tokens, or shorten the prompt",
            1,
        ),
        ((503, "busy", {}), "status 503", 2),
        ((200, '{"choices": [', {}), "not JSON", 1),
        ((200, json.dumps(said())[:40], CUT), "RemoteProtocolError", 2),
        (said(reason="content_filter"), "no text with finish_reason stop or length", 1),
        ((200, '{"a":' + "[" * 200_000, {}), "not JSON", 1),
        ((200, json.dumps(said()), {"Content-Encoding": "gzip"}), "DecodingError", 1),
        (said() | {"choices": []}, "its choices: List should have at least 1 item", 1),
        (said() | {"choices": [said()["choices"][0]] * 2}, "its choices: List should have at most 1 item", 1),
        (said() | {"model": ["m"]}, "its model: Input should be a valid string, and it is a list of 1", 1),
        *((said(completion_tokens=count), "its usage.completion_tokens", 1) for count in (True, -1)),
        (said() | {"choices": [{"message": {"content": "a"}, "finish_reason": ["stop"]}]}, "finish_reason", 1),
        (said() | {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}, "no text", 1),
    ],
)
def test_a_request_that_fails_is_counted_and_the_others_go_on(answer: Any, expected: str, tries: int) -> None:
    def by_prompt(body: dict[str, Any]) -> Any:
        return answer if body["messages"][1]["content"] == "bad" else said()

    with judge_double(by_prompt) as double:
        backend = texts(double.url, concurrency=1)
        (good,), (bad,) = backend.generate([asked("good"), replaced(asked("bad"), "8:task")])
        assert backend.metrics is not None and (backend.metrics.completions, backend.metrics.failed) == (1, 1)
        backend.close()
    assert (good.text, good.detail) == ("four", None)
    assert bad.finish_reason is FinishReason.FAILED and (bad.text, bad.token_ids) == ("", ())
    assert expected in str(bad.detail) and len(str(bad.detail)) < 700 and "\n" not in str(bad.detail)
    assert len(double.asked) == 1 + tries


@pytest.mark.parametrize("answer", [(401, "filtered", {}), said(model="filtered"), said(completion_tokens=9)])
def test_a_refusal_or_an_odd_answer_after_good_ones_concerns_one_request(answer: Any) -> None:
    def by_prompt(body: dict[str, Any]) -> Any:
        return answer if body["messages"][1]["content"] == "bad" else said()

    with judge_double(by_prompt) as double:
        asked_for = [asked("good"), replaced(asked("bad"), "8:task"), replaced(asked("good"), "9:task")]
        (good,), (bad,), (last,) = texts(double.url, concurrency=1).generate(asked_for)
    assert (good.text, last.text) == ("four", "four")
    assert bad.finish_reason is FinishReason.FAILED and re.search("filtered|9 tokens", str(bad.detail))


def replaced(request: GenerationRequest, name: str) -> GenerationRequest:
    return GenerationRequest(name, request.prompt_token_ids, request.sampling, request.num_siblings, request.seed)


def test_passing_faults_are_retried_and_a_server_that_always_fails_ends_the_run() -> None:
    with judge_double((503, "", {}), (200, "x", CUT), (429, "", {"Retry-After": "0"}), said()) as double:
        assert one(texts(double.url, retries=3), asked()).text == "four"
    assert len(double.asked) == 4
    expected = r"the first 8 requests failed, the last one with: .*out of order"
    with judge_double((500, "out of order", {})) as double, pytest.raises(UserError, match=expected):
        one(texts(double.url, retries=0), asked(siblings=30))


def test_no_server() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens, and nobody else can take the port
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        for make in (lambda url: one(texts(url), asked()), tokens):
            with pytest.raises(UserError, match=r"engine.openai.base_url: the server cannot be reached .*start it"):
                make(url)


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ({"data": [{"id": "other"}]}, "the server has no 'm'; its models are: other"),
        (
            {"data": [{"id": ["x"]}, {"id": "m"}]},
            "gives no list of its models .its data.0.id: Input should be a valid str",
        ),
        ({"data": None}, "gives no list of its models .its data"),
        ({"data": [{"id": "m", "max_model_len": 32}]}, "has 32 tokens and model.context_length is 64; set"),
    ],
)
def test_a_server_without_the_model_or_the_room(models: Any, expected: str) -> None:
    with judge_double(said()) as double:
        double.models = models
        with pytest.raises(UserError, match=expected):
            tokens(double.url)
    assert not double.asked


@pytest.mark.parametrize(
    ("answer", "kind", "expected"),
    [
        (said(), UserError, "gave no token_ids and no logprobs, which answers: tokens needs"),
        (drawn([10**400], [-1.0]), UserError, r"answered with token 10+\.\.\., and model.path has tokens 0 to"),
        (drawn([SPEC.vocab_size], [-1.0]), UserError, "its tokenizer is not the server's"),
        (drawn([7], [float("nan")]), None, "token_logprobs.0: Input should be a finite number"),
        (drawn([7], [5.0]), None, "token_logprobs.0: Input should be less than or equal to"),
        (drawn([7], [-(10**400)]), None, "token_logprobs.0: "),
        (drawn([7], [True]), None, "token_logprobs.0: "),
        (drawn([True], [-1.0]), None, "token_ids.0: "),
        (drawn([7, 8], [-1.0]), None, "has 2 token ids and 1 log-probs"),
        ({"model": "m", "choices": [{"token_ids": [7], "logprobs": [1]}]}, None, "choices.0.logprobs: .*a list of 1"),
        (drawn([7, 8], [-1.0, -1.0]), None, "ended after 2 tokens .*without a stop token"),
    ],
)
def test_tokens_that_cannot_be_right(answer: Any, kind: type[Exception] | None, expected: str) -> None:
    with judge_double(answer) as double:
        double.models = {"data": [{"id": "m"}]}
        ask: Callable[[], Completion] = lambda: one(  # noqa: E731
            tokens(double.url), GenerationRequest("t", (1, 2), SamplingParams(4))
        )
        if kind is not None:
            with pytest.raises(kind, match=expected):
                ask()
            return
        found = ask()
    assert found.finish_reason is FinishReason.FAILED and re.search(expected, str(found.detail))


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


def test_a_wait_for_a_retry_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Once for all requests that wait, with the reason, the time and what is left; nothing of a wait that is short."""
    busy = (503, "busy", {})
    with judge_double(busy, busy, said("four"), said("four")) as double:
        backend = texts(double.url, retries=4, backoff_seconds=1.0)
        with backend.session() as session:
            for name in ("a", "b"):
                session.submit(GenerationRequest(name, CHAT.prompt_tokens("hi"), SamplingParams(8)))
            while session.has_work:
                session.advance()
        backend.close()
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith("octetrl: ")]
    assert re.search(r"/v1/chat/completions: status 503: busy; retry 1 of 4 in (0\.[5-9]|1\.0) s", line)
    with judge_double(busy, said("four")) as double:
        one(texts(double.url), asked())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("retry_after", "seconds"), [("inf", 60.0), ("20", 20.0)])
def test_a_wait_is_what_the_server_asks_for_up_to_a_minute(
    retry_after: str, seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    with judge_double((429, "slow", {"Retry-After": retry_after})) as double:
        client = Endpoint(settings(double.url, retries=5, backoff_seconds=1.0))
        never = SimpleNamespace(is_set=lambda: False, wait=waited.append, set=lambda: None)
        monkeypatch.setattr(client, "_closed", never)
        with pytest.raises(EndpointError, match="status 429"):
            client.post("/v1/completions", {})
        client.close()
    assert waited == [seconds] * 5
    assert f"retry 1 of 5 in {seconds} s" in capsys.readouterr().err


SLASHED = "sk-123/x+9=abc"


@pytest.mark.parametrize(
    "echoed", ["sk-123%2Fx%2b9%3Dabc", "%73k-123/x+9=abc", r"sk-123\/x+9=abc", r"sk-123\u002Fx+9\u003dabc"]
)
def test_a_key_is_masked_as_urls_and_json_write_it(echoed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SLASHED)
    for given in (
        (400, f"no access for {echoed} here", {}),
        (302, "", {"Location": f"http://there/?key={echoed}"}),
        (200, json.dumps(said(f"it is {echoed}")), {}),
    ):
        with judge_double(given) as double:
            client = Endpoint(settings(double.url, api_key_variable="MY_KEY", retries=0))
            with pytest.raises(EndpointError) as error:
                client.post("/v1/completions", {})
            client.close()
        found = str(error.value)
        assert "123" not in found.replace(double.url, "") and ("***" in found or "contains the key" in found)


def test_a_connection_that_the_end_itself_closed_is_no_wait_for_a_retry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = texts("http://127.0.0.1:9/v1", retries=4, backoff_seconds=2.0)

    def closed_meanwhile(endpoint: Endpoint, *_: object) -> None:
        endpoint.close()
        raise httpx.ReadError("Bad file descriptor")

    monkeypatch.setattr(Endpoint, "_exchange", closed_meanwhile)
    found = one(backend, asked())
    assert "not retried, because the run ends" in str(found.detail) and capsys.readouterr().err == ""


def test_an_error_that_comes_with_status_200_is_shown() -> None:
    with judge_double((200, '{"error": {"message": "no such adapter"}}', {})) as double:
        found = one(texts(double.url), asked())
    assert "status 200 with an error: no such adapter" in str(found.detail)


def test_the_idle_share_is_of_the_time_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = server_session.Tally(2, started=10.0, _since=10.0)
    clock = iter((11.0, 14.0, 18.0))  # idle 1 s, one request 3 s, idle 4 s
    monkeypatch.setattr(server_session, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    tally.unfinished(1)
    tally.unfinished(0)
    found = tally.metrics()
    assert (found.seconds, found.idle_share, found.batch_occupancy) == (8.0, 5 / 8, 3 / 16)


@pytest.mark.parametrize(
    ("text", "headers"),
    [(" " * 4800 + "{}", {"X-Drips": "yes"}), ("{}", {"X-Drips-First": "HTTP/1.0 200 OK\r\nX: " + "a" * 1200})],
    ids=["text", "headers"],
)
def test_the_time_limit_is_for_the_whole_answer(text: str, headers: dict[str, str]) -> None:
    with judge_double((200, text, headers)) as double:  # for 60 s, with no pause as long as the limit
        found = one(texts(double.url, timeout_seconds=0.4, retries=0), asked())
    assert found.detail is not None and re.search(r"no answer in \d", found.detail)


def test_callers_that_come_together_share_one_loop() -> None:
    together = threading.Barrier(8)

    def ask(_: int) -> Any:
        together.wait()
        return endpoint._requests()

    endpoint._begun.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1

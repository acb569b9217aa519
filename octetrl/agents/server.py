"""The HTTP server of the captured policy, in a thread of the run's process.

    POST /v1/chat/completions  /v1/responses  /v1/messages[/count_tokens]    with the rollout's key
    POST /r/KEY/v1/...                            the same, for a program that has no place for a key
    GET  /v1/models

Bodies and answers are those of `octetrl serve`. A stream's events are sent when the whole answer is there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octetrl.agents.capture import CapturedPolicy, OpenRollout, SentBody
from octetrl.engine.stopping import decoder_of
from octetrl.environments.programs import POLICY
from octetrl.records import GenerationRequest
from octetrl.server.answers import Speller
from octetrl.server.app import ERROR_HANDLERS, key_of, read_body
from octetrl.server.endpoints import CLIENT_CLOSED_REQUEST, Served, chat, count_tokens, messages, responses
from octetrl.server.errors import ApiError, wrong
from octetrl.server.http_server import OncePerMinute, connection_limit, is_no_cancellation
from octetrl.server.intake import Answer, Intake
from octetrl.server.meters import Meters
from octetrl.server.prompts import Prompts
from octetrl.server.requests import ChatBody

MOST_BYTES = 32 << 20  # of a body
_MOST_REQUESTS = 1 << 15  # at once, each with a descriptor here, and one at the client that may be in this process too
IGNORED = (  # fields of a body that would change the policy
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_NO_METERS = cast(
    "Meters",
    SimpleNamespace(count_answer=lambda *_: None, first_token_seconds=SimpleNamespace(observe=lambda _: None)),
)


class AgentServer:
    """Serves the policy to programs from its creation to `close`.

    tokenizer: of the policy. variables, tool_format: as of `Prompts`. ends: stop tokens of the model.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        context_length: int,
        variables: Mapping[str, Any],
        tool_format: str,
        ends: Sequence[int],
        wake: Any,
    ) -> None:
        connection_limit(_MOST_REQUESTS)
        logging.getLogger("asyncio").addFilter(OncePerMinute())  # it logs each connection that finds no descriptor
        own = deepcopy(tokenizer)
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=2048)
        port = self._listening.getsockname()[1]
        spell = Speller(deepcopy(tokenizer))  # for the thread that tokenizes
        stops = {token for token in (own.eos_token_id, *ends) if token is not None}
        self.policy = CapturedPolicy(f"http://127.0.0.1:{port}", spell, stops, wake)
        self._prompts = Prompts(
            own,
            vocab_size=vocab_size,
            context_length=context_length,
            variables=variables,
            tool_format=tool_format,
            ends=tuple(stops),
        )
        self._context_length, self._decode, self._spell = context_length, decoder_of(own), Speller(own)
        paths = [
            *(("chat/completions", chat), ("responses", responses)),
            *(("messages", messages), ("messages/count_tokens", count_tokens)),
        ]
        routes = [
            Route(f"{prefix}/v1/{path}", self._endpoint(answers), methods=["POST"])
            for path, answers in paths
            for prefix in ("", "/r/{key}")
        ]
        routes += [Route(f"{prefix}/v1/models", _models) for prefix in ("", "/r/{key}")]
        app = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off", timeout_keep_alive=600)
        self._server = uvicorn.Server(config)
        logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(5.0)
        self._listening.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listening]))

    def _endpoint(self, answers: Any) -> Any:
        async def endpoint(request: Request) -> Response:
            key = request.path_params.get("key") or key_of(request)
            rollout = self.policy.find(key, request.headers.get("x-session-id", ""))
            try:
                body = await read_body(request, MOST_BYTES)
            except ClientDisconnect:  # a program that was ended
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            intake = _Intake(rollout, SentBody(body, request.headers))
            served = Served(
                POLICY,
                self._context_length,
                cast("Prompts", _Prompts(self._prompts, rollout)),
                cast("Intake", intake),
                _NO_METERS,
                self._decode,
                self._spell,
            )
            try:
                response: Response = await answers(request, _policy_body(body, rollout), served)
            except ApiError as error:
                if error.code == "context_length_exceeded":
                    rollout.hit_limit()
                raise
            return response

        return endpoint


class _Prompts:
    """`Prompts` whose chats keep the tokens that the rollout has recorded."""

    def __init__(self, prompts: Prompts, rollout: OpenRollout) -> None:
        self._shared, self._rollout = prompts, rollout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    async def of_chat(self, body: ChatBody) -> tuple[int, ...]:
        """A program may allow more tokens than the context has left: the engine's limit is the smaller of both."""
        unlimited = body.model_copy(update={"max_tokens": None, "max_completion_tokens": None})
        return await self._shared.of_chat(unlimited, self._rollout.tokens_of)


class _Intake:
    """The `Intake` of one HTTP request."""

    def __init__(self, rollout: OpenRollout, sent: SentBody) -> None:
        self._rollout, self._sent = rollout, sent

    def check_size(self, wanted: int) -> None:
        if wanted > self._rollout.max_calls:
            most = self._rollout.max_calls
            raise wrong(
                "n", f"n: {wanted} answers; a rollout has at most {most} (environment.turns.max_turns); ask for fewer"
            )

    def enter(self, requests: Sequence[GenerationRequest], *, streams: bool) -> Answer:
        answer = Answer(requests, cast("Intake", self))
        self._rollout.enter(requests, answer, self._sent)
        return answer

    def leave(self, answer: Answer) -> None:
        """A program that disconnects cancels nothing: its retry joins."""


def _policy_body(body: bytes, rollout: OpenRollout) -> bytes:
    """The body for the policy: any model's name is its name, and sampling is the recipe's."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body  # the endpoint says what is wrong
    if not isinstance(fields, dict):
        return body
    rollout.count("ignored_options", sum(fields.get(name) is not None for name in IGNORED))
    kept = {name: value for name, value in fields.items() if name not in IGNORED}
    return json.dumps({**kept, "model": POLICY}).encode()


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": POLICY, "object": "model", "owned_by": "octetrl"}]})

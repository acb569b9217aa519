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
import sys
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octetrl.agents.capture import CapturedPolicy, OpenRollout, SentBody
from octetrl.agents.prompts import MadePrompt
from octetrl.engine.stopping import decoder_of
from octetrl.environments.programs import POLICY
from octetrl.environments.tools.messages import to_message
from octetrl.records import Completion, GenerationRequest
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.server.answers import Speller
from octetrl.server.app import ERROR_HANDLERS, key_of, read_body
from octetrl.server.choices import read_answer
from octetrl.server.endpoints import CLIENT_CLOSED_REQUEST, Served, chat, count_tokens, messages, responses
from octetrl.server.errors import ApiError, wrong
from octetrl.server.http_server import OncePerMinute, connection_limit, is_no_cancellation
from octetrl.server.intake import Answer, Intake
from octetrl.server.meters import Meters
from octetrl.server.prompts import AskedChat, Prompts
from octetrl.server.requests import ChatBody, TokenizeBody
from octetrl.system.errors import error_line

MOST_BYTES = 32 << 20  # of a body
_SWITCH_SECONDS = 3e-4  # the thread that launches forwards waits at most so long for each of the server's
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
        stops = {token for token in (own.eos_token_id, *ends) if token is not None}
        self._prompts = Prompts(
            own,
            vocab_size=vocab_size,
            context_length=context_length,
            variables=variables,
            tool_format=tool_format,
            ends=tuple(stops),
        )
        self.policy = CapturedPolicy(
            f"http://127.0.0.1:{self._listening.getsockname()[1]}",
            ChatTokens(
                deepcopy(tokenizer),
                ends=stops,
                context_length=context_length,
                variables=variables,
                tool_format=self._prompts.tool_format,
            ),
            self._message_of,
            wake,
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
        self._switched = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        sys.setswitchinterval(self._switched)
        self._thread.join(5.0)
        self._listening.close()

    def _run(self) -> None:
        why = "it stopped"
        try:
            asyncio.run(self._server.serve(sockets=[self._listening]))
        except BaseException as error:  # SystemExit too, which is uvicorn's
            why = error_line(error)
        if not self._server.should_exit:
            self._listening.close()
            self.policy.end(f"the HTTP server of the agents ended: {why}")

    def _endpoint(self, answers: Any) -> Any:
        async def endpoint(request: Request) -> Response:
            key = request.path_params.get("key") or key_of(request)
            rollout = self.policy.find(key, request.headers.get("x-session-id", ""))
            try:
                body = await read_body(request, MOST_BYTES)
            except ClientDisconnect:  # a program that was ended
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            sent, fields = SentBody(body, request.headers), _policy_body(body, rollout)
            exchange = _Exchange(self._prompts, rollout, sent, fields)
            served = Served(
                POLICY,
                self._context_length,
                cast("Prompts", exchange),
                cast("Intake", exchange),
                _NO_METERS,
                self._decode,
                self._spell,
            )
            try:
                response: Response = await answers(
                    request, body if fields is None else json.dumps(fields).encode(), served
                )
            except ApiError as error:
                if error.code == "context_length_exceeded":
                    rollout.hit_limit()
                raise
            except Exception as error:  # whatever the program makes of it, it is no failure of the policy
                rollout.fail(f"the agents' server failed to answer: {error_line(error)}")
                raise ApiError(500, "the server failed to answer", code="internal_error") from error
            return response

        return endpoint

    def _message_of(
        self, completion: Completion, tools: Sequence[Any] | None, stops: Sequence[str]
    ) -> Mapping[str, Any]:
        form = self._prompts.tool_format
        if tools is None or form is None:
            return {"role": "assistant", "content": completion.text}
        return to_message(read_answer(completion, form, tools, self._prompts.call_text, stops))


class _Exchange:
    """One HTTP request: the `Prompts` that keep recorded tokens, and the `Intake` of the rollout."""

    def __init__(self, prompts: Prompts, rollout: OpenRollout, sent: SentBody, fields: dict[str, Any] | None) -> None:
        self._shared, self._rollout, self._sent = prompts, rollout, sent
        self._prompt: MadePrompt | None = None
        self._continues = None if fields is None else fields.pop("previous_response_id", None)
        self._has_instructions = fields is not None and fields.get("instructions") is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared, name)

    async def of_chat(self, body: ChatBody) -> tuple[int, ...]:
        """A program may allow more tokens than the context has left: the engine's limit is the smaller of both."""
        unlimited = body.model_copy(update={"max_tokens": None, "max_completion_tokens": None})
        return await self._shared.of_chat(unlimited, self._recorded)

    async def tokens_of(self, body: TokenizeBody) -> list[int]:
        return await self._shared.tokens_of(body, self._recorded)

    def _recorded(self, asked: AskedChat) -> tuple[int, ...]:
        own = int(self._has_instructions)  # they replace those of the earlier request
        earlier = self._rollout.earlier_messages(self._continues)
        whole = [*asked.messages[:own], *earlier, *asked.messages[own:]]
        self._prompt = self._rollout.prompt_of(replace(asked, messages=whole))
        return self._prompt.piece.all_tokens()

    def check_size(self, wanted: int) -> None:
        if wanted > self._rollout.max_calls:
            most = self._rollout.max_calls
            raise wrong(
                "n", f"n: {wanted} answers; a rollout has at most {most} (environment.turns.max_turns); ask for fewer"
            )

    def enter(self, requests: Sequence[GenerationRequest], *, streams: bool) -> Answer:
        assert self._prompt is not None, "its prompt was made before"
        answer = Answer(requests, cast("Intake", self))
        self._rollout.enter(requests, self._prompt, answer, self._sent, has_instructions=self._has_instructions)
        return answer

    def leave(self, answer: Answer) -> None:
        self._rollout.leave(answer)


def _policy_body(body: bytes, rollout: OpenRollout) -> dict[str, Any] | None:
    """The body for the policy: any model's name is its name, and sampling is the recipe's. None: it is no JSON object,
    as the endpoint will say."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    rollout.count("ignored_options", sum(fields.get(name) is not None for name in IGNORED))
    return {**{name: value for name, value in fields.items() if name not in IGNORED}, "model": POLICY}


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": POLICY, "object": "model", "owned_by": "octetrl"}]})

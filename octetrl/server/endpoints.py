"""/v1/completions, /v1/chat/completions, /v1/responses, /v1/messages: a body becomes requests, their results an answer.

    body -> prompt tokens -> `Answer` of the intake -> whole: one JSON object
                                                    -> stream: server-sent events, [DONE] at the end

A stream begins only after the engine has accepted the request, so a refused request gets an error status. A later
failure is an event with an `error`, and there is no [DONE] after it.

During an answer a task watches the connection. If the client disconnects, the answer is closed: its requests are
cancelled and their pages are freed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from octetrl.engine.stopping import TextDecoder, TextStream
from octetrl.records import GenerationRequest, SessionEvent
from octetrl.rollout.backend import seed_in_call
from octetrl.server.answers import ChatForm, CompletionForm, Echo, Form, Speller, Usage, event
from octetrl.server.choices import Choice, ChoicePiece
from octetrl.server.errors import ApiError
from octetrl.server.intake import Answer, ClientGone, Intake
from octetrl.server.messages import CountBody, MessageForm, MessagesBody
from octetrl.server.meters import Meters
from octetrl.server.prompts import Prompts, max_tokens_of
from octetrl.server.requests import (
    COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    grammar_of,
    parse_body,
)
from octetrl.server.responses import ResponseForm, ResponsesBody, renamed

Generation = TypeVar("Generation", bound=GenerationBody)
CLIENT_CLOSED_REQUEST = 499  # only for the metrics, because the client is gone


@dataclass(frozen=True, slots=True)
class Served:
    """The served model and the objects that serve it."""

    name: str
    context_length: int  # largest number of tokens of prompt and answer
    prompts: Prompts
    intake: Intake
    meters: Meters
    decode: TextDecoder  # decodes tokens to text, without special tokens
    spell: Speller


@dataclass(slots=True)
class Call:
    """One request, ready for the engine."""

    form: Form
    requests: list[GenerationRequest]
    choices: dict[tuple[str, int], Choice]  # by request id and sibling
    usage: Usage
    streams: bool
    shows_usage: bool

    def pieces(self, drawn: list[SessionEvent]) -> list[ChoicePiece]:
        for one in drawn:
            if one.details is not None and one.details.failure is not None:
                raise ApiError(500, f"the answer's grammar failed: {one.details.failure}", code="grammar_failed")
        pieces = [self.choices[one.request_id, one.sibling].take(one) for one in drawn]
        self.usage.completion_tokens += sum(len(piece.token_ids) for piece in pieces)
        return pieces


async def completions(http: Request, body: bytes, served: Served) -> Response:
    asked = _parsed(CompletionBody, body, served)
    prompts = await served.prompts.of_completion(asked)
    echoed = (
        None if not asked.echo else [_echoed(one, ids, served) for one, ids in zip(asked.prompts, prompts, strict=True)]
    )
    form = CompletionForm(
        served.name,
        served.spell,
        logprobs=asked.logprobs is not None,
        token_ids=asked.return_token_ids,
        prompts=prompts,
        num_siblings=asked.n,
        num_top=asked.num_top,
        prompt_top=asked.prompt_logprobs,
        echoed=echoed,
    )
    limit = asked.max_tokens
    return await _respond(http, _call(form, asked, served, COMPLETION_TOKENS if limit is None else limit), served)


async def chat(http: Request, body: bytes, served: Served) -> Response:
    asked = _parsed(ChatBody, body, served)
    prompt = await served.prompts.of_chat(asked)
    form = ChatForm(
        served.name,
        served.spell,
        logprobs=bool(asked.logprobs),
        token_ids=asked.return_token_ids,
        prompts=[prompt],
        num_siblings=asked.n,
        num_top=asked.num_top,
        prompt_top=asked.prompt_logprobs,
        call_ids=_call_ids(served),
    )
    limit = max_tokens_of(asked)
    return await _respond(http, _call(form, asked, served, limit), served)


async def responses(http: Request, body: bytes, served: Served) -> Response:
    asked = parse_body(ResponsesBody, body)
    _check_model(asked.model, served)
    try:
        chat = asked.chat
        prompt = await served.prompts.of_chat(chat)
        form = ResponseForm(asked, served.name, served.spell, prompt, _call_ids(served))
        call = _call(form, chat, served, asked.max_output_tokens)
    except ApiError as error:
        raise renamed(error) from error
    return await _respond(http, call, served)


async def messages(http: Request, body: bytes, served: Served) -> Response:
    asked = parse_body(MessagesBody, body)
    _check_model(asked.model, served)
    chat = asked.chat
    prompt = await served.prompts.of_chat(chat)
    form = MessageForm(served.name, served.spell, prompt, _call_ids(served))
    return await _respond(http, _call(form, chat, served, asked.max_tokens), served)


async def count_tokens(http: Request, body: bytes, served: Served) -> Response:
    asked = parse_body(CountBody, body)
    _check_model(asked.model, served)
    chat = parse_body(TokenizeBody, {"messages": asked.conversation, "tools": asked.functions or None})
    return JSONResponse({"input_tokens": len(await served.prompts.tokens_of(chat))})


def _call_ids(served: Served) -> str:
    return "any" if served.prompts.tool_format is None else served.prompts.tool_format.ids


async def tokenize(http: Request, body: bytes, served: Served) -> Response:
    """The tokens of a text or of a conversation, as the other endpoints would see them."""
    asked = parse_body(TokenizeBody, body)
    _check_model(asked.model, served)
    token_ids = await served.prompts.tokens_of(asked)
    answer: dict[str, Any] = {"count": len(token_ids), "max_model_len": served.context_length, "tokens": token_ids}
    if asked.return_token_strs:
        answer["token_strs"] = [served.spell.of_one(token) for token in token_ids]
    return JSONResponse(answer)


async def detokenize(http: Request, body: bytes, served: Served) -> Response:
    """The text of tokens, special tokens included."""
    asked = parse_body(DetokenizeBody, body)
    _check_model(asked.model, served)
    served.prompts.check_known(asked.tokens)
    return JSONResponse({"prompt": served.spell(tuple(asked.tokens))})


def _check_model(name: str | None, served: Served) -> None:
    if name is not None and name != served.name:
        message = f"there is no model {name!r}; this server has {served.name!r}"
        raise ApiError(404, message, code="model_not_found", param="model")


def _echoed(prompt: str | list[int], token_ids: tuple[int, ...], served: Served) -> Echo:
    """The prompt's text and where each of its tokens begins."""
    stream, offsets = TextStream(served.decode), [0]
    for token in token_ids:
        offsets.append(max(offsets[-1], len(stream.so_far())))
        stream.push(token)
    return Echo(prompt if isinstance(prompt, str) else stream.finish(), tuple(offsets[1:]))


def _parsed(kind: type[Generation], body: bytes, served: Served) -> Generation:
    asked = parse_body(kind, body)
    _check_model(asked.model, served)
    return asked


def _call(form: Form, asked: GenerationBody, served: Served, limit: int | None) -> Call:
    served.intake.check_size(len(form.prompts) * asked.n)  # before an object is made for each of them
    seed, tool_format = asked.drawn_seed(), None
    tools: list[Any] = []
    ends: tuple[int, ...] = ()
    if isinstance(asked, ChatBody) and asked.tool_schemas is not None:
        tool_format, ends = served.prompts.tool_format, served.prompts.call_ends
        tools = asked.tool_schemas or []
    grammar = grammar_of(asked, tool_format)
    requests, choices = [], {}
    for place, tokens in enumerate(form.prompts):
        room = served.prompts.room(tokens)
        sampling = asked.sampling(max(1, room if limit is None else min(limit, room)), grammar)
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *ends))
        name, prompt_seed = f"{form.id}/{place}", seed_in_call(seed, place)
        request = GenerationRequest(name, tokens, sampling, num_siblings=asked.n, seed=prompt_seed)
        requests.append(request)
        for sibling in range(asked.n):
            choices[request.id, sibling] = Choice(
                place * asked.n + sibling,
                decode=served.decode,
                stops=sampling.stop,
                tool_format=tool_format,
                tools=tools,
                call_text=None if tool_format is None else served.prompts.call_text,
                logprobs=form.logprobs,
                empty=limit == 0,
            )
    usage = Usage(sum(map(len, form.prompts)))
    return Call(form, requests, choices, usage, asked.stream, asked.include_usage)


async def _respond(http: Request, call: Call, served: Served) -> Response:
    answer = served.intake.enter(call.requests, streams=call.streams)
    listener = asyncio.create_task(_listen(http, answer))
    begun = time.perf_counter()

    def close() -> None:
        answer.close()
        listener.cancel()
        served.meters.count_answer(call.usage.prompt_tokens, call.usage.completion_tokens, time.perf_counter() - begun)

    try:
        await answer.accepted()
        if call.streams:
            events = _events(call, answer, served.meters, begun, close)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        pieces = [piece async for batch in answer.drawn() for piece in call.pieces(batch)]
    except ClientGone:
        close()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except BaseException:
        close()
        raise
    close()
    return JSONResponse(call.form.whole(sorted(pieces, key=lambda piece: piece.index), call.usage))


async def _events(
    call: Call, answer: Answer, meters: Meters, begun: float, close: Callable[[], None]
) -> AsyncIterator[str]:
    """The chunks of a stream that was admitted at `begun`."""

    def spelled(bodies: list[dict[str, Any]]) -> str:
        return "".join(event({**body, "usage": None} if call.shows_usage else body) for body in bodies)

    waits = True
    try:
        if opening := call.form.opening(len(call.choices)):
            yield spelled(opening)
        async for batch in answer.drawn():
            if waits:
                meters.first_token_seconds.observe(time.perf_counter() - begun)
                waits = False
            chunks = [chunk for piece in call.pieces(batch) for chunk in call.form.chunks(piece)]
            if chunks:
                yield spelled(chunks)
        yield call.form.closing(call.usage, shows_usage=call.shows_usage)
    except ApiError as error:
        yield event(error.body)
    except ClientGone:
        return
    finally:
        close()


async def _listen(http: Request, answer: Answer) -> None:
    """Close the answer when the client disconnects. The body was read, so no other message can arrive."""
    with suppress(asyncio.CancelledError):
        while (await http.receive())["type"] != "http.disconnect":
            pass
        answer.put(ClientGone())
        answer.close()

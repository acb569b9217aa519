"""Answers of a server's model to given prompts, as they come: `octetrl generate NAME --base-url URL`.

A prompt is a user's message or a list of messages; the server applies its own chat template. Only text travels, so any
server with OpenAI's API will do, and no tokenizer is needed here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from octetrl.backends.openai.backend import OpenaiBackend
from octetrl.backends.openai.text import CharacterTokenizer
from octetrl.config.schema import OpenaiConfig
from octetrl.records import Completion, GenerationProgress, GenerationRequest, SamplingParams
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.converse import seed_in_call
from octetrl.telemetry.console import Console

Prompt = str | Sequence[Mapping[str, str]]


def generate_by_server(
    config: OpenaiConfig,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    n: Sequence[int],
    seed: int = 0,
    plain: bool = False,
) -> Iterator[list[Completion]]:
    """The `n` completions of each prompt, in the order of the prompts, as soon as they and those before them are there.

    One that the server did not answer has `finish_reason` FAILED. plain: without a chat template. Raises UserError."""
    chat = ChatTokens(CharacterTokenizer())
    console = Console("auto", total_steps=0, out=sys.stderr)
    with closing(OpenaiBackend.of_text(config)) as backend, console.phase("generate") as show:

        def on_progress(progress: GenerationProgress) -> None:
            show(progress.done, progress.total, progress.generated_tokens, None)

        found: list[dict[int, Completion]] = [{} for _ in prompts]
        with backend.session(on_progress) as session:
            for place, (prompt, siblings) in enumerate(zip(prompts, n, strict=True)):
                tokens = chat.tokens_of(prompt, plain=plain)
                request = GenerationRequest(f"prompt {place}", tokens, sampling, siblings, seed_in_call(seed, place))
                session.accept(session.checked(request))
            for place, siblings in enumerate(n):
                while len(found[place]) < siblings:
                    for sequence, completion in session.advance():
                        found[sequence.group.index][sequence.sibling] = completion
                yield [found[place].pop(sibling) for sibling in range(siblings)]

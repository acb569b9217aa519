"""`octetrl generate`: completions of one or several prompts, given as options or as rows (`--input FILE`, `-`: stdin).

    {"prompt": "1 + 1 ="}                                     in: the user's message, or the text itself with --plain
    {"messages": [{"role": "user", "content": "Hi"}]}         in: a conversation that the model continues
    {"prompt": ..., "tools": [...]}                           in: what else a row of a dataset has for the template
    {"prompt": "1 + 1 =", "n": 4}                             in: 4 completions of this row, whatever --n says
    {"prompt": ..., "sample": 0, "completion": ..., "finish_reason": "stop", "tokens": 7}     out, for each completion
    {"prompt": ..., "answer": ...} or {"messages": [...]}     out with --for-sft, as algorithm.conversations reads it

All other keys of a row are written to its lines unchanged; its own value of a key that we write becomes `own_KEY`. A
completion that a server did not give has finish_reason "failed" and the reason as `error`. With --for-sft only answers
that ended and have a text are written, and a row's own `answer`, the reference of a task, becomes `reference`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from octetrl.cli.arguments import Address, ChatTemplate, ChosenPrecision, Cpus, Device, Gpus, cluster_section
from octetrl.cli.output import loading_pytorch
from octetrl.config.limits import MOST_COMPLETIONS, MOST_TEMPERATURE
from octetrl.config.rules_running import openai_problems
from octetrl.config.schema import OpenaiConfig
from octetrl.data.conversations import VARIABLES
from octetrl.data.rows import read_jsonl
from octetrl.data.tasks import row_prompt
from octetrl.environments.prompts import read_tools, read_variables
from octetrl.records import Completion, FinishReason, SamplingParams, Task
from octetrl.run.model_source import refuse_no_model
from octetrl.shapes.spec import MOST_TOKENS
from octetrl.system.errors import UserError
from octetrl.system.json_file import parse_json
from octetrl.system.text import counted

Input = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="FILE",
        help="JSON lines with prompt or messages, and n; - reads standard input. Completions are JSON lines too.",
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run folder, RUN@STEP, RUN@best, a checkpoint, a Hugging Face folder or a name of the hub; with"
        " --base-url the server's name of it.",
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", "-p", help="The user's message; may be given several times.", show_default=False),
]
TopP = Annotated[float, typer.Option(max=1.0, help="Sample from the likeliest tokens with this total probability.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample from this many of the likeliest tokens; 0: all.")]
MinP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Sample from tokens with at least this share of the top probability.")
]
Count = Annotated[int, typer.Option("--n", "-n", min=1, max=MOST_COMPLETIONS, help="Completions of each prompt.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends a completion; may be given several times.")]
Seed = Annotated[int, typer.Option(min=0, max=(1 << 64) - 1, help="The same seed gives the same text.")]
ForSft = Annotated[
    bool,
    typer.Option(
        "--for-sft",
        help="With --input: lines that algorithm.conversations reads. Truncated and failed answers are left out.",
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_TOKENS,
        help="Largest number of tokens in a completion. Default: 256, or as many as the model's positions leave.",
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, max=MOST_TEMPERATURE, help="0 is greedy.")]
Plain = Annotated[bool, typer.Option("--plain", help="Continue each prompt without the chat template.")]
BaseUrl = Annotated[
    str | None,
    typer.Option(
        "--base-url",
        metavar="URL",
        help="Ask the server with OpenAI's API at this address, such as http://localhost:8000/v1.",
        show_default=False,
    ),
]
ApiKeyVariable = Annotated[
    str | None,
    typer.Option(
        "--api-key-variable",
        metavar="NAME",
        help="With --base-url: the environment variable that holds the key, such as OPENAI_API_KEY.",
        show_default=False,
    ),
]
InFlight = Annotated[
    int | None,
    typer.Option(
        "--in-flight",
        min=1,
        max=4096,
        help="With --base-url: number of requests at once. Default: 64.",
        show_default=False,
    ),
]
OPTIONS = {  # what a message calls a setting of a recipe: how this command spells it
    "engine.openai.base_url": "--base-url",
    "engine.openai.api_key_variable": "--api-key-variable",
    "engine.openai.model": "MODEL",
    "engine.openai: ": "--base-url: ",
    "rollout.max_new_tokens": "--max-new-tokens",
}
STDIN = "-"
REMEDY = 'a line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
OURS = ("sample", "completion", "finish_reason", "tokens", "error")
Row = dict[str, Any]


def generate(
    model: Model,
    prompt: Prompts = None,
    rows: Input = None,
    for_sft: ForSft = False,
    plain: Plain = False,
    chat_template: ChatTemplate = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    stop: Stop = None,
    seed: Seed = 0,
    n: Count = 1,
    precision: ChosenPrecision = None,
    device: Device = "auto",
    gpus: Gpus = None,
    cpus: Cpus = None,
    address: Address = None,
    base_url: BaseUrl = None,
    api_key_variable: ApiKeyVariable = None,
    in_flight: InFlight = None,
) -> None:
    """Generate text from a model or a run."""
    sampling = SamplingParams(
        max_new_tokens=256 if max_new_tokens is None else max_new_tokens,
        temperature=_finite("--temperature", temperature),
        top_k=top_k,
        top_p=_finite("--top-p", top_p),
        min_p=_finite("--min-p", min_p),
        stop=tuple(stop or ()),
    )
    _check(sampling)
    read = _asked(prompt, rows, for_sft=for_sft, plain=plain)
    given, prompts = [row for row, _ in read], [task for _, task in read]
    counts = [int(row.get("n", n)) for row in given]
    cluster = cluster_section(device, gpus, cpus, address)
    if base_url is None:
        refuse_of_server(api_key_variable, in_flight)
        refuse_no_model(model)
        with loading_pytorch():
            from octetrl.run.generate import generate_text

        answers: Iterable[Sequence[Completion]] = generate_text(
            model, prompts, sampling, precision=precision, cluster=cluster, seed=seed, n=counts, plain=plain,
            chat_template=chat_template, shows_progress=True, fits=max_new_tokens is None,
        )  # fmt: skip
    else:
        refuse_local(precision, chat_template, cluster)
        server = server_config(model, base_url, api_key_variable, in_flight)
        from octetrl.run.generate import generate_by_server

        drawn = generate_by_server(server, prompts, sampling, n=counts, seed=seed, plain=plain)
        answers = spelled_as_options(drawn)
    show_answers(given, answers, as_rows=rows is not None, for_sft=for_sft)


def _asked(prompts: Sequence[str] | None, rows: str | None, *, for_sft: bool, plain: bool) -> list[tuple[Row, Task]]:
    """The rows to answer, and their prompts. Raises UserError."""
    if bool(prompts) == (rows is not None):
        raise UserError(
            "generate: give prompts by --prompt, or JSON lines by --input FILE; --input - reads them from a pipe"
        )
    if for_sft and (rows is None or plain):
        raise UserError("--for-sft: it writes the lines of --input with their answers, as the chat template has them")
    if rows is not None:
        return read_rows(rows, plain=plain)
    return [({"prompt": text}, Task("", text)) for text in prompts or []]


def _check(sampling: SamplingParams) -> None:
    if sampling.top_p <= 0:
        raise UserError(f"--top-p: {sampling.top_p:g} would keep no token; give a number above 0 and at most 1")
    if "" in sampling.stop:
        raise UserError("--stop: an empty text would stop every completion at once; leave it out")


def _finite(option: str, value: float) -> float:
    if not math.isfinite(value):
        raise UserError(f"{option}: {value} is not a finite number")
    return value


def server_config(model: str, base_url: str, api_key_variable: str | None, in_flight: int | None) -> OpenaiConfig:
    """The server's settings. Raises UserError."""
    if not model.strip():
        raise UserError("generate: MODEL is empty; with --base-url it is the model's name at the server")
    config = OpenaiConfig(
        base_url=base_url,
        model=model,
        answers="text",
        api_key_variable=api_key_variable,
        concurrency=in_flight or OpenaiConfig.model_fields["concurrency"].default,
    )
    for problem in openai_problems(config):
        raise UserError(_spelled(problem.text))
    return config


def spelled_as_options(answers: Iterable[Sequence[Completion]]) -> Iterator[list[Completion]]:
    """The same answers; failures and errors name this command's options instead of a recipe's fields."""
    try:
        for siblings in answers:
            yield [
                answer if answer.detail is None else replace(answer, detail=_spelled(answer.detail))
                for answer in siblings
            ]
    except UserError as error:
        raise UserError(_spelled(str(error))) from None


def _spelled(text: str) -> str:
    for field, option in OPTIONS.items():
        text = text.replace(field, option)
    return text


def refuse_local(precision: str | None, chat_template: str | None, cluster: Mapping[str, Any]) -> None:
    """Raise UserError for options of a model that is loaded here."""
    given = {
        "--precision": precision,
        "--chat-template": chat_template,
        **{f"--{name}": value for name, value in cluster.items() if value != "auto"},
    }
    for name, value in given.items():
        if value is not None:
            raise UserError(f"{name}: with --base-url no model is loaded here; leave it out")


def refuse_of_server(api_key_variable: str | None, in_flight: int | None) -> None:
    """Raise UserError for options of a server where none is named."""
    for name, value in (("--api-key-variable", api_key_variable), ("--in-flight", in_flight)):
        if value is not None:
            raise UserError(f"{name}: it is for a server; give its address as --base-url, or leave it out")


def read_rows(path: str, *, plain: bool = False) -> list[tuple[Row, Task]]:
    """The rows of a JSONL file, or of standard input for `-`, and their prompts. Raises UserError for a line of another
    form, and with `plain` for what only a chat template reads."""
    lines = _stdin_rows() if path == STDIN else ((f"{path}:{number}", row) for number, row in read_jsonl(path))
    rows = [(row, task_of(_checked(row, where), where)) for where, row in lines]
    for _, task in rows:
        if plain and (task.tools or task.chat_template_kwargs):
            raise UserError(f"{task.id}: with --plain nobody reads its 'tools' and '{VARIABLES}'; leave --plain out")
    if not rows:
        raise UserError(f"--input: there are no lines; {REMEDY}")
    return rows


def task_of(row: Row, where: str) -> Task:
    """The prompt of a row with its tools and variables of the chat template, as a dataset's row may have them."""
    return Task(
        where,
        row_prompt(row, where),
        tools=read_tools(row.get("tools"), f"{where}: 'tools'"),
        chat_template_kwargs=read_variables(row.get(VARIABLES), f"{where}: '{VARIABLES}'"),
    )


def result_lines(rows: Sequence[Row], completions: Sequence[Sequence[Completion]]) -> Iterator[str]:
    """A JSON line for each completion, in the order of the rows."""
    for row, siblings in zip(rows, completions, strict=True):
        for sample, completion in enumerate(siblings):
            values = (sample, completion.text, str(completion.finish_reason), len(completion.token_ids))
            error = {} if completion.detail is None else {"error": completion.detail}
            kept = _renamed(row, {key: f"own_{key}" for key in OURS})
            yield json.dumps(kept | dict(zip(OURS, values, strict=False)) | error, ensure_ascii=False)


def is_empty(completion: Completion) -> bool:
    """Whether it ended without a text, from which nothing can be learnt."""
    return completion.finish_reason is FinishReason.STOP and not completion.text.strip()


def conversation_lines(rows: Sequence[Row], completions: Sequence[Sequence[Completion]]) -> Iterator[str]:
    """A JSON line for each completion that ended and has a text, with the prompt, for `algorithm.conversations`."""
    for row, siblings in zip(rows, completions, strict=True):
        kept = _renamed({key: value for key, value in row.items() if key != "n"}, {"answer": "reference"})
        for completion in siblings:
            if completion.finish_reason is not FinishReason.STOP or is_empty(completion):
                continue
            if "prompt" in kept and not (isinstance(kept["prompt"], str) and kept.get("tools")):
                said: Row = {"prompt": kept["prompt"], "answer": completion.text}
            else:  # which SFT reads tools beside
                asked = kept.get("messages") or [{"role": "user", "content": kept["prompt"]}]
                asked = asked[:-1] if asked[-1]["role"] == "assistant" else asked
                said = {"messages": [*asked, {"role": "assistant", "content": completion.text}]}
            rest = {key: value for key, value in kept.items() if key != "prompt" or "prompt" in said}
            yield json.dumps(rest | said, ensure_ascii=False)


def _renamed(row: Row, names: Mapping[str, str]) -> Row:
    """The row with other names for some keys; a name that the row has already is preceded by `own_`."""
    kept = {key: value for key, value in row.items() if key not in names}
    for key, name in names.items():
        if key in row:
            while name in kept or name in names:
                name = f"own_{name}"
            kept[name] = row[key]
    return kept


def _stdin_rows() -> Iterator[tuple[str, Any]]:
    for number, text in enumerate(sys.stdin, start=1):
        line = text.removeprefix("\ufeff") if number == 1 else text  # a byte-order mark, as in a file
        if line.strip():
            where = f"standard input, line {number}"
            yield where, parse_json(line, where, REMEDY)


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise UserError(f"{where}: it needs either 'prompt' or 'messages'; {REMEDY}")
    if "n" in row and (not isinstance(row["n"], int) or isinstance(row["n"], bool) or row["n"] < 1):
        raise UserError(
            f"{where}: 'n' is {json.dumps(row['n'])}, a whole number from 1 is needed; it is how often to"
            " complete this row"
        )
    if row.get("n", 1) > MOST_COMPLETIONS:
        raise UserError(
            f"{where}: 'n' is out of range; it must be at most {MOST_COMPLETIONS:,}, or write the row several times"
        )
    return row


def show_answers(
    rows: Sequence[Row], answers: Iterable[Sequence[Completion]], *, as_rows: bool, for_sft: bool = False
) -> None:
    """Print the answers to each row, in order. JSON lines are printed as soon as they are there.

    Ends with exit code 1 if the server did not answer some of them, after all others are printed, and if for_sft leaves
    no line."""
    if not as_rows:
        every = list(answers)
        for completion in (completion for siblings in every for completion in siblings):
            if completion.finish_reason is FinishReason.FAILED:
                raise UserError(f"generate: the server did not answer: {completion.detail}")
        typer.echo(completions_text(every))
        return
    drawn: list[FinishReason] = []
    empty = 0
    last_failure: str | None = None
    for row, siblings in zip(rows, answers, strict=True):
        for line in (conversation_lines if for_sft else result_lines)([row], [siblings]):
            typer.echo(line)
        drawn += [completion.finish_reason for completion in siblings]
        empty += sum(map(is_empty, siblings))
        last_failure = next(
            (completion.detail for completion in siblings[::-1] if completion.detail is not None), last_failure
        )
    failed, cut = drawn.count(FinishReason.FAILED), drawn.count(FinishReason.LENGTH)
    if for_sft and cut:
        typer.echo(f"{cut} of {len(drawn)} answers were truncated and are left out; raise --max-new-tokens", err=True)
    if for_sft and empty:
        typer.echo(f"{empty} of {len(drawn)} answers were empty and are left out", err=True)
    if failed:
        where = "are left out" if for_sft else 'have finish_reason "failed" and the reason as error'
        lost = f"{failed} of {len(drawn)} requests failed; they {where}; the last: {last_failure}"
        typer.echo(f"octetrl: {UserError(lost)}", err=True)
    if failed or (for_sft and cut + empty == len(drawn)):
        raise typer.Exit(1)


def completions_text(completions: Sequence[Sequence[Completion]]) -> str:
    """A single completion without a heading, for pipes. Several completions each have a line with prompt and number."""
    if len(completions) == 1 and len(completions[0]) == 1:
        return completions[0][0].text
    blocks = [
        f"--- prompt {which + 1}, completion {sibling + 1}: {counted(len(completion.token_ids), 'token')},"
        f" {completion.finish_reason}\n{completion.text}"
        for which, siblings in enumerate(completions)
        for sibling, completion in enumerate(siblings)
    ]
    return "\n".join(blocks)

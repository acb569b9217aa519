"""Measures a trained model under every precision: its perplexity, and the engine's log-probs against the trainer's.

    python -m lab.quality [--sft-steps 350] [--seed 0]

A model of 126 million parameters is trained once, in BF16, on documents: worked sums, one after another, of 2,000
tokens and more. Then each precision starts from the same weights:

    perplexity   of held-out documents, by the weights, codes and cache formats that the rollout reads
                 |perplexity / BF16's - 1| < 1%
    mismatch     the engine samples 16 x 2 sequences of 2,000 tokens; its log-probs g and the trainer's p of these
                 tokens: mean exp|g - p| < 1.03 and mean exp(p - g) - (p - g) - 1 < 1e-3

In `fp8_rollout` engine and trainer differ by design, so the second limit does not apply. KV scales are calibrated on
documents of the training set. The error of the relative perplexity is the standard error of the mean of the paired
differences. If a limit is not met, the exit status is 1. Needs a Hopper GPU; `--tiny` runs on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lab.precisions import model_shape, recipe_tree, sft_tree
from lab.record import RESULTS, need_hopper, write_result
from octetrl.algorithms.table import build_algorithm
from octetrl.config.load import recipe_from_mapping
from octetrl.config.schema import Recipe
from octetrl.data.conversations import Conversation
from octetrl.data.tokenizer import Tokenizer, load_tokenizer
from octetrl.environments.base import Taskset
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext
from octetrl.models.decoder import Decoder
from octetrl.records import GenerationRequest, Sample, SamplingParams, Task
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.run.demo import BARE_SHARE, bare_answer, make_model_and_examples, worked_answer
from octetrl.run.device import resolve_device
from octetrl.run.environment import build_environment
from octetrl.run.export import export_run
from octetrl.run.loop import train
from octetrl.telemetry.mismatch import mismatch_metrics
from octetrl.trainer.packing import pack
from octetrl.workers.build import fill_weights
from octetrl.workers.model_shape import model_spec
from octetrl.workers.worker import Worker, own_engine

Row = dict[str, object]
PERPLEXITY_LIMIT = 0.01
TOKEN_ERROR_LIMIT = 1.03
GEN_KL_LIMIT = 1e-3
ARMS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp8_rollout": {"precision": "fp8_rollout"},
    "fp8": {"precision": "fp8"},
    "fp8_full": {"precision": "fp8_full"},
    "fp8_full_dynamic": {"precision": "fp8_full", "fp8": {"kv_cache": "dynamic"}},
}
MARGIN = 8  # tokens of a document's own: template, EOS, merges across lines
MIXED = ("fp8_rollout",)  # engine and trainer differ by design
COLUMNS = {
    "perplexity": ".5f",
    "perplexity/relative": "+.3%",
    "perplexity/relative_error": ".3%",
    "mismatch/token_mult_prob_error": ".6f",
    "mismatch/gen_kl": ".2e",
    "mismatch/max_abs_diff": ".2e",
    "mismatch/equal_fraction": ".4f",
    "fp8/kv_saturation": ".2e",
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is learnt and looked at."""

    tokens: int  # of a held-out document, and of a generated sequence with its prompt
    sums: int  # to learn
    batch: int  # documents of an SFT step
    held_out: int  # documents
    prompts: int
    siblings: int
    prompt_tokens: int  # of the shortest prompt; each further one is a token longer
    calibration: int  # documents

    @property
    def context_length(self) -> int:
        """Documents are made a little longer than what is looked at, and cut."""
        return self.tokens + self.tokens // 4

    @property
    def held_out_sums(self) -> int:
        """More than the held-out documents take."""
        return self.held_out * self.context_length // 15


FULL = Size(tokens=2000, sums=100_000, batch=16, held_out=32, prompts=16, siblings=2, prompt_tokens=100, calibration=16)
TINY = Size(tokens=200, sums=15_000, batch=8, held_out=8, prompts=4, siblings=2, prompt_tokens=40, calibration=4)


@dataclass(frozen=True, slots=True)
class Documents:
    """What is put to every precision, in tokens."""

    held_out: list[Sample]
    calibration: list[tuple[int, ...]]


# ---------------------------------------------------------------- the model and its documents


def quality_tree(folder: Path, arguments: argparse.Namespace, size: Size, arm: str) -> dict[str, Any]:
    """The recipe of one precision's engine and trainer."""
    tree = recipe_tree(folder, arguments, ARMS[arm]["precision"], arguments.seed) | ARMS[arm]
    tree["model"]["context_length"] = size.context_length
    return tree


def trained_model(folder: Path, arguments: argparse.Namespace, size: Size) -> Documents:
    """Leaves the model at `folder/start`."""
    tree = sft_tree(folder, arguments)
    tree["model"]["context_length"] = size.context_length
    tree["algorithm"]["batch_size"] = size.batch
    tree["trainer"]["tokens_per_micro_batch"] = size.batch * size.context_length
    tree["seed"] = arguments.seed
    recipe = recipe_from_mapping(tree)
    make_model_and_examples(recipe, model_shape(arguments))
    chat = ChatTokens(load_tokenizer(folder / "random"))
    learnt, unseen = (chained(sums, chat, size.context_length - MARGIN) for sums in worked_sums(recipe, size))
    assert len(unseen) >= size.held_out, f"the held-out sums make {len(unseen)} documents of {size.held_out}"
    examples = "".join(json.dumps({"prompt": one.prompt, "answer": one.answer}) + "\n" for one in learnt)
    Path(recipe.sources["conversations"].path).write_text(examples)
    print(f"{len(learnt)} documents to learn from, {arguments.sft_steps} steps of {size.batch}", flush=True)
    documents = Documents(
        held_out=[cut(sample_of(document, chat), size.tokens) for document in unseen[: size.held_out]],
        calibration=[sample_of(document, chat).token_ids for document in learnt[: size.calibration]],
    )
    train(recipe)
    export_run(recipe.output_dir, str(folder / "start"))
    return documents


def worked_sums(recipe: Recipe, size: Size) -> tuple[list[Conversation], list[Conversation]]:
    """Sums to learn and sums held out; answered with and without the steps in the demo's proportion."""
    config = recipe.environment.model_copy(update={"train_size": size.sums, "eval_size": size.held_out_sums})
    taskset = Taskset(build_environment(config).tasks, eval_size=config.eval_size, seed=config.seed)
    chance = random.Random(recipe.seed)

    def answered(tasks: Sequence[Task]) -> list[Conversation]:
        bare = [chance.random() < BARE_SHARE for _ in tasks]
        answers = [bare_answer(task) if one else worked_answer(task) for task, one in zip(tasks, bare, strict=True)]
        return [Conversation(task.prompt, answer) for task, answer in zip(tasks, answers, strict=True)]

    return answered(taskset.next_batch(size.sums)), answered(taskset.held_out())


def sample_of(document: Conversation, chat: ChatTokens) -> Sample:
    (sample,) = document.tokenized(chat).samples
    return sample


def cut(sample: Sample, tokens: int) -> Sample:
    """Its first `tokens` tokens."""
    assert len(sample.token_ids) >= tokens, f"a document has {len(sample.token_ids)} tokens of {tokens}"
    return replace(sample, token_ids=sample.token_ids[:tokens], loss_mask=sample.loss_mask[:tokens])


def chained(sums: Iterable[Conversation], chat: ChatTokens, room: int) -> list[Conversation]:
    """Documents of about `room` tokens, or less by a sum: a sum and its answer, then the next, a line each. What is
    left over at the end makes none."""
    documents: list[Conversation] = []
    chosen: list[Conversation] = []
    length = 0
    for one in sums:
        more = len(chat.answer_tokens(line_of(one))) - 1  # without the EOS
        if chosen and length + more > room:
            documents.append(document_of(chosen))
            chosen, length = [], 0
        chosen.append(one)
        length += more
    return documents


def document_of(sums: Sequence[Conversation]) -> Conversation:
    """The first sum asks, the rest is the answer."""
    first, *rest = sums
    return Conversation(first.prompt, f"{first.answer}\n" + "".join(line_of(one) for one in rest))


def line_of(one: Conversation) -> str:
    return f"{one.prompt} {one.answer}\n"


# ---------------------------------------------------------------- one precision


def build_worker(recipe: Recipe, tokenizer: Tokenizer) -> Worker:
    """Engine and trainer of one precision, their FP8 weights the same codes."""
    spec = model_spec(recipe)
    return Worker(
        recipe,
        spec=spec,
        policy=precision_policy(spec, recipe.fp8),
        tokenizer=tokenizer,
        algorithm=build_algorithm(recipe.algorithm),
        load_weights=lambda model, loading: fill_weights(model, recipe, loading),
        device=resolve_device(recipe.cluster),
        trains=False,
    )


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probs of N tokens by a packed forward, with the arguments of `mismatch_metrics`; on the CPU."""

    logprobs_N: Tensor
    generator_N: Tensor | None
    positions_N: Tensor
    lengths_N: Tensor


@torch.no_grad()
def score(worker: Worker, model: Decoder, samples: Sequence[Sample]) -> Scored:
    """Log-probs of the samples' trained tokens under `model`, which sees K and V as the rollout's cache has them."""
    scales = worker.kv_scales
    parts: list[Tensor] = []
    (minibatch,) = pack(samples, worker.layout, "token").minibatches
    for micro_batch in minibatch:
        context = PackedContext(
            cu_seqlens_B1=micro_batch.cu_seqlens_B1.to(worker.device),
            max_seqlen=micro_batch.max_seqlen,
            kv_mode=worker.policy.kv_mode,
            kv_scale_LS=None if scales is None else scales.scale_LS,
        )
        ids_T, positions_T = micro_batch.token_ids_T.to(worker.device), micro_batch.positions_T.to(worker.device)
        hidden_NE = model(ids_T, positions_T, context).index_select(0, micro_batch.predictor_N.to(worker.device))
        parts.append(model.logprobs(hidden_NE, micro_batch.targets_N.to(worker.device))[0].cpu())
    drawn = [one.generator_logprobs_N for one in minibatch if one.generator_logprobs_N is not None]
    return Scored(
        logprobs_N=torch.cat(parts),
        generator_N=torch.cat(drawn) if drawn else None,
        positions_N=torch.cat([one.target_positions_N for one in minibatch]),
        lengths_N=torch.cat([one.sequence_lengths_N for one in minibatch]),
    )


def draw(worker: Worker, documents: Documents, size: Size, seed: int) -> list[Sample]:
    """Sequences of `size.tokens` tokens that the engine continued from the beginnings of held-out documents."""
    requests = []
    for index, document in enumerate(documents.held_out[: size.prompts]):
        prompt = document.token_ids[: size.prompt_tokens + index]
        sampling = SamplingParams(max_new_tokens=size.tokens - len(prompt), ignore_eos=True)
        requests.append(GenerationRequest(f"document {index}", prompt, sampling, size.siblings, seed + index))
    samples = []
    for request, completions in zip(requests, worker.generate(requests), strict=True):
        prompt = request.prompt_token_ids
        for drawn in completions:
            assert len(prompt) + len(drawn.token_ids) == size.tokens, "an answer ended before its length"
            samples.append(
                Sample(
                    token_ids=prompt + drawn.token_ids,
                    loss_mask=(False,) * len(prompt) + (True,) * len(drawn.token_ids),
                    generator_logprobs=(0.0,) * len(prompt) + drawn.logprobs,
                    advantage=0.0,
                    policy_version=drawn.policy_version,
                    precision_digest=drawn.precision_digest,
                )
            )
    return samples


def measure(recipe: Recipe, arm: str, documents: Documents, size: Size) -> tuple[Row, Tensor]:
    """The row of one precision, and the log-prob of every token of the held-out documents."""
    worker = build_worker(recipe, load_tokenizer(str(recipe.model.path)))
    if worker.needs_calibration:
        worker.calibrate(documents.calibration)
    read = score(worker, worker.engine_model, documents.held_out).logprobs_N.double()
    samples = draw(worker, documents, size, recipe.seed)
    metrics = own_engine(worker).metrics
    worker.engine.sleep()
    scored = score(worker, worker.trainer_model, samples)
    assert metrics is not None and scored.generator_N is not None, "the engine said nothing of its call"
    row: Row = {
        "precision": arm,
        "workload": f"{len(samples)}x{size.tokens}",
        "parameters": worker.spec.num_parameters,
        "perplexity": math.exp(-float(read.mean())),
        "perplexity/tokens": read.numel(),
        "mismatch/tokens": scored.logprobs_N.numel(),
        **mismatch_metrics(scored.generator_N, scored.logprobs_N, scored.positions_N, scored.lengths_N),
        "rollout/non_finite_tokens": metrics.non_finite_tokens,
    }
    if worker.policy.kv_mode == "calibrated":
        row["fp8/kv_saturation"] = metrics.kv_saturation
    return row, read


# ---------------------------------------------------------------- limits and the table


def compare(row: Row, logprobs_N: Tensor, plain_N: Tensor) -> None:
    """Puts the distance of a precision's perplexity from BF16's into its row, with its standard error."""
    difference_N = plain_N - logprobs_N
    row["perplexity/relative"] = math.expm1(float(difference_N.mean()))
    row["perplexity/relative_error"] = float(difference_N.std()) / math.sqrt(difference_N.numel())


def failures(row: Row, *, tiny: bool) -> list[str]:
    """The limits that a row does not meet; NaN meets none. A tiny model's perplexity has none: it suffers more."""
    limits = {} if tiny else {"perplexity/relative": PERPLEXITY_LIMIT}
    if row["precision"] not in MIXED:
        limits |= {"mismatch/token_mult_prob_error": TOKEN_ERROR_LIMIT, "mismatch/gen_kl": GEN_KL_LIMIT}
    return [
        f"{row['precision']}: {name} is {row[name]}, the limit is {limit}"
        for name, limit in limits.items()
        if not abs(float(str(row[name]))) < limit
    ]


def show(rows: Sequence[Row]) -> None:
    table = Table(title="One model under five precisions: perplexity, and engine against trainer")
    for name in ("precision", *COLUMNS, "limits"):
        table.add_column(name.removeprefix("mismatch/").removeprefix("perplexity/"))
    for row in rows:
        cells = [format(row[name], form) if name in row else "" for name, form in COLUMNS.items()]
        table.add_row(str(row["precision"]), *cells, str(row["limits"]))
    Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft-steps", type=int, default=350)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="the demo's model and short documents, on any machine; perplexity has no limit",
    )
    parser.add_argument("--verbose", action="store_true", help="a line a step of training")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.tiny:
        need_hopper("quality", ", or with --tiny")
    arguments.steps = 1  # `recipe_tree` asks; nothing is trained after the SFT
    size = TINY if arguments.tiny else FULL
    folder = Path(tempfile.mkdtemp(prefix="octetrl-quality-"))
    rows: list[Row] = []
    failed: list[str] = []
    plain_N = None
    try:
        documents = trained_model(folder, arguments, size)
        for arm in ARMS:
            gc.collect()  # the arm before
            recipe = recipe_from_mapping(quality_tree(folder, arguments, size, arm))
            row, logprobs_N = measure(recipe, arm, documents, size)
            plain_N = logprobs_N if plain_N is None else plain_N
            compare(row, logprobs_N, plain_N)
            found = failures(row, tiny=arguments.tiny)
            row["limits"] = "FAIL" if found else "PASS"
            failed += found
            rows.append(row)
            print(f"{arm}: {row['limits']}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(rows)
    print(f"wrote {write_result('quality', 'tiny' if arguments.tiny else '126m', rows, arguments.out)}")
    for line in failed:
        print(f"FAIL {line}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

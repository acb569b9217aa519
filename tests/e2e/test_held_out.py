"""Held-out examples of SFT and DPO, and epochs: against transformers in float64 and TRL's formulas."""

from __future__ import annotations

from math import fsum
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import logsigmoid

from octetrl.config.load import load_recipe, recipe_from_mapping
from octetrl.config.ranking import best_steps
from octetrl.config.schema import Recipe
from octetrl.data.mixture import Mixture, steps_of
from octetrl.records import PackedBatch, Sample
from octetrl.run.build import build_run
from octetrl.run.loop import train
from octetrl.run.recipe_files import unknown_metric
from octetrl.system.errors import UserError
from octetrl.telemetry.ending import read_ending, read_where
from octetrl.trainer.checkpoint import step_of
from octetrl.trainer.packing import pack
from octetrl.trainer.without_update import Sums
from octetrl.workers.assignment import Costs, deal
from octetrl.workers.model_shape import model_spec
from octetrl.workers.workers import Workers
from tests.e2e.test_beyond_rl import write
from tests.e2e.tiny_run import read_lines, recipe_tree, timeless

pytestmark = pytest.mark.usefixtures("rewards_here")

ANSWERED = [{"prompt": f"{number} + 1 =", "answer": f"so {number + 1}" * (number % 4 + 1)} for number in range(9)]
HELD_OUT = [{"prompt": f"{number} + 2 =", "answer": f"so {number + 2}" * (number % 3 + 1)} for number in range(7)]
PAIRS = [{"prompt": f"{n} - 1 =", "chosen": "good " * (n % 3 + 1), "rejected": "a bad one"} for n in range(8)]
FIELDS: dict[str, Any] = {
    "precision": "bf16",
    "model.dtype": "float32",
    "algorithm.batch_size": 4,
    "trainer.tokens_per_micro_batch": 64,
    "trainer.optimizer.lr": 3e-3,
    "environment.dataset": None,
}


def recipe_of(model: Path, output: Path, name: str, rows: Path, **changes: Any) -> Recipe:
    tree = recipe_tree(model, output, {})
    del tree["steps"], tree["environment"]
    tree["algorithm"] = {"name": name, "conversations": str(rows)}
    for key, value in {**FIELDS, **changes}.items():
        node, (*sections, last) = tree, key.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return recipe_from_mapping(tree)


def held_out_of(recipe: Recipe) -> list[Sample]:
    run = build_run(recipe, trains=False)
    run.close()
    assert isinstance(run.conversations, Mixture)
    return run.conversations.held_out[""]


def logprobs(folder: Path, samples: list[Sample]) -> list[torch.Tensor]:
    """Log-probs of each sample's trained tokens by transformers in float64."""
    model, scored = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), []
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor([sample.token_ids])).logits[0]
        each = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(sample.token_ids[1:])[:, None])[:, 0]
        scored.append(each[torch.tensor(sample.loss_mask[1:])])
    return scored


def test_the_loss_of_sft_is_the_mean_over_held_out_tokens(model: Path, tmp_path: Path) -> None:
    rows, held_out = write(tmp_path / "rows.jsonl", ANSWERED), write(tmp_path / "held_out.jsonl", HELD_OUT)
    fields = {
        "data.eval_dataset": str(held_out),
        "evaluation.every": 2,
        "checkpoint.every": 2,
        "checkpoint.keep_best": 1,
    }
    fields |= {"checkpoint.best_metric": "eval/loss", "checkpoint.keep_last": 1, "epochs": 2.5}
    recipe = recipe_of(model, tmp_path / "run", "sft", rows, **fields)
    train(recipe)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    measured = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
    assert list(measured) == [2, 4, 6], "every second, and the last: 2.5 passes over 9 rows in batches of 4"
    assert all("eval/accuracy" not in line for line in lines)
    scored = logprobs(tmp_path / "run" / "checkpoints" / "step_000006", held_out_of(recipe))
    assert measured[6] == pytest.approx(float(-torch.cat(scored).mean()), rel=1e-5)
    assert len({len(one) for one in scored}) > 1, "a mean of means would differ"
    kept = [step_of(path) for path in (tmp_path / "run" / "checkpoints").glob("step_*")]
    assert min(measured, key=lambda step: measured[step]) in kept
    plain = recipe_of(model, tmp_path / "plain", "sft", rows, steps=6)
    train(plain)
    own = [{name: value for name, value in line.items() if not name.startswith("eval/")} for line in timeless(lines)]
    assert own == timeless(read_lines(tmp_path / "plain" / "metrics.jsonl")), "no bit of a step changes"
    saved = load_recipe(tmp_path / "run" / "config.yaml")
    assert (saved.steps, saved.epochs) == (6, None)
    train(recipe, "auto")
    ending = read_ending(read_where(tmp_path / "run"))
    assert ending is not None and ending.how == "finished"


def test_pairs_have_the_loss_accuracy_and_margin_of_trl(model: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "pairs.jsonl", PAIRS)
    recipe = recipe_of(model, tmp_path / "run", "dpo", rows, steps=3, **{"data.eval_size": 3})
    train(recipe)
    line = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    samples, trained = held_out_of(recipe), tmp_path / "run" / "checkpoints" / "step_000003"
    assert len(samples) == 6
    both = zip(logprobs(trained, samples), logprobs(model, samples), strict=True)
    ratios = [float(policy.sum() - reference.sum()) for policy, reference in both]
    margins = torch.tensor([0.1 * (a - b) for (a, b) in zip(ratios[::2], ratios[1::2], strict=True)])
    assert line["eval/margin"] == pytest.approx(float(margins.mean()), rel=1e-3)
    assert line["eval/loss"] == pytest.approx(float(-logsigmoid(margins).mean()), rel=1e-5)
    assert line["eval/accuracy"] == pytest.approx(float((margins > 0).double().mean()))


def test_workers_add_the_same_bits_and_sets_have_metrics_of_their_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, other = write(tmp_path / "rows.jsonl", ANSWERED), write(tmp_path / "other.jsonl", HELD_OUT)
    sets = {"own": {"path": str(rows)}, "other": {"path": str(other)}}
    fields = {"data.eval_dataset": sets, "trainer.optimizer.lr": 0.0}
    recipe = recipe_of(model, tmp_path / "run", "sft", rows, steps=1, **fields)
    measure, measured = Workers.measure_held_out, list[float]()

    def counted(workers: Workers, batch: PackedBatch) -> Sums:
        measured.append(batch.metrics["train/samples"])
        return measure(workers, batch)

    monkeypatch.setattr(Workers, "measure_held_out", counted)
    train(recipe)
    assert measured == [len(ANSWERED), len(HELD_OUT)], "each example is measured once"
    line = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    own, other_loss, both = (line[f"eval/{name}"] for name in ("own/loss", "other/loss", "loss"))
    assert min(own, other_loss) < both < max(own, other_loss)
    run = build_run(recipe, trains=False)
    batch = pack(run.conversations.held_out["own"], run.workers.layout, "token")  # type: ignore[union-attr,arg-type]
    assert len(batch.minibatches[0]) > 2
    worker = run.workers.worker
    assert worker is not None
    whole = worker.measure_held_out(batch)
    total, count = run.workers.measure_held_out(batch)["loss"]
    assert total / count == own
    parts = deal(batch, 2, Costs.of(model_spec(recipe)))
    sums = [one for part in parts for one in worker.measure_held_out(part)]
    assert sorted(map(repr, sums)) == sorted(map(repr, whole)), "each micro-batch is the same on any worker"
    loss = fsum(one["loss"][0] for one in sums) / sum(one["loss"][1] for one in sums)
    assert loss == own, "and so is their exact sum"
    run.close()


def test_what_a_loss_stops_and_what_does_not_go_together(model: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", ANSWERED)
    fields = {"data.eval_size": 2, "evaluation.every": 1, "trainer.optimizer.lr": 0.0}
    fields["early_stopping"] = {"metric": "eval/loss", "patience": 2}
    train(recipe_of(model, tmp_path / "run", "sft", rows, steps=9, **fields))
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3, "0 improves nothing"
    fields["trainer.optimizer.lr"] = 3e-3
    train(recipe_of(model, tmp_path / "falls", "sft", rows, steps=5, **fields))
    assert len(read_lines(tmp_path / "falls" / "metrics.jsonl")) == 5, "each loss is the best so far"
    assert best_steps([(1, 2.0), (2, 1.0), (3, 1.0)], "eval/own/loss") == [2, 3, 1]
    path = tmp_path / "run" / "config.yaml"
    assert (load_recipe(path, ["epochs=2"]).epochs, load_recipe(path, ["epochs=2"]).steps) == (2.0, 100)
    assert [steps_of(epochs, 100, 10) for epochs in (1.1, 2.2, 0.01)] == [11, 22, 1]
    with pytest.raises(UserError, match="leave one of them out"):
        load_recipe(path, ["epochs=2", "steps=3"])
    fields["early_stopping"] = {"metric": "eval/accuracy"}
    [problem] = unknown_metric(recipe_of(model, tmp_path / "a", "sft", rows, steps=1, **fields))
    assert problem.startswith("early_stopping.metric") and "eval/loss" in problem
    with pytest.raises(UserError, match="9 of 9 examples"):
        train(recipe_of(model, tmp_path / "none", "sft", rows, steps=1, **{"data.eval_size": 9}))

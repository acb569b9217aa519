"""`octetrl demo`, `make demo`: the main job on a laptop, from nothing.

    1  a tiny Qwen3-architecture model with its own tokenizer, saved in Hugging Face form
    2  a cold start: SFT on sums, some worked step by step, most with the bare result (recipes/demo_sft.yaml)
    3  GRPO with FP8 end to end, emulated (recipes/demo_grpo.yaml)
    4  a table: held-out accuracy before, between and after; speed; mismatch; saturation

After the cold start the model guesses more often than it works a sum out, because most examples show only the result.
GRPO learns which of the two gives more reward. The demo uses the recipes, functions and files of a real run.

A demo that was stopped continues where it was: the file `MARKER` lists the phases that are complete, and a run resumes
from its last checkpoint. After a finished demo, or with `again`, the next one starts from the beginning. It replaces
what the first one wrote (`WRITTEN`), and nothing else. Without the file `MARKER` a folder with files of these names is
refused.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.config.shipped import shipped_path
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.records import Task
from octetrl.run.build import full_precision
from octetrl.run.environment import build_environment, build_taskset
from octetrl.run.evaluate import EvalReport, evaluate_checkpoint
from octetrl.run.export import export_run
from octetrl.run.folder.layout import RECIPE_FILE, refuse_live, remove_run
from octetrl.run.loop import train
from octetrl.run.tiny_model import save_tokenizer
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError
from octetrl.system.files import folder_lock
from octetrl.system.host import free_cores, num_cores
from octetrl.system.text import counted

WRITTEN = ("model", "worked_examples.jsonl", "sft", "grpo")
MARKER = "made_by_octetrl_demo"
MADE, COLD_START, FINISHED = "model and examples made", "cold start trained", "finished"  # lines of the marker
NUM_EXAMPLES = 30_000
BARE_SHARE = 0.72  # of the examples that show the result without the steps
TOKENIZER_EXAMPLES = 1_000
VOCAB_SIZE = 384
CAPTION = "Evaluation takes the most probable token each time. Training samples, so its rewards are lower."
Answers = tuple[Callable[[Task], str], Callable[[Task], str]]


def run_demo(folder: Path, *, again: bool = False) -> None:
    """Run the demo in `folder`, or what is left of it. again: from its start. Raises UserError if `folder` holds files
    that no demo wrote, and if another demo runs there."""
    with ExitStack() as stack:
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not stack.enter_context(folder_lock(folder)):
                raise UserError(f"--to: another demo is running in '{folder}'; wait for it, or give another folder")
        _run_parts(folder, again=again)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--to: cannot write in '{folder}' ({error.strerror}); give another folder") from error


def _run_parts(folder: Path, *, again: bool) -> None:
    console = Console()
    started = time.perf_counter()
    threads = _threads(console)
    sft = load_recipe(
        shipped_path("demo_sft"),
        [*_paths(folder, "sft", model="model", conversations="worked_examples.jsonl"), *threads],
    )
    grpo = load_recipe(shipped_path("demo_grpo"), [*_paths(folder, "grpo", model="sft/export"), *threads])
    complete = prepare_folder(folder, again=again)
    if complete:
        console.print(
            f"continues the demo in {folder} (--again starts from the beginning)", markup=False, highlight=False
        )
    console.rule("1 · a tiny model (all parts: 6 to 13 minutes on two free cores)")
    if MADE not in complete:
        make_model_and_examples(sft, preset_config("tiny"))
        note_phase(folder, MADE)
    else:
        console.print("it is there; its accuracy is measured again")
    reports = {"before SFT": evaluate_checkpoint(str(sft.model.path), sft)}
    console.rule("2 · cold start: SFT on worked sums (about half of the time)")
    if COLD_START not in complete:
        train_or_resume(sft)
        shutil.rmtree(str(grpo.model.path), ignore_errors=True)  # half an export
        export_run(sft.output_dir, str(grpo.model.path))
        note_phase(folder, COLD_START)
    else:
        console.print("it is trained; its accuracy is measured again")
    reports["after SFT"] = evaluate_checkpoint(sft.output_dir, grpo)
    console.rule("3 · GRPO, FP8 end to end (emulated)")
    train_or_resume(grpo)
    reports["after GRPO"] = evaluate_checkpoint(grpo.output_dir, grpo)
    note_phase(folder, FINISHED)
    console.rule("4 · what it did")
    console.print(summary(reports, Path(grpo.output_dir), time.perf_counter() - started, continued=bool(complete)))


def _threads(console: Console) -> list[str]:
    """An override where other programs are busy: a thread without a core of its own makes all others wait for it."""
    cores, free = num_cores(), free_cores()
    if free is None or free >= cores:
        return []
    console.print(
        f"{free} of {cores} cores {'is' if free == 1 else 'are'} free now, so torch uses {counted(free, 'thread')}"
        f" (cluster.cpu_threads={free}), and the demo takes longer",
        highlight=False,
    )
    return [f"cluster.cpu_threads={free}"]


def train_or_resume(recipe: Recipe) -> None:
    """Train from the last checkpoint if there is one, else from the start. Raises UserError for a run of another
    model."""
    saved = Path(recipe.output_dir) / RECIPE_FILE
    model = load_recipe(str(saved)).model if saved.exists() else recipe.model
    if model.path != recipe.model.path:
        raise UserError(
            f"--to: '{recipe.output_dir}' holds a run that the demo did not start: it trains"
            f" '{model.path or model.preset}', and the demo '{recipe.model.path}'; move the run away, or give another"
            " folder"
        )
    resumes = any((Path(recipe.output_dir) / "checkpoints").glob("step_*"))
    if not resumes:
        refuse_live(Path(recipe.output_dir))
        remove_run(Path(recipe.output_dir))
    train(recipe, resume=resumes)


def _paths(folder: Path, run: str, *, model: str, conversations: str | None = None) -> list[str]:
    """Overrides that put a demo recipe's files into `folder`."""
    paths = {"output_dir": run, "model.path": model, "algorithm.conversations": conversations}
    return [f"{field}={json.dumps(str(folder / name))}" for field, name in paths.items() if name is not None]


def prepare_folder(folder: Path, *, again: bool = False) -> list[str]:
    """The phases that an unfinished demo has completed in `folder`. If there is none, make the folder, mark it, and
    remove what an earlier demo wrote in it. Raises UserError for files of others."""
    found = [name for name in WRITTEN if (folder / name).exists()]
    complete = phases_of(folder)
    if (folder / MARKER).is_file() and COLD_START not in complete and (folder / "grpo" / RECIPE_FILE).exists():
        raise UserError(
            f"--to: '{folder / 'grpo'}' holds a run that the demo did not start, because its SFT is not finished; move"
            " the run away, or give another folder"
        )
    if complete and FINISHED not in complete and not again:
        return complete
    if found and not (folder / MARKER).is_file():
        raise UserError(
            f"--to: '{folder}' holds {', '.join(found)}, and no demo is known to have written that (no {MARKER});"
            " give another folder, or move them away"
        )
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).write_text(f"The demo in this folder wrote {', '.join(WRITTEN)}.\n", encoding="utf-8")
        for name in found:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return []


def phases_of(folder: Path) -> list[str]:
    """The phases that the demo in `folder` has completed."""
    marker = folder / MARKER
    lines = marker.read_text(encoding="utf-8").splitlines() if marker.is_file() else []
    return [line for line in lines if line in (MADE, COLD_START, FINISHED)]


def note_phase(folder: Path, phase: str) -> None:
    """Note that a phase is complete."""
    with (folder / MARKER).open("a", encoding="utf-8") as marker:
        marker.write(f"{phase}\n")


def make_model_and_examples(recipe: Recipe, config: dict[str, Any], answers: Answers | None = None) -> None:
    """Write a random model of this shape, its tokenizer and the worked examples where the SFT recipe expects them.

    answers: a task's bare and worked answer; None: those of sums. `BARE_SHARE` of the examples have the bare one.
    """
    bare, worked = answers or (bare_answer, worked_answer)
    model_folder, conversations = Path(str(recipe.model.path)), Path(recipe.sources["conversations"].path)
    model_folder.mkdir(parents=True)
    environment = build_environment(recipe.environment)
    taskset = build_taskset(environment, recipe.environment)
    chance = random.Random(recipe.seed)
    examples = [
        {"prompt": task.text, "answer": bare(task) if chance.random() < BARE_SHARE else worked(task)}
        for task in taskset.next_batch(NUM_EXAMPLES)
    ]
    conversations.write_text("".join(json.dumps(example) + "\n" for example in examples))
    texts = [example["prompt"] + example["answer"] for example in examples[:TOKENIZER_EXAMPLES]]
    tokenizer = save_tokenizer(texts, model_folder, vocab_size=VOCAB_SIZE)
    spec = spec_from_config({**config, "vocab_size": VOCAB_SIZE, "eos_token_id": tokenizer.eos_token_id})
    model = Decoder(spec, full_precision(spec), "train")
    model.random_init(recipe.seed)
    save_weights(model, model_folder)


def bare_answer(task: Task) -> str:
    return f"#### {task.answer}"


def worked_answer(task: Task) -> str:
    """A sum with its running totals written out: "4 - 1 = 3, 3 - 7 = -4 #### -4"."""
    first, *rest = task.metadata["entry"]["metadata"]["expression"].split()
    total, lines = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(number) if sign == "+" else total - int(number)
        lines.append(f"{total} {sign} {number} = {result}")
        total = result
    return f"{', '.join(lines)} #### {total}"


def summary(reports: dict[str, EvalReport], grpo_folder: Path, seconds: float, *, continued: bool = False) -> Table:
    """The table at the end of the demo. `seconds` are those of the last part if it was continued."""
    steps = [json.loads(line) for line in (grpo_folder / "metrics.jsonl").read_text().splitlines()]

    def values(name: str) -> list[float]:
        return [step[name] for step in steps if step.get(name) is not None]

    saturated, difference = values("fp8/kv_saturation"), max(values("mismatch/max_abs_diff"))
    rows = [(f"held-out accuracy {when}", f"{report.accuracy:.3f}") for when, report in reports.items()]
    rows += [
        ("rollout tokens/s, median step", f"{median(values('rollout/tokens_per_second')):,.0f}"),
        ("training tokens/s, median step", f"{median(values('train/tokens_per_second')):,.0f}"),
        (
            "log-probs, engine − trainer",
            "equal in all steps" if not difference else f"differ, by {difference:.2e} at most",
        ),
        ("K and V values above FP8's largest", f"{sum(saturated) / len(saturated):.4%}"),
        ("minutes since it was continued" if continued else "minutes", f"{seconds / 60:.1f}"),
        ("run folder", str(grpo_folder)),
    ]
    table = Table(show_header=False, caption=CAPTION)
    for row in rows:
        table.add_row(*row)
    return table

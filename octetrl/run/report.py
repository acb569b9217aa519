"""What a run says at its beginning and its end: a banner, a last screen, and `report.html` in its folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octetrl.config.environment import EnvironmentConfig, reward_names
from octetrl.config.in_words import describe_roles, describe_tail, in_flight, range_text
from octetrl.config.objective_settings import DatasetSettings
from octetrl.config.schema import Recipe
from octetrl.environments.python_object import is_given
from octetrl.fp8.parity import parity_of
from octetrl.fp8.policy import formats_by_layer, precision_policy
from octetrl.run.device import gpu_capability, runs_on_gpu
from octetrl.run.folder.layout import CHECKPOINTS, REPORT
from octetrl.run.folder.output_folder import read_run_id
from octetrl.run.model_source import BEST
from octetrl.system.text import ESCAPE, counted
from octetrl.telemetry.console import Console
from octetrl.telemetry.report import report_page
from octetrl.telemetry.report_data import RunRecord, idle_tail, longest_first, overlap, read_run, results, steps_above
from octetrl.telemetry.sinks import METRICS_FILE, last_step
from octetrl.telemetry.step_line import duration
from octetrl.trainer.checkpoint import best_of, latest, step_of
from octetrl.workers.model_shape import model_spec

if TYPE_CHECKING:
    from octetrl.run.state import Run

GIB = 2**30
Screen = tuple[str, list[tuple[str, str]]]  # a title, and rows of a label and a text


def leave_report(folder: Path, console: Console) -> None:
    """Writes the report if the run has finished a step. A report that can't be made is a warning: the run's results do
    not depend on it. An earlier report then stays."""
    if not last_step(folder / METRICS_FILE):
        return
    aside = folder / f".{REPORT}"
    try:
        aside.write_text(report_page([read_run(folder)]), encoding="utf-8", errors=ESCAPE)
        aside.replace(folder / REPORT)
    except Exception as error:  # whatever a metric of the user's may have caused
        console.warn(f"no {REPORT} was written ({error}); `octetrl report {folder}` tries again")
    finally:
        with suppress(OSError):
            aside.unlink()


# ---------------------------------------------------------------- the beginning


def banner(run: Run) -> Screen:
    """What runs, on what, and where it is written."""
    recipe = run.config
    settings = dict(RunRecord(Path(recipe.output_dir), recipe.model_dump(mode="json"), []).settings)
    trained = "" if recipe.model.lora is None else f", LoRA of rank {recipe.model.lora.rank}"
    model = f"{model_name(settings['model'])}, {_millions(model_spec(recipe).num_parameters)} parameters{trained}"
    rows = [
        ("precision", settings["precision"]),
        ("parity", str(in_force(recipe).get("parity", ""))),
        ("device", _device(recipe, run.console)),
        ("roles", describe_roles(recipe) or ""),
        ("data", _data(run)),
        ("step", _step(recipe)),
        ("beside tail", describe_tail(recipe) or ""),
        ("run", _plan(recipe)),
        ("folder", recipe.output_dir),
    ]
    return f"{settings['algorithm']}: {model}", [(label, text) for label, text in rows if text]


def in_force(recipe: Recipe) -> dict[str, object]:
    """What the model makes of settings, for run.json: the formats of its linears, in words, by layers; `parity`, where
    there are rollouts; and what is done with the KV cache if weights change in flight."""
    plain = "float32" if recipe.model.dtype == "float32" else "BF16"
    policy = precision_policy(model_spec(recipe), recipe.fp8)
    found: dict[str, object] = {"linears": formats_by_layer(policy, plain)}
    if recipe.algorithm.learns_from == "rollouts":
        found["parity"] = parity_of(recipe, policy, on_gpu=runs_on_gpu(recipe.cluster), capability=gpu_capability())
    changes = in_flight(recipe.cluster, policy.kv_mode)
    return found if changes == "off" else {**found, "weights_in_flight": changes}


def model_name(model: str) -> str:
    """A preset's name, a run with its step, the name at the hub, or the last two parts of a folder's path."""
    path = Path(model)
    if path.parent.name == CHECKPOINTS and path.name.removeprefix("step_").isdecimal():
        return f"{model_name(str(path.parent.parent))}@{step_of(path)}"
    hub = next((part for part in path.parts if part.startswith("models--")), None)
    return "/".join(hub.split("--")[1:]) if hub is not None else "/".join(path.parts[-2:])


def _device(recipe: Recipe, console: Console) -> str:
    """Where it runs and how much memory there is, with the models loaded."""
    cluster = recipe.cluster
    if cluster.uses_ray:
        kind = f"{cluster.num_gpus} GPUs" if cluster.num_gpus else f"{cluster.num_workers} CPU processes"
        loaded = "" if console.workers is None else "; `octetrl status` shows what each worker does"
        return f"{cluster.num_workers} workers on {kind}{loaded}"
    if torch.cuda.is_initialized():
        free, whole = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return (
            f"{name}, {whole / GIB:.1f} GiB, of which {(whole - free) / GIB:.1f} GiB are in use with the model loaded"
        )
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    threads = torch.get_num_threads()
    emulated = "; FP8 is emulated" if recipe.fp8.rollout or recipe.fp8.train else ""
    return f"CPU, {threads} thread{'s' * (threads != 1)}, {whole / GIB:.1f} GiB{emulated}"


def _data(run: Run) -> str:
    recipe = run.config
    if run.conversations is not None:
        held_out = sum(map(len, run.conversations.held_out.values()))
        shown = [f"{counted(held_out, 'sequence')} held out"] if held_out else []
        return ", ".join([*(str(source.path) for source in recipe.sources.values()), *shown])
    described = [f"{name}: {_tasks(one)}" if name else _tasks(one) for name, one in recipe.each_environment.items()]
    return "; ".join(described)


def _tasks(environment: EnvironmentConfig) -> str:
    names = [environment.kind, str(environment.dataset)] if environment.dataset else [environment.kind]
    reward = f", reward {' + '.join(reward_names(environment.reward))}" if environment.reward else ""
    return f"{' '.join(names)}{reward}{f', {environment.held_out_text}' if environment.holds_out else ''}"


def _step(recipe: Recipe) -> str:
    algorithm, rollout = recipe.algorithm, recipe.rollout
    if isinstance(algorithm, DatasetSettings):
        return f"{algorithm.batch_size} {'pairs' if algorithm.learns_from == 'preferences' else 'conversations'}"
    most = "" if len(set(recipe.group_sizes)) == 1 else "at most "
    drawn = (
        f"{rollout.prompts_per_step} prompts x {range_text(recipe.group_sizes)} = {most}{recipe.most_answers} answers"
    )
    return f"{drawn} of at most {counted(rollout.max_new_tokens, 'token')}"


def _plan(recipe: Recipe) -> str:
    length = "" if recipe.epochs is None else f" ({recipe.epochs:g} epochs)"
    plan = [f"{recipe.steps:,} step{'s' * (recipe.steps != 1)}{length}"]
    if 0 < recipe.evaluation.every <= recipe.steps:
        plan.append(f"an evaluation every {recipe.evaluation.every}")
    is_saved = 0 < recipe.checkpoint.every < recipe.steps
    saves = f"a checkpoint every {recipe.checkpoint.every} and" if is_saved else "a checkpoint"
    return ", ".join([*plan, f"{saves} at the end"])


def _millions(number: int) -> str:
    if number >= 1e9:
        return f"{number / 1e9:.1f}B"
    return f"{number / 1e6:.1f}M" if number >= 1e5 else f"{number:,}"


# ---------------------------------------------------------------- the end


def last_screen(folder: Path, recipe: Recipe) -> Screen:
    """What came out, where it is as the user named it, where the time went, and what to type next."""
    run, named = read_run(folder), Path(recipe.output_dir)
    rows = [
        *results(run),
        ("time", _seconds_by_part(run)),
        ("", overlap(run.rows)),
        ("mismatch", steps_above(run) or ""),
        ("beside tail", idle_tail(run) or ""),
        *_where(folder, recipe),
    ]
    rows.append(("report", str(named / REPORT)))
    next_label = "next"
    for command, what in _commands(named, recipe):
        rows.append((next_label, f"{command}   {what}"))
        next_label = ""
    spent = duration(run.hours[-1] * 3600) or "0 s"
    return f"done: {counted(run.num_steps, 'step')} in {spent}", [(one, text) for one, text in rows if text]


def _seconds_by_part(run: RunRecord) -> str:
    """Seconds of each part that took a hundredth of the time or more."""
    times = longest_first(run.rows)
    whole = sum(times.values())
    shown = [f"{name} {duration(seconds)}" for name, seconds in times.items() if seconds >= 0.01 * whole]
    return ", ".join(shown)


def _where(folder: Path, recipe: Recipe) -> Iterator[tuple[str, str]]:
    last, named = latest(folder / CHECKPOINTS), Path(recipe.output_dir)
    if last is not None:
        yield "weights", f"{named / last.relative_to(folder)} (step {step_of(last)})"
    best = best_of(folder / CHECKPOINTS, read_run_id(folder), recipe.checkpoint.best_metric)
    if best not in (None, last):
        yield "", f"{named}@{BEST} (step {step_of(best)}), the best of those saved"


def _commands(folder: Path, recipe: Recipe) -> list[tuple[str, str]]:
    place = shlex.quote(str(folder))
    kind = recipe.algorithm.learns_from
    commands = []
    if kind == "rollouts":
        if recipe.logging.rollouts:
            commands.append((f"octetrl rollouts {place}", "what the model said, with rewards"))
        environments = recipe.each_environment.values()
        python_only = any(
            is_given(name) for one in environments for name in (one.dataset or "", *reward_names(one.reward))
        )
        if any(one.holds_out for one in environments) and not python_only:
            commands.append((f"octetrl eval {place}", "held-out tasks, with intervals"))
    if recipe.algorithm.name == "reward_model":
        out = shlex.quote(str(folder / "export"))
        commands.append((f"octetrl export {place} --to {out}", "a folder for environment.reward_model"))
    else:
        commands.append((f"octetrl serve {place}", "an OpenAI-compatible server"))
        commands.append((f"octetrl generate {place} -p TEXT", "an answer"))
    commands.append((f"octetrl report {place}", "the report again, or of several runs"))
    commands = commands[:3]
    room = max(len(command) for command, _ in commands)
    return [(command.ljust(room), what) for command, what in commands]

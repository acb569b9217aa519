"""Upload an exported model to the Hugging Face hub, with a model card: `octetrl export RUN --push-to-hub NAME`.

The card says from which model, by which recipe and with which results the run trained, and how to serve it. Nothing is
guessed: a base model or a licence that the run does not know is left out. An upload that was interrupted is continued
by the same command, because the hub keeps files that it has received.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from octetrl.config.load import RecipeDumper, load_recipe
from octetrl.config.schema import Recipe
from octetrl.models.peft_adapters import CONFIG, is_adapter
from octetrl.run.export import export_run
from octetrl.run.model_source import recipe_of_run
from octetrl.run.report import model_name
from octetrl.run.trained_model import checkpoint_step
from octetrl.system.errors import UserError
from octetrl.system.names import hub_dataset
from octetrl.telemetry.sinks import METRICS_FILE, read_objects

CARD = "README.md"
OPTION = "--push-to-hub"
# What makes a folder another model if it is left beside an export.
MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "config.json", CONFIG)
SHOWN = ("eval/accuracy", "eval/pass_at_*", "eval/maj_at_*", "reward/mean", "preference/accuracy", "loss")
CAVEAT = """\
In our comparisons over several seeds, FP8 in rollout, training and cache ended below BF16 in held-out accuracy. On a
pretrained model of 135M parameters it was 0.009 below on sums (24 seeds, 95% interval of the difference -0.031 to
+0.006) and 0.070 on problems in words (7 seeds, -0.192 to +0.012), on a model of 1M 0.048, and as a mixture of experts
0.047. No larger model was compared over seeds, so evaluate this one against a BF16 run before you rely on it.
"""


class HubTarget(NamedTuple):
    """Where an export goes. private: of a new repository. revision: a branch, made if needed. tag: set after it."""

    name: str
    private: bool = False
    revision: str | None = None
    tag: str | None = None
    base_model: str | None = None  # name at the hub of the model that the run began with


# ---------------------------------------------------------------- the card


def write_card(source: Path, folder: Path, target: HubTarget, *, fp8: bool) -> None:
    """Write the card of the model in `folder`, which was exported from the checkpoint `source`."""
    path = recipe_of_run(source)
    recipe = None if path is None else load_recipe(path)
    base = target.base_model or _base_model(recipe)
    if is_adapter(folder) and base is not None:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = base  # a local path says nothing to others
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    step = checkpoint_step(source)
    head = {
        "library_name": "peft" if is_adapter(folder) else "transformers",
        "pipeline_tag": "text-classification" if _is_reward_model(recipe) else "text-generation",
        "base_model": base,
        "license": _licence(recipe),
        "datasets": _datasets(recipe),
        "tags": [
            "octetrl",
            *([] if recipe is None else [recipe.algorithm.name.partition(":")[0]]),
            *_formats(recipe, fp8),
        ],
    }
    known = {name: value for name, value in head.items() if value}
    parts = [f"---\n{yaml.safe_dump(known, sort_keys=False)}---\n", f"# {target.name.rpartition('/')[2]}\n"]
    parts += _text(recipe, base, step)
    if path is not None and recipe is not None:
        parts += [_metrics(path.parent / METRICS_FILE, step), _recipe(recipe, base)]
        if recipe.fp8.rollout or recipe.fp8.train or recipe.fp8.kv_cache != "none":
            parts.append(f"## Precision\n\n{CAVEAT}")
    parts.append(_use(target.name, folder, recipe, base))
    (folder / CARD).write_text("\n".join(filter(None, parts)), encoding="utf-8")


def _base_model(recipe: Recipe | None) -> str | None:
    """The hub's name of the model that a run began with, through the runs before it. None: it is not known."""
    path = None if recipe is None else recipe.model.path
    while path is not None and (before := recipe_of_run(path)) is not None:
        path = load_recipe(before).model.path
    if path is None or not any(part.startswith("models--") for part in Path(path).parts):
        return None
    return model_name(path)


def _licence(recipe: Recipe | None) -> str | None:
    """The licence that the base model's own card names."""
    if recipe is None or recipe.model.path is None:
        return None
    card = Path(recipe.model.path) / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    if not text.startswith("---\n"):
        return None
    try:
        head = yaml.safe_load(text[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return None
    licence = head.get("license") if isinstance(head, dict) else None
    return licence if isinstance(licence, str) else None


def _datasets(recipe: Recipe | None) -> list[str]:
    if recipe is None:
        return []
    given = [one.dataset for one in recipe.each_environment.values()] + [one.path for one in recipe.sources.values()]
    named = [hub_dataset(one) for one in given if one]
    return sorted({one.name for one in named if one is not None})


def _formats(recipe: Recipe | None, fp8: bool) -> list[str]:
    trained = recipe is not None and (recipe.fp8.rollout or recipe.fp8.train)
    return ["fp8"] if fp8 or trained else []


def _is_reward_model(recipe: Recipe | None) -> bool:
    return recipe is not None and recipe.algorithm.name == "reward_model"


def _text(recipe: Recipe | None, base: str | None, step: int) -> Iterator[str]:
    if recipe is None:
        yield "Exported by OctetRL.\n"
        return
    begun = f"[{base}](https://huggingface.co/{base})" if base else recipe.model.preset or "a local model"
    lora = "" if recipe.model.lora is None else f" with LoRA of rank {recipe.model.lora.rank}"
    steps = f"step {step} of {recipe.steps}" if step else f"{recipe.steps} steps"
    yield f"{begun}, trained by {recipe.algorithm.name}{lora} with OctetRL, {steps}.\n"


def _metrics(path: Path, step: int) -> str:
    """A table of the first and the last value of the figures that people compare, until the step of the weights."""
    rows = [row for row in read_objects(path) if not step or row.get("step", 0) <= step]
    names = sorted({name for row in rows for name in row})
    shown = [name for pattern in SHOWN for name in names if fnmatch(name, pattern)]
    lines = []
    for name in shown:
        values = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
        if values:
            (first, one), (last, other) = values[0], values[-1]
            lines.append(f"| {name} | {one:.4g} (step {first}) | {other:.4g} (step {last}) |\n")
    return f"## Results\n\n| metric | first | last |\n|---|---|---|\n{''.join(lines)}" if lines else ""


def _recipe(recipe: Recipe, base: str | None) -> str:
    """The fields that differ from their defaults."""
    fields: dict[str, Any] = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"output_dir", "logging"})
    if base is not None and recipe.model.path is not None:
        fields["model"]["path"] = base
    fields["algorithm"] = {"name": recipe.algorithm.name, **fields.get("algorithm", {})}
    text = yaml.dump(fields, Dumper=RecipeDumper, sort_keys=False)
    return f"## Recipe\n\n```yaml\n{text}```\n"


def _use(name: str, folder: Path, recipe: Recipe | None, base: str | None) -> str:
    if _is_reward_model(recipe):
        return f"## Use\n\nAs a reward in OctetRL: `environment: {{reward_model: {name}}}`.\n"
    precision = recipe.precision if recipe is not None and recipe.precision else "bf16"
    if is_adapter(folder):
        lines = [f"vllm serve {base or 'BASE'} --enable-lora --lora-modules {name.rpartition('/')[2]}={name}"]
    else:
        lines = [
            f"octetrl serve {name} --precision {precision}   # the precision it was trained in",
            f"vllm serve {name}",
        ]
    return "## Use\n\n```bash\n" + "\n".join(lines) + "\n```\n"


# ---------------------------------------------------------------- the upload


def push_run(run: str, to: str | None, target: HubTarget, *, adapter: bool = False, fp8: bool = False) -> str:
    """Export a run to `to`, or to a folder that is removed again, and upload it. Returns the address of the model.

    Raises UserError if the hub can't be used, before anything is written."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id

    with _one_line(target.name, "nothing was written; try again when the hub answers"):
        validate_repo_id(target.name)
        user = HfApi().whoami()["name"]
    if "/" not in target.name:
        target = target._replace(name=f"{user}/{target.name}")
    recipe = recipe_of_run(run)
    with tempfile.TemporaryDirectory(prefix=".export-", dir="." if recipe is None else recipe.parent) as aside:
        folder = export_run(run, to or aside, adapter=adapter, fp8=fp8, add=partial(write_card, target=target, fp8=fp8))
        where = "the same command" if to is None else f"the model is in '{to}', and the command without --to"
        return _upload(folder, target, f"{where} sends what is missing")


def _upload(folder: Path, target: HubTarget, again: str) -> str:
    from huggingface_hub import HfApi

    api, branch = HfApi(), target.revision
    with _one_line(target.name, again):
        name = api.create_repo(target.name, private=target.private or None, exist_ok=True).repo_id
        if target.private and not api.model_info(name).private:
            raise UserError(f"--private: '{name}' exists and is public; change that on its page, or give a new name")
        if branch is not None:
            api.create_branch(name, branch=branch, exist_ok=True)
        _refuse_other_model(name, api.list_repo_files(name, revision=branch), folder)
        api.upload_folder(repo_id=name, folder_path=folder, revision=branch, commit_message="Export of an OctetRL run")
        if target.tag is not None:
            api.create_tag(name, tag=target.tag, revision=branch)
    at = target.tag or branch
    return f"{api.endpoint}/{name}" + (f"/tree/{at}" if at else "")


def _refuse_other_model(name: str, there: list[str], folder: Path) -> None:
    """Refuse weights and configs in the repository that this export would leave beside its own."""
    ours = {path.name for path in folder.iterdir()}
    others = [file for file in there if file not in ours and any(fnmatch(file, form) for form in MODEL_FILES)]
    if others:
        raise UserError(
            f"{OPTION}: '{name}' has {others[0]}, which this export has not, so readers would mix two models; give"
            " another name or --revision, or delete that file there"
        )


@contextmanager
def _one_line(name: str, again: str) -> Iterator[None]:
    """What the hub or the network refuse, as a UserError. again: what to do then."""
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    try:
        yield
    except UserError:
        raise
    except LocalTokenNotFoundError:
        raise UserError(f"{OPTION}: no token of the hub; log in with `hf auth login`, or set HF_TOKEN") from None
    except HFValidationError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{OPTION}: '{name}' is no name of a repository ({reason}); give one as owner/name") from None
    except Exception as error:  # of the client, of its transfer program, of the network
        texts = dict.fromkeys(map(str, (error, error.__cause__ or "")))  # httpx repeats its cause
        reason = " ".join(" ".join(texts).split())[:300] or type(error).__name__
        raise UserError(f"{OPTION}: '{name}' could not be sent ({reason}); {again}") from None

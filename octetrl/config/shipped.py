"""Find and copy the recipes that are part of the package, and say how to make what they start from.

They are in `recipes/` of the repository. `octetrl/recipes` links there, so a wheel contains them as package data. A
shipped recipe is found by its bare name, without folder and suffix: `octetrl train demo_grpo`. A file of that name in
the working directory is used instead.

Example:
    shipped_path("demo_grpo")                          .../octetrl/recipes/demo_grpo.yaml
    copy_recipe("demo_grpo", Path("mine"))             [mine/demo_grpo.yaml, mine/bases/demo_rl.yaml, ...]
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from octetrl.config.recipe_yaml import parse_yaml
from octetrl.system.errors import UserError, nearest, refuse_empty

FOLDER = Path(__file__).parents[1] / "recipes"
SCHEMA = "recipe.schema.json"
_DEMO = "run `octetrl demo` first"
_CHECKOUT = "run `{}` first, in a checkout"
_EXPORTED = "octetrl train demo_tools_sft && octetrl export runs/tools/sft --to runs/tools/sft/export"
_SMOLLM2 = "models/SmolLM2-135M-Instruct"
_WAYS = {  # how to make what shipped recipes start from; their comments show the same commands
    "runs/demo/model": _DEMO,
    "runs/demo/worked_examples.jsonl": _DEMO,
    "runs/demo/sft/export": _DEMO,
    "runs/demo/grpo/export": f"{_DEMO}, then `octetrl export runs/demo/grpo --to runs/demo/grpo/export`",
    "runs/demo/moe": f"{_DEMO}, then, in a checkout, `python -m examples.upcycle runs/demo/sft/export runs/demo/moe`",
    "runs/demo/pairs.jsonl": _CHECKOUT.format("python examples/preference_pairs.py runs/demo/pairs.jsonl"),
    "runs/demo/worked.jsonl": _CHECKOUT.format("python examples/conversations.py runs/demo"),
    "runs/demo/bare.jsonl": _CHECKOUT.format("python examples/conversations.py runs/demo"),
    "runs/tools/model": _CHECKOUT.format("python -m examples.tool_conversations runs/tools"),
    "runs/tools/conversations.jsonl": _CHECKOUT.format("python -m examples.tool_conversations runs/tools"),
    "runs/tools/sft/export": f"run `{_EXPORTED}` first",
    _SMOLLM2: f"run `hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir {_SMOLLM2}` first;"
    f" without the hub, in a checkout: `bash setup/smollm2.sh {_SMOLLM2}`",
}


def shipped_recipes() -> dict[str, str]:
    """Describe each shipped recipe, by name, with the first sentence of its comment."""
    return {path.stem: _summary(path) for path in sorted(FOLDER.glob("*.yaml"))}


def shipped_path(name: str) -> Path:
    """Return the file of the shipped recipe `name`. Raises UserError with the nearest name if there is none."""
    known = [path.stem for path in FOLDER.glob("*.yaml")]
    if name.removesuffix(".yaml") not in known:
        raise UserError(f"{name}: no shipped recipe has this name (`octetrl recipes` lists them){nearest(name, known)}")
    return FOLDER / f"{name.removesuffix('.yaml')}.yaml"


def find_recipe(path: str | Path) -> Path:
    """Return `path`, or the shipped recipe of that bare name if no such file exists.

    Raises UserError for an empty name, a run's folder, and for a bare name without a suffix that is neither a file nor
    a shipped recipe."""
    refuse_empty(path, "recipe", "the path of a YAML file, or a name that `octetrl recipes` lists")
    path = Path(path)
    if path.name != str(path) or path.suffix in (".yaml", ".yml") or "\0" in path.name or path.is_file():
        _refuse_run(path)
        return path
    try:
        return shipped_path(path.name)
    except UserError as error:
        _refuse_run(path)
        raise UserError(f"{path}: no such file, and {str(error).partition(': ')[2]}") from None


def _refuse_run(path: Path) -> None:
    if os.path.isfile(path / "config.yaml"):
        raise UserError(
            f"{path}: this is the folder of a run; its recipe is {path / 'config.yaml'}. `octetrl status {path}` and"
            f" `octetrl report {path}` show the run"
        )


def copy_recipe(name: str, to: Path) -> list[Path]:
    """Copy the shipped recipe `name`, all files that it extends and the schema for editors into the folder `to`.

    Returns the files, the recipe first. Files that already exist with the same content stay. If a file exists with
    other content, raises UserError and writes nothing.
    """
    sources = _with_what_it_extends(shipped_path(name))
    files = {to / path.relative_to(FOLDER): path.read_bytes() for path in (*sources, FOLDER / SCHEMA)}
    try:
        for target, content in files.items():
            if target.exists() and target.read_bytes() != content:
                raise UserError(f"--to: '{target}' exists with other content; give another folder, or move it away")
        for target, content in files.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    except OSError as error:
        raise UserError(f"--to: cannot write in '{to}' ({error.strerror}); give another folder") from error
    return list(files)


def _with_what_it_extends(path: Path) -> list[Path]:
    chain = [path]
    while (base := parse_yaml(chain[-1].read_text(encoding="utf-8"), str(chain[-1])).get("extends")) is not None:
        chain.append(Path(os.path.normpath(chain[-1].parent / base)))  # without following links
    return chain


def _summary(path: Path) -> str:
    """Return the first sentence of the comment at the top of the file, after the line for editors."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    comment = " ".join(line.removeprefix("#").strip() for line in lines[:4] if line.startswith("#"))
    return re.split(r"\.(?:\s|$)", comment)[0]


def way_to_make(path: str | Path) -> str | None:
    """What to do about a file or folder that a shipped recipe names and that is missing; None for any other."""
    return _WAYS.get(Path(path).as_posix())

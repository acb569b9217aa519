"""Where a result comes from, and the file of a benchmark's result, `<folder>/<bench>_<name>.json`:

    bench commit source_digest date machine versions command rows

`rows` is a list of flat objects, one per precision and workload. A file may have further such lists, such as the
kernels of a profile. `commit` is OCTETRL_COMMIT if it is set (for a copy of the files without git). Otherwise it is the
checkout's commit, or the version of an installed package.

A commit's name may be wrong for a tree with other changes. `source_digest` shows that, because it is computed from the
package's files. A result of a script in `lab/` also has `benchmarks_digest`, computed from every `.py` file there.

    python -m octetrl.telemetry.provenance                   digest of the files that this Python imports
    python -m octetrl.telemetry.provenance COMMIT            digest of the package in that commit; needs git
    python -m octetrl.telemetry.provenance --lab [COMMIT]    the same of the scripts in lab/

Both digests are equal for a clean checkout, and for a copy of its files without .git. A digest is a hash of one line
per file, `<git's id of its content> <path inside the package>`, sorted by path. The id of a file is the SHA-1 of
`blob <size>\\0<content>`. Every file in `octetrl/` counts, also one that is not in git, except `__pycache__` and
`octetrl/recipes`, a link to the recipes, which are not code.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from octetrl.system.text import counted

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent  # root of the checkout, if there is one
LAB = ROOT / "lab"  # only in a checkout
SCRIPTS = ".py"  # ending of the files that count there; results are in the same folder
DIGITS = 16
NOT_COUNTED = {"__pycache__", "recipes"}
Rows = Sequence[Mapping[str, object]]


def write_result(bench: str, name: str, rows: Rows, folder: Path, **further: Rows) -> Path:
    """Write the rows to a file and return its path. further: more lists of rows, by their key in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bench}_{name}.json"
    record = {
        "bench": bench,
        **provenance(),
        "command": _command(),
        "rows": list(rows),
        **{key: list(more) for key, more in further.items()},
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def provenance() -> dict[str, object]:
    """Where and by which files this process measures: the fields of a result from `commit` to `versions`."""
    is_of_lab = Path(sys.argv[0]).resolve().is_relative_to(LAB)
    where = where_it_runs()
    return {
        "commit": where["commit"],
        "source_digest": source_digest(),
        **({"benchmarks_digest": source_digest(LAB, SCRIPTS)} if is_of_lab else {}),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": where["machine"],
        "versions": where["versions"],
    }


def where_it_runs() -> dict[str, object]:
    """Commit, machine and versions of this process."""
    if torch.cuda.is_available():
        machine = torch.cuda.get_device_name()
    else:
        machine = f"{platform.processor() or platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"
    versions = {}
    for package in ("torch", "triton", "transformers"):
        with suppress(PackageNotFoundError):  # triton exists only for Linux
            versions[package] = version(package)
    return {"commit": os.environ.get("OCTETRL_COMMIT") or _commit(), "machine": machine, "versions": versions}


@cache
def _commit() -> str:
    if (ROOT / ".git").exists() and shutil.which("git") is not None:
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        said = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
        if said:
            return said
    installed = ROOT / "octetrl" / "commit.txt"  # written by setup.py
    if installed.is_file():
        return installed.read_text(encoding="utf-8").strip()
    try:
        return version("octetrl")
    except PackageNotFoundError:
        return "unknown"


def _command() -> str:
    """Return the command as typed, without `--out`, which is a path on one machine.

    Examples: `octetrl bench rollout ...`, or from the checkout `python -m lab.algorithms --steps 20`."""
    script = Path(sys.argv[0]).resolve()
    words = [script.name]
    if script.suffix == ".py" and script.is_relative_to(ROOT):
        words = ["python", "-m", ".".join(script.relative_to(ROOT).with_suffix("").parts)]
    arguments = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    if "--out" in arguments:
        place = arguments.index("--out")
        del arguments[place : place + 2]
    return shlex.join([*words, *arguments])


def source_digest(folder: Path = PACKAGE, ending: str = "") -> str:
    """Compute the digest of the files on disk in `folder` whose names have that ending."""
    files = ((path, path.relative_to(folder)) for path in folder.rglob(f"*{ending}") if path.is_file())
    kept = ((path, inside) for path, inside in files if not NOT_COUNTED & set(inside.parts))
    return _digest({inside.as_posix(): _blob_id(path.read_bytes()) for path, inside in kept})


def digest_of_commit(commit: str, folder: Path = PACKAGE, ending: str = "") -> str | None:
    """Compute the digest of the files in `commit`. None: git, the repository, the commit or the folder in it is
    missing."""
    if shutil.which("git") is None or not folder.parent.is_dir():
        return None
    tree = f"{commit}:./{folder.name}"
    command = ["git", "-C", str(folder.parent), "ls-tree", "-r", "-z", "--full-tree", tree]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        return None
    entries = (entry.partition("\t") for entry in listed.stdout.split("\0") if entry)
    kept = ((about, path) for about, _, path in entries if path.endswith(ending))
    return _digest({path: about.split()[2] for about, path in kept if not NOT_COUNTED & set(path.split("/"))})


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest(ids: Mapping[str, str]) -> str:
    lines = "".join(f"{ids[path]} {path}\n" for path in sorted(ids))
    return hashlib.sha256(lines.encode()).hexdigest()[:DIGITS]


def main(arguments: list[str]) -> int:
    """Print one digest. Exit status 2: the commit is unknown."""
    of_scripts = arguments[:1] == ["--lab"]
    place = (LAB, SCRIPTS) if of_scripts else (PACKAGE, "")
    commits = arguments[of_scripts:]
    if not commits:
        print(source_digest(*place))
        return 0
    found = digest_of_commit(commits[0], *place)
    print(found or f"git has no commit '{commits[0]}' here; give one of this checkout")
    return 0 if found else 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

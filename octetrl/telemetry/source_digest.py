"""Compute a digest of the package's files, which identifies the code that measured a result.

    python -m octetrl.telemetry.source_digest            digest of the files that this Python imports
    python -m octetrl.telemetry.source_digest COMMIT     digest of the package in that commit; needs git
    python -m octetrl.telemetry.source_digest --lab [COMMIT]

Both digests are equal for a clean checkout, and for a copy of its files without .git.

The digest is a hash of one line per file, `<git's id of its content> <path inside the package>`, sorted by path. git
stores the ids of a commit. The id of a file is the SHA-1 of `blob <size>\\0<content>`. Every file in `octetrl/` counts,
also one that is not in git, except `__pycache__` and `octetrl/recipes`, a link to the recipes, which are not code.

`--lab` prints the digest of every `.py` file in `lab/` instead. The result of such a script contains both digests.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
LAB = PACKAGE.parent / "lab"  # only in a checkout
SCRIPTS = ".py"  # ending of the files that count there; results are in the same folder
DIGITS = 16
NOT_COUNTED = {"__pycache__", "recipes"}


def source_digest(folder: Path = PACKAGE, ending: str = "") -> str:
    """Compute the digest of the files on disk in `folder` whose names have that ending."""
    files = ((path, path.relative_to(folder)) for path in folder.rglob(f"*{ending}") if path.is_file())
    counted = ((path, inside) for path, inside in files if not NOT_COUNTED & set(inside.parts))
    return _digest({inside.as_posix(): _blob_id(path.read_bytes()) for path, inside in counted})


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
    counted = ((about, path) for about, _, path in entries if path.endswith(ending))
    return _digest({path: about.split()[2] for about, path in counted if not NOT_COUNTED & set(path.split("/"))})


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _digest(ids: Mapping[str, str]) -> str:
    lines = "".join(f"{ids[path]} {path}\n" for path in sorted(ids))
    return hashlib.sha256(lines.encode()).hexdigest()[:DIGITS]


def main(arguments: list[str]) -> int:
    """Print one digest. Exit status 2: the commit is unknown."""
    of_scripts = arguments[:1] == ["--lab"]
    counted = (LAB, SCRIPTS) if of_scripts else (PACKAGE, "")
    commits = arguments[of_scripts:]
    if not commits:
        print(source_digest(*counted))
        return 0
    found = digest_of_commit(commits[0], *counted)
    print(found or f"source_digest: git knows no commit '{commits[0]}' here; give one of this checkout")
    return 0 if found else 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Imports point down, heavy packages stay where they belong, and the light rooms start without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator

import networkx

from tests.house.tree import REPO, python_files, syntax

BASE = {"config", "records", "shapes", "system", "version"}  # every room with an entry below may import these
NUMERICS = {"fp8", "kernels", "layers", "models"}
ARROWS: dict[str, set[str]] = {
    **{room: set() for room in ("version", "system", "records")},
    "shapes": {"system"},
    "config": {"shapes", "system"},
    "fp8": {"config", "shapes", "system"},
    "kernels": {"fp8", "config", "shapes", "system"},
    "layers": {"kernels", "fp8", "config", "shapes", "system"},
    "models": {"layers", "kernels", "fp8", "config", "shapes", "system"},
    **{room: BASE for room in ("algorithms", "endpoint", "process", "telemetry")},
    "boxes": {"process", *BASE},
    "environments": {"endpoint", "process", "boxes", *BASE},
    **{room: {"environments", "process", *BASE} for room in ("data", "rollout")},
    "engine": NUMERICS | BASE,
    "trainer": {"algorithms", *NUMERICS, *BASE},
    "backends": {"engine", "endpoint", *NUMERICS, *BASE},  # other engines, which are ours to drive
}
ARROWS["agents"] = {"server", "rollout", "engine", "environments", *BASE}
ARROWS["workers"] = set(ARROWS) - {"agents", "endpoint", "process", "workers"}
ARROWS["run"] = set(ARROWS)
ARROWS["server"] = {"run", "engine", "rollout", "environments", "telemetry", *BASE}  # HTTP: only cli imports it
ARROWS["doctor"] = set(ARROWS)
ARROWS["bench"] = set(ARROWS) - {"doctor"}
ARROWS["cli"] = set(ARROWS)
ARROWS["api"] = set(ARROWS) - {"cli", "doctor", "bench", "server"}  # only octetrl/__init__.py imports it

ONLY_IN: dict[str, set[str]] = {
    "lab": set(),  # the scripts behind our own figures: not shipped
    "ray": {"octetrl/workers/ray.py", "octetrl/workers/ray_cluster.py"},
    **{name: {"octetrl/telemetry/curves.py"} for name in ("wandb", "mlflow", "trackio", "swanlab")},
    "starlette": {
        f"octetrl/{name}.py"
        for name in ("server/app", "server/endpoints", "server/serve", "server/watch", "agents/server")
    },
    "vllm": {f"octetrl/backends/vllm/{name}.py" for name in ("start",)},
    "uvicorn": {"octetrl/server/http_server.py", "octetrl/server/watch.py", "octetrl/agents/server.py"},
    "llguidance": {"octetrl/engine/grammars.py"},
    "fsspec": {"octetrl/run/store.py"},
    "huggingface_hub": {"octetrl/run/hub.py", "octetrl/run/model_source.py"},
    "prometheus_client": {"octetrl/server/meters.py", "octetrl/server/serve.py"},
    "transformers": {
        *(f"octetrl/models/transformers_{name}.py" for name in ("decoder", "shape")),
        "octetrl/data/tokenizer.py",
        "octetrl/run/tiny_model.py",
    },
}
TORCH_FREE = ("records", "system", "shapes", "config", "endpoint", "process", "environments", "rollout", "data")
TORCH_FREE_FILES = (
    "octetrl.telemetry.metrics",
    "octetrl.fp8.architectures",
    "octetrl.fp8.policy",
    "octetrl.models.families",
    "octetrl.models.weight_files",
    "octetrl.cli.check",
    "octetrl.cli.main",
    "octetrl.cli.status",
    "octetrl.models.row_shards",
    "octetrl.api.train",
    "octetrl.run.recipe_files",
    "octetrl.run.model_source",
    "octetrl.run.store",
    "octetrl.server.watch",
)


def imports(path: str) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of each import; `from octetrl import records` counts as octetrl.records."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            names = [f".{alias.name}" for alias in node.names] if node.module == "octetrl" else [""]
            yield from ((f"{node.module}{name}", node.lineno) for name in names)


def files_imported(path: str, files: Collection[str]) -> Iterator[str]:
    """The package's files that a file imports: at its top, for types alone, or inside a function."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:  # of a module, of a name in a module, or of a package
            parts = name.split(".")
            candidates = ("/".join(parts), "/".join(parts[:-1]))
            found = (f"{place}{end}" for place in candidates for end in (".py", "/__init__.py"))
            yield from [file for file in found if file in files][:1]


def room_of(path: str) -> str:
    return path.removeprefix("octetrl/").split("/")[0].removesuffix(".py")


def test_every_room_has_its_arrows() -> None:
    rooms = {room_of(path) for path in python_files("octetrl")} - {"__init__", "__main__"}
    assert rooms == set(ARROWS), "a room joined or left: say in ARROWS what it may import"


def test_imports_point_down() -> None:
    wrong = [
        f"{path}:{line}: {room} may not import {imported}"
        for path in python_files("octetrl")
        if (room := room_of(path)) in ARROWS.keys() - {"records"}  # which names types alone
        for name, line in imports(path)
        if name.startswith("octetrl.") and (imported := name.split(".")[1]) not in {room, *ARROWS[room]}
    ]
    assert not wrong, "\n".join(wrong)


def test_files_do_not_import_in_circles() -> None:
    files = python_files("octetrl")
    graph = networkx.DiGraph((path, imported) for path in files for imported in files_imported(path, set(files)))
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(graph) if len(circle) > 1]
    assert not circles, "\n".join(", ".join(circle) for circle in circles)


def test_heavy_packages_stay_in_their_files() -> None:
    for path in python_files("octetrl"):
        for name, line in imports(path):
            package = name.split(".")[0]
            assert path in ONLY_IN.get(package, {path}), f"{path}:{line}: {package} belongs in {ONLY_IN[package]}"
            assert package != "triton" or room_of(path) == "kernels", f"{path}:{line}: triton belongs in kernels/"


def test_tests_of_ray_are_skipped_where_it_is_not_installed() -> None:
    """They import it from tests/e2e/installed_ray.py before the files that need it."""
    need = {path.removesuffix(".py").replace("/", ".") for path in ONLY_IN["ray"]}
    for path in (path for path in python_files("tests") if "/test_" in path):
        tops = [node for node in syntax(path).body if isinstance(node, ast.ImportFrom)]
        names = [part for node in tops for one in node.names for part in (f"{node.module}.{one.name}", node.module)]
        first = next((place for place, name in enumerate(names) if name in need), 0)
        assert not first or "tests.e2e.installed_ray" in names[:first], path


def test_light_rooms_import_without_torch() -> None:
    light = [path for path in python_files("octetrl") if room_of(path) in TORCH_FREE]
    modules = [path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in light]
    assert all((REPO / f"{name.replace('.', '/')}.py").exists() for name in TORCH_FREE_FILES)
    modules += TORCH_FREE_FILES
    script = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"  # an import of it now raises
        "failed = []\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError as error: failed.append(f'{name}: {error}')\n"
        "sys.exit('\\n'.join(failed) or 0)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, *modules], cwd=REPO, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

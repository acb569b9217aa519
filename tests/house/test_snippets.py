"""Every snippet of README, docs and lab's pages runs, with its imports, or says in an invisible marker why not.

- Python: the blocks of a page run one after another in one namespace. `RUN_ELSEWHERE` names the test that runs a page
  which needs more than that.
- YAML: a block is part of a recipe, and its fields resolve. Those below `<!-- lines of: RECIPE -->` are lines of that
  recipe; those of start.md are whole recipes and pass `octetrl check`.
- Shell: every command of ours parses with the real command line, its files exist, its modules are found.
- JSON: a block is one value, or several.

A block that cannot run has `<!-- not run: why -->` in the line above it.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from octetrl.cli.main import run_command
from octetrl.config.load import recipe_from_mapping
from octetrl.run.tiny_model import TOOL_TEMPLATE
from tests.e2e.tiny_run import make_model
from tests.house.markdown import commands
from tests.house.shown_commands import check_command
from tests.house.tree import LAB_PAGES, REPO

PAGES = [
    *("README.md", "CONTRIBUTING.md"),
    *sorted(f"docs/{path.name}" for path in (REPO / "docs").glob("*.md")),
    *(str(path.relative_to(REPO)) for path in LAB_PAGES),
]
RUN_ELSEWHERE = {
    "README.md": "tests/e2e/test_library_page.py",
    "docs/coming_from.md": "tests/e2e/test_library_page.py",
    "docs/index.md": "tests/e2e/test_library_page.py",
    "docs/library.md": "tests/e2e/test_library_page.py",
    "docs/server.md": "tests/e2e/test_serve_command.py",
}
CHECKED_AS_FILES = ("docs/recipes.md", "docs/start.md")
LANGUAGES = {"python", "yaml", "bash", "json", "text", ""}  # the last two: output, file trees


class Snippet(NamedTuple):
    page: str
    line: int
    language: str
    text: str
    reason: str | None  # of `<!-- not run: reason -->`


def snippets_of(page: str, document: str) -> list[Snippet]:
    found = []
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```[ \t]*$", document, flags=re.MULTILINE | re.DOTALL):
        before = document[: match.start()]
        reason = re.search(r"<!-- not run: (.+?) -->\n\Z", before, flags=re.DOTALL)
        line = before.count("\n") + 1
        found.append(Snippet(page, line, match[1].strip(), match[2], reason[1] if reason else None))
    return found


SNIPPETS = [one for page in PAGES for one in snippets_of(page, (REPO / page).read_text(encoding="utf-8"))]


def to_run(language: str) -> list[Snippet]:
    return [one for one in SNIPPETS if one.language == language and one.reason is None]


def name(snippet: Snippet) -> str:
    return f"{snippet.page}:{snippet.line}"


def run_python(page: str, snippets: list[Snippet]) -> dict[str, Any]:
    """Run the blocks of a page. A failure names the page and the line."""
    names: dict[str, Any] = {"__name__": "docs"}
    for one in snippets:
        exec(compile("\n" * one.line + one.text, page, "exec", dont_inherit=True), names)
    return names


def check_yaml(snippet: Snippet) -> None:
    for part in yaml.safe_load_all(snippet.text):
        single = {} if "environments" in part else {"environment": {"dataset": "chain_sum"}}
        tree = {"model": {"path": "m"}, **single, **part}
        tree["model"] = {"path": "m"} | tree["model"]
        recipe_from_mapping(tree, name(snippet))


@pytest.mark.parametrize("page", sorted({one.page for one in to_run("python")} - set(RUN_ELSEWHERE)))
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page, [one for one in to_run("python") if one.page == page])


@pytest.mark.parametrize(("page", "test"), RUN_ELSEWHERE.items())
def test_the_other_pages_run_in_the_test_that_is_named(page: str, test: str) -> None:
    text = (REPO / test).read_text(encoding="utf-8")
    assert page.removeprefix("docs/") in text and ("exec(" in text), f"{test} does not run {page}"
    assert any(one.page == page for one in to_run("python")), f"{page} has no Python; take it out of RUN_ELSEWHERE"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_do_as_shown(page: str) -> None:
    """YAML is part of a recipe, commands parse, JSON is JSON, languages are known, and what is not run says why."""
    for snippet in (snippet for snippet in SNIPPETS if snippet.page == page):
        assert snippet.language in LANGUAGES, f"{name(snippet)}: {snippet.language}"
        if snippet.reason is not None:
            assert len(snippet.reason) > 20, f"{name(snippet)}: say why it is not run"
        elif snippet.language == "yaml" and page not in CHECKED_AS_FILES:
            check_yaml(snippet)
        elif snippet.language == "bash" and snippet.text.startswith("curl"):
            shlex.split(snippet.text)  # tests/e2e/test_serve_command.py runs it
        elif snippet.language == "bash":
            for command in commands(f"```bash\n{snippet.text}```\n"):
                check_command(command)
        elif snippet.language == "json":
            rest = snippet.text.strip()
            while rest:
                rest = rest[json.JSONDecoder().raw_decode(rest)[1] :].strip()


def refuse_folder_of_the_demo(text: str) -> None:
    """Raise for a command that trains in a folder where `octetrl demo` has left a run: it would be refused."""
    joined = text.replace("\\\n", " ")
    for recipe, rest in re.findall(r"octetrl train (demo_\w+)((?:\s+[\w.-]+=[^\s`]*|\s+--\w+)*)", joined):
        words = rest.split()
        given = [word.partition("=")[2] for word in words if word.startswith("output_dir=")]
        shipped = yaml.safe_load((REPO / f"octetrl/recipes/{recipe}.yaml").read_text(encoding="utf-8"))
        folder = [shipped.get("output_dir"), *given][-1]
        is_taken = folder in ("runs/demo/grpo", "runs/demo/sft") and "--resume" not in words
        assert not is_taken, f"octetrl train {recipe}: `octetrl demo` has a run in {folder}; give output_dir=..."


def test_commands_leave_the_runs_of_the_demo_alone() -> None:
    for page in [*PAGES, *(f"examples/{path.name}" for path in (REPO / "examples").glob("*.py"))]:
        refuse_folder_of_the_demo((REPO / page).read_text(encoding="utf-8"))


# ---------------------------------------------------------------- recipes on pages

QUOTE = re.compile(r"^<!-- lines of: (\S+) -->\n```yaml\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
WHOLE = ("recipes/bases/grpo_1gpu.yaml", "recipes/grpo_gsm8k_qwen3-0.6b_1gpu_fp8-full.yaml")


def fields_of(recipe: str) -> str:
    """The recipe's lines without comments, those behind values included."""
    lines = (REPO / recipe).read_text(encoding="utf-8").splitlines()
    kept = (re.sub(r"\s+# .*", "", line) for line in lines if not line.startswith("#"))
    return "".join(f"{line}\n" for line in kept)


def test_quoted_lines_are_in_the_recipe_and_two_recipes_are_explained_whole() -> None:
    pages = [(REPO / page).read_text(encoding="utf-8") for page in ("docs/recipes.md", "docs/tutorial.md")]
    quotes = [quote for page in pages for quote in QUOTE.findall(page)]
    assert len(quotes) == sum(page.count("```yaml") for page in pages) > 4, "every block names its recipe"
    for recipe, lines in quotes:
        assert f"\n{lines}" in f"\n{fields_of(recipe)}", f"{recipe} does not have these lines: {lines}"
    for whole in WHOLE:
        assert "".join(lines for recipe, lines in quotes if recipe == whole) == fields_of(whole)


START = [snippet for snippet in SNIPPETS if snippet.page == "docs/start.md"]
FILES = {one.text.splitlines()[0].removeprefix("# "): one.text for one in START if one.text.startswith("# ")}
START_RECIPES = ["grpo.yaml", "sft.yaml", "dpo.yaml", "ppo.yaml", "tools.yaml", "game.yaml"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of docs/start.md, its rows with a hundred prompts, and a tiny model by the page's name."""
    folder = tmp_path_factory.mktemp("project")
    model = make_model(folder / "Qwen/Qwen3-0.6B", max_position_embeddings=4096)
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    for file, text in FILES.items():
        (folder / file).write_text(text)
    rows = [json.loads(snippet.text) for snippet in START if snippet.language == "json"]
    for file, row in zip(("tasks", "chat", "pairs"), rows, strict=True):
        lines = [json.dumps(row).replace("17 + 25", f"{number} + 25") for number in range(100)]
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("recipe", START_RECIPES)
def test_a_recipe_of_the_start_page_passes_check(
    recipe: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [file for file in FILES if file.endswith(".yaml")] == START_RECIPES, "one a method"
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    longer = ["rollout.max_prompt_tokens=1000"] if recipe == "tools.yaml" else []  # a byte is a token here
    code = run_command(["check", recipe, "cluster.device=cpu", *longer])
    shown = capsys.readouterr()
    assert code == 0 and "no problems" in shown.out, shown.err


# ---------------------------------------------------------------- what these tests would notice

BAD = """\
```python
import octetrl.no_such_module
```

```yaml
rollout: {group_sze: 4}
```

```bash
python -m lab.no_such_script
```

<!-- not run: it needs the internet -->
```python
import no_such_package
```
"""


def test_wrong_snippets_are_noticed() -> None:
    python, part, shell, left_out = snippets_of("bad.md", BAD)
    assert left_out.reason == "it needs the internet" and python.reason is None and shell.line == 9
    with pytest.raises(ModuleNotFoundError):
        run_python("bad.md", [python])
    with pytest.raises(ValueError, match="group_size"):
        check_yaml(part)
    with pytest.raises(AssertionError, match="no module"):
        check_command(shell.text)
    for command in ("octetrl train demo_grpo cluster.cpus=2", "octetrl train demo_sft", "octetrl train demo_grpo"):
        with pytest.raises(AssertionError, match=r"give output_dir=\.\.\."):
            refuse_folder_of_the_demo(f"text `{command}` text output_dir=runs/x")
    refuse_folder_of_the_demo("`octetrl train demo_grpo steps=2 \\\n    output_dir=runs/x`, `octetrl train demo_dapo`")


@pytest.mark.parametrize(
    "command",
    [
        "make demonstrate",
        "octetrl trian recipes/demo_grpo.yaml",
        "octetrl train recipes/no_such_recipe.yaml",
        "octetrl train recipes/demo_grpo.yaml --resumee",
        "octetrl train recipes/demo_grpo.yaml rollout.group_sze=4",
        "python examples/no_such_example.py",
    ],
)
def test_a_wrong_command_is_noticed(command: str) -> None:
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        check_command(command)


def test_right_commands_pass() -> None:
    document = "```bash\nmake test   # about ten minutes\nmake demo PYTHON=python3\n$ ls recipes/\n```\n"
    assert list(commands(document)) == ["make test", "make demo PYTHON=python3", "ls recipes/"]
    for command in commands(document):
        check_command(command)

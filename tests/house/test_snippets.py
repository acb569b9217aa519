"""Every snippet of README, docs and lab's pages runs, with its imports, or says in an invisible marker why not.

- Python: the blocks of a page run one after another in one namespace. `RUN_ELSEWHERE` names the test that runs a page
  which needs more than that.
- YAML: a block is part of a recipe, and its fields resolve. Those of recipes.md are compared with the recipes; those
  of start.md are whole recipes and pass `octetrl check` (test_start_page.py).
- Shell: every command of ours parses with the real command line, its files exist, its modules are found.
- JSON: a block is one value, or several.

A block that cannot run has `<!-- not run: why -->` in the line above it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from typing import Any, NamedTuple

import pytest
import yaml

from octetrl.config.load import recipe_from_mapping
from tests.house.markdown import commands
from tests.house.test_readme import check_command
from tests.house.tree import LAB_PAGES, REPO

PAGES = [
    *("README.md", "CONTRIBUTING.md"),
    *sorted(f"docs/{path.name}" for path in (REPO / "docs").glob("*.md")),
    *(str(path.relative_to(REPO)) for path in LAB_PAGES),
]
RUN_ELSEWHERE = {
    "README.md": "tests/e2e/test_library_page.py",
    "docs/index.md": "tests/e2e/test_library_page.py",
    "docs/library.md": "tests/e2e/test_library_page.py",
    "docs/server.md": "tests/e2e/test_serve_command.py",
    "docs/environment_tools.md": "tests/house/test_environment_tools.py",
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


def check_shell(command: str) -> None:
    """A command of ours as the README's test has it; a module or a script that Python runs exists."""
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None, f"'{command}': there is no module {words[2]}"
    check_command(command)


@pytest.mark.parametrize("page", sorted({one.page for one in to_run("python")} - set(RUN_ELSEWHERE)))
def test_python_runs(page: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(page, [one for one in to_run("python") if one.page == page])


@pytest.mark.parametrize(("page", "test"), RUN_ELSEWHERE.items())
def test_the_other_pages_run_in_the_test_that_is_named(page: str, test: str) -> None:
    text = (REPO / test).read_text(encoding="utf-8")
    assert page.removeprefix("docs/") in text and ("exec(" in text), f"{test} does not run {page}"
    assert any(one.page == page for one in to_run("python")), f"{page} has no Python; take it out of RUN_ELSEWHERE"


@pytest.mark.parametrize("snippet", [one for one in to_run("yaml") if one.page not in CHECKED_AS_FILES], ids=name)
def test_yaml_is_a_part_of_a_recipe(snippet: Snippet) -> None:
    check_yaml(snippet)


@pytest.mark.parametrize("snippet", to_run("bash"), ids=name)
def test_commands_do_as_shown(snippet: Snippet) -> None:
    if snippet.text.startswith("curl"):  # tests/e2e/test_serve_command.py runs it
        shlex.split(snippet.text)
        return
    for command in commands(f"```bash\n{snippet.text}```\n"):
        check_shell(command)


@pytest.mark.parametrize("snippet", to_run("json"), ids=name)
def test_json_is_json(snippet: Snippet) -> None:
    rest = snippet.text.strip()
    while rest:
        _, end = json.JSONDecoder().raw_decode(rest)
        rest = rest[end:].strip()


def test_every_snippet_has_a_known_language() -> None:
    unknown = [f"{name(one)}: {one.language}" for one in SNIPPETS if one.language not in LANGUAGES]
    assert not unknown


def test_a_reason_is_a_sentence() -> None:
    for one in SNIPPETS:
        assert one.reason is None or len(one.reason) > 20, f"{name(one)}: say why it is not run"


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


EXAMPLES = sorted(f"examples/{path.name}" for path in (REPO / "examples").glob("*.py"))


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES])
def test_commands_leave_the_runs_of_the_demo_alone(page: str) -> None:
    refuse_folder_of_the_demo((REPO / page).read_text(encoding="utf-8"))


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
        check_shell(shell.text)
    for command in ("octetrl train demo_grpo cluster.cpus=2", "octetrl train demo_sft", "octetrl train demo_grpo"):
        with pytest.raises(AssertionError, match=r"give output_dir=\.\.\."):
            refuse_folder_of_the_demo(f"text `{command}` text output_dir=runs/x")
    refuse_folder_of_the_demo("`octetrl train demo_grpo steps=2 \\\n    output_dir=runs/x`, `octetrl train demo_dapo`")

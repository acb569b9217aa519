"""The site made of these pages: `make docs` writes it to build/site/.

The pages are plain Markdown and read well without the site. What only the site needs is added here: the lists of recipe
fields and metrics, the order of the contents, the API's signatures and docstrings (`<!-- api: octetrl.train -->` in
api.md), and the figures on the first page, which are read from `lab/results/`.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

from octetrl.config import recipe_page
from octetrl.config.json_schema import recipe_json_schema
from octetrl.telemetry import glossary

HERE = Path(__file__).parent
REPO = HERE.parent

project = "OctetRL"
author = "the OctetRL authors"
html_title = "OctetRL"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["site"]
default_role = "code"
nitpicky = True
nitpick_ignore_regex = [("py:.*", r".*")]  # types in signatures; links between pages are checked
myst_heading_anchors = 4
myst_links_external_new_tab = True
suppress_warnings = ["config.cache"]
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_favicon = "site/favicon.svg"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_permalinks_icon = "#"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme_options = {
    "sidebar_hide_name": False,
    "light_css_variables": {
        "color-brand-primary": "#b34700",
        "color-brand-content": "#b34700",
        "color-brand-visited": "#8a4a1f",
        "color-sidebar-background": "#fbfaf8",
        "font-stack": "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', 'Noto Sans', sans-serif",
        "font-stack--monospace": "ui-monospace, SFMono-Regular, 'DejaVu Sans Mono', Menlo, Consolas, monospace",
        "admonition-font-size": "1rem",
    },
    "dark_css_variables": {
        "color-brand-primary": "#f0955a",
        "color-brand-content": "#f0955a",
        "color-brand-visited": "#d9a27c",
        "color-background-primary": "#12161b",
        "color-background-secondary": "#171c22",
        "color-sidebar-background": "#0e1216",
        "color-background-border": "#2a313a",
    },
}

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

# The table of contents, in order. tests/house/test_site.py checks that every page is in it once.
CONTENTS = {
    "Start": ["start", "coming_from", "tutorial", "recipes"],
    "Guides": [
        "library", "environments", "agents", "environment_tools", "sandbox", "data", "algorithms", "lora", "critic",
        "evaluation", "collapse", "server", "models", "scale", "engines", "memory", "troubleshooting",
    ],
    "Reference": ["commands", "recipe", "api", "metrics"],
    "How it works": ["architecture", "fp8", "parity", "contributing"],
    "Measurements": ["results", "negative_results"],
}  # fmt: skip
SHORT = {
    "tutorial": "Tutorial",
    "environments": "Environments",
    "environment_tools": "Tools and judges",
    "sandbox": "Sandbox",
    "data": "Data",
    "lora": "LoRA",
    "critic": "Critics and reward models",
    "evaluation": "Evaluation",
    "collapse": "When a run collapses",
    "scale": "From one GPU to many",
    "engines": "Rollout engines",
    "parity": "Parity",
    "library": "Python library",
    "negative_results": "What did not work",
    "coming_from": "Coming from TRL, verl or vLLM",
    "memory": "Memory and throughput",
    "troubleshooting": "Troubleshooting",
}


def tree_of_contents() -> str:
    """MyST's toctrees for the first page; the site's sidebar shows them."""
    parts = []
    for caption, pages in CONTENTS.items():
        entries = "\n".join(f"{SHORT[page]} <{page}>" if page in SHORT else page for page in pages)
        parts.append(f"```{{toctree}}\n:caption: {caption}\n:hidden:\n\n{entries}\n```\n")
    return "\n\n" + "\n".join(parts)


# ---------------------------------------------------------------- figures of the first page


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a result."""
    result = json.loads((REPO / "lab/results" / f"{name}.json").read_text(encoding="utf-8"))
    return list(result["rows"])


def tiles() -> str:
    """Four measured figures as HTML. Every number is read from a result, none is written here."""
    step = {row["precision"]: row for row in rows("step_qwen3-8b")}
    rollout = {row["precision"]: row for row in rows("rollout_qwen3-8b") if row["workload"] == "128x512+4096"}
    full, bf16 = rollout["fp8_full"], rollout["bf16"]
    cache = full["rollout/kv_capacity_tokens"] / bf16["rollout/kv_capacity_tokens"]
    shown = [
        (
            f"{step['fp8_full']['mismatch/max_abs_diff']:.1f}",
            "largest log-prob difference, engine − trainer",
            f"over {step['fp8_full']['mismatch/tokens']:,.0f} sampled tokens in FP8",
        ),
        (
            f"{step['fp8_full']['step/step_speedup_over_bf16']:.2f}×",
            "a whole GRPO step, against BF16",
            f"{step['fp8_full']['time/step']:.0f} s, against {step['bf16']['time/step']:.0f} s",
        ),
        (
            f"{full['rollout/speedup_over_bf16']:.2f}×",
            "generation, against BF16",
            f"{full['rollout/tokens_per_second']:,.0f} tokens/s, against {bf16['rollout/tokens_per_second']:,.0f}",
        ),
        (
            f"{cache:.1f}×",
            "tokens in the KV cache, against BF16",
            f"{full['rollout/kv_capacity_tokens']:,.0f} tokens in the same memory",
        ),
    ]
    cells = "".join(
        f'<div class="tile"><b>{number}</b><span>{what}</span><small>{detail}</small></div>'
        for number, what, detail in shown
    )
    return f'<div class="tiles">{cells}</div>'


# ---------------------------------------------------------------- docstrings


def field_comments(thing: type) -> list[str]:
    """The fields of a dataclass with the comments behind them, as a list."""
    fields = getattr(thing, "__dataclass_fields__", {})
    lines = inspect.getsource(thing).splitlines()
    found = (re.match(r"    (\w+): .*?  # (.+)$", line) for line in lines)
    return [f"* ``{match[1]}``: {match[2]}" for match in found if match and match[1] in fields]


def as_rest(text: str, names: list[str]) -> list[str]:
    """Our docstrings as reStructuredText: arguments become a field list, examples become code."""
    if names:  # "model: a folder. precision: what is FP8." is one paragraph in the source
        arguments = "|".join(map(re.escape, names))
        text = re.sub(rf"(?:(?<=[.;])\s+|^)({arguments}): ", r"\n:param \1: ", text, flags=re.MULTILINE)
        text = re.sub(rf"\n+(?=:param (?:{arguments}): )", "\n", text)
        text = re.sub(r"(?<!\n)\n(?=:param )", "\n", re.sub(r"([^\n])\n(?=:param )", r"\1\n\n", text, count=1))
    text = re.sub(r"^Example:\n(?=(?:    .*\n?)+)", "Example::\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^Example: (.+)$", r"Example: ``\1``", text, flags=re.MULTILINE)
    lines = text.splitlines()
    in_fields = False
    for number, line in enumerate(lines):
        in_fields = line.startswith(":param ") or (in_fields and bool(line))
        if in_fields and not line.startswith(":param "):
            lines[number] = "    " + line.strip()
    return lines


def on_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    try:
        names = [name for name in inspect.signature(thing).parameters if name != "self"]
    except (TypeError, ValueError):
        names = []
    text = "\n".join(lines)
    fields = field_comments(thing) if inspect.isclass(thing) else []
    if text.startswith(f"{name.rpartition('.')[2]}("):  # a dataclass without a docstring
        text = ""
    lines[:] = [*as_rest(text, names), "", *fields, ""]


# ---------------------------------------------------------------- pages


def on_source(app: Any, docname: str, source: list[str]) -> None:
    """Add what only the site has."""
    text = source[0]
    if docname == "index":
        text = text.replace("<!-- tiles -->", tiles()) + tree_of_contents()
    if docname == "recipe":
        text = recipe_page.page(recipe_json_schema())
    if docname == "metrics":
        text = glossary.page()
    if docname == "contributing":
        text = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")
    text = re.sub(r"\[([^\]]*)\]\((?:\.\./)?(lab/[^)#]+\.md)(?:#[^)]*)?\)", r"\1 (`\2`)", text)  # not on the site
    text = re.sub(r"^<!-- api: (\w+) (\S+)(?: \| ([\w ]+))? -->$", directive, text, flags=re.MULTILINE)
    source[0] = re.sub(r"\]\(\.\./([^)#]+)\)", lambda found: link_outside(found[1]), text)


def directive(found: re.Match[str]) -> str:
    """autodoc's directive for `<!-- api: autoclass octetrl.LLM | members -->`."""
    options = "".join(f"   :{option}:\n" for option in (found[3] or "").split())
    return f"```{{eval-rst}}\n.. {found[1]}:: {found[2]}\n{options}```"


def link_outside(path: str) -> str:
    """A link to a file of the repository outside docs/: a page of the site, or else a copy of the file."""
    pages = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
    return f"]({pages.get(path, f'../{path}')})"


def on_page(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    if pagename == "index":
        context["body"] = f'<div class="landing">{context["body"]}</div>'
        context["furo_hide_toc"] = True


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", on_source)
    app.connect("autodoc-process-docstring", on_docstring)
    app.connect("html-page-context", on_page, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

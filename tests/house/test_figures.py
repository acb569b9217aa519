"""Every measured number of README, docs and lab is a result's, or says that it is not: figures.py has the rules."""

from __future__ import annotations

import json
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from lab import scaling, tutorial
from lab.picture import PICTURE, draw
from lab.record import RESULTS
from octetrl.telemetry.provenance import LAB, SCRIPTS, digest_of_commit
from tests.house.figures import NUMBER, check_paragraph, check_table, is_dirty, measured_rows
from tests.house.markdown import Table, paragraphs, tables
from tests.house.tree import LAB_PAGES, REPO

HEAD = {"bench", "commit", "date", "machine", "versions", "command", "rows"}
LAST_WITHOUT_DIGEST = "2026-11-22"
BEFORE_A_REBASE = {  # measured at a commit that a rebase replaced, so git has no files to compare the digest with
    "learning_smollm2-135m-instruct.json",
    "rollout_qwen3-8b_chunks_256.json",
    "rollout_qwen3-8b_lognormal_chunks_hints.json",
    "rollout_qwen3-8b_numerics_256.json",
    "step_qwen3-8b_16x8_chunks.json",
    "study_smollm2-words.json",
}
README = REPO / "README.md"
DOCUMENTS = (README, *sorted((REPO / "docs").glob("*.md")), *LAB_PAGES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_measured_number_is_a_results_or_says_where_it_comes_from(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    marked = [table for table in tables(text) if table.marker is not None]
    meant = [paragraph for paragraph in paragraphs(text) if paragraph.is_table and paragraph.file is not None]
    assert len(marked) == len(meant), "a marker stands right above its table"
    assert text.count("<!-- figures") == sum(paragraph.file is not None for paragraph in paragraphs(text))
    for table in marked:
        check_table(table, measured_rows(str(table.marker)))
    for paragraph in paragraphs(text):
        check_paragraph(paragraph)


def test_tables_of_the_readme_without_a_marker_hold_no_numbers() -> None:
    for table in tables(README.read_text(encoding="utf-8")):
        if table.marker is None:
            numbers = [number for cells in table.rows for cell in cells[1:] for number in NUMBER.findall(cell)]
            assert not numbers, f"table {table.header} shows {numbers} and names no file they come from"


def test_results_say_where_they_come_from() -> None:
    for path in sorted((REPO / "lab/results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        assert set(result) >= HEAD, f"{path.name} lacks {sorted(HEAD - set(result))}"
        assert result["date"] <= LAST_WITHOUT_DIGEST or "source_digest" in result, f"{path.name} has no source_digest"
        assert path.name.startswith(f"{result['bench']}_"), f"{path.name} is of bench '{result['bench']}'"
        for row in result["rows"]:
            flat = all(isinstance(value, str | int | float | bool | None) for value in row.values())
            assert flat, f"{path.name}: a row is a flat object"
            assert {"precision", "workload"} <= set(row), f"{path.name}: a row names its precision and workload"


@pytest.mark.skipif(digest_of_commit("HEAD") is None, reason="needs the repository's git")
def test_results_name_commits_that_git_has() -> None:
    shallow = subprocess.run(
        ["git", "-C", str(REPO), "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=True
    )
    if shallow.stdout.strip() == "true":
        pytest.skip("a shallow clone has no older commits")
    results = {path.name: json.loads(path.read_text()) for path in (REPO / "lab/results").glob("*.json")}
    unknown = {
        name
        for name, result in results.items()
        for commit in result["commit"].split(", ")  # of a study, whose runs may be of several
        if digest_of_commit(commit.removesuffix("-dirty")) is None
    }
    assert unknown == BEFORE_A_REBASE, "git does not have the commit of a result, or the list above names too many"


ROWS = [
    {"precision": "bf16", "workload": "64x512+1024", "tokens": 12345.6, "share": 0.0123},
    {"precision": "fp8", "workload": "64x512+1024", "tokens": 20001, "share": 1e-6},
    {"precision": "fp8", "workload": "8x512+4096", "tokens": 777, "mode": "fast"},
]
DIRTY = [row | {"dirty": row["precision"] == "fp8"} for row in ROWS]
Form = tuple[list[str], list[str]]  # header, columns of the marker
TOKENS: Form = (["", "tokens/s"], ["-", "tokens"])
BOTH: Form = (["", "tokens/s", "saturated"], ["-", "tokens", "share"])
MARKED: Form = (["", "tokens/s"], ["-", "tokens"])  # of results of a dirty tree
KEYED: Form = (["tokens", "share"], ["tokens", "share"])
OF_FP8: Form = (["tokens", "fp8"], ["-", "tokens[precision=fp8]"])
TWO: Form = (["", "64 × 512+1024", "share", "8x512+4096"], ["-", "tokens", "share", "tokens"])
OTHER_WORKLOAD = r"workload (64x512\+1024|8x512\+4096) does not hold"


DIRTY_TREE = "dirty tree"


@pytest.mark.parametrize(
    ("form", "cells", "says"),
    [
        (BOTH, ("`bf16`", "12,346", "1.2%"), None),
        (BOTH, ("`bf16`", "12.3k", "0.012"), None),
        (BOTH, ("`bf16`", "12346 a", "-"), None),
        (BOTH, ("`bf16`", "12,347", "-"), "does not hold"),
        (BOTH, ("`bf16`", "20,001", "-"), "does not hold"),  # another row's
        (BOTH, ("`bf16`", "-", "12,346"), "does not hold"),  # another column's
        (TOKENS, ("all", "777 to 20,001"), None),  # a range: the lowest to the highest
        (TOKENS, ("all", "777 to 12,346"), "does not hold"),
        ((BOTH[0], TOKENS[1]), ("`bf16`", "12,346", "1.2%"), "names 2 columns"),
        ((TOKENS[0], ["-", "-"]), ("`bf16`", "12,346"), "holds no measurement"),
        *((TOKENS, (label, "20,001"), None) for label in ("`fp8`", "**FP8**", "`fp8`, at `64x512+1024`")),
        *((TOKENS, (label, "12,346"), "does not hold") for label in ("`fp8`", "**FP8**")),
        *((TOKENS, (label, "20,001"), "no measured row holds") for label in ("`fp8`, `fp8_full`", "`slow`")),
        (KEYED, ("20,001", "0.0001%"), None),
        (KEYED, ("777", "1.2%"), "does not hold"),
        (OF_FP8, ("all", "20,001, 777"), None),
        (OF_FP8, ("all", "777, 20,001"), "does not hold"),
        (TWO, ("`fp8`", "20,001", "0.0001%", "777"), None),
        (TWO, ("`fp8`", "777", "-", "-"), OTHER_WORKLOAD),
        (TWO, ("`fp8`", "-", "-", "20,001"), OTHER_WORKLOAD),
        (MARKED, ("`fp8` †", "777"), None),
        (MARKED, ("`fp8`", "777"), DIRTY_TREE),
        (MARKED, ("`bf16` †", "12,346"), DIRTY_TREE),
    ],
)
def test_a_table_is_compared_with_its_rows(form: Form, cells: tuple[str, ...], says: str | None) -> None:
    with nullcontext() if says is None else pytest.raises(AssertionError, match=says):
        check_table(Table("a.json", form[0], [list(cells)], form[1]), DIRTY if form is MARKED else ROWS)


@pytest.mark.skipif(digest_of_commit("HEAD") is None, reason="needs the repository's git")
def test_a_result_is_of_a_dirty_tree_if_its_files_are_not_its_commits() -> None:
    digest = digest_of_commit("HEAD")
    assert not is_dirty({"commit": "HEAD", "source_digest": digest})
    assert is_dirty({"commit": "HEAD", "source_digest": "0" * 16})
    scripts = digest_of_commit("HEAD", LAB, SCRIPTS)
    assert not is_dirty({"commit": "HEAD", "source_digest": digest, "benchmarks_digest": scripts})
    assert is_dirty({"commit": "HEAD", "source_digest": digest, "benchmarks_digest": "0" * 16})
    assert is_dirty({"commit": "abc-dirty"}) and not is_dirty({"commit": "abc", "source_digest": "0" * 16})


RESULT = "lab/results/train_qwen3-8b_attention_remade.json"
TABLE = "| a | b |\n|---|---|\n| x | 1.5 |\n| y | 2 |"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("It takes 80.2 GB.", "measured numbers and no marker"),
        ("It is 1.35 times as fast.", "measured numbers and no marker"),
        ("    in a block: 15.1% of it", "measured numbers and no marker"),
        (TABLE, "measured numbers and no marker"),
        (f"<!-- figures: {RESULT} | memory/peak_gb -->\nIt takes 80.2 GB.", None),
        (f"<!-- figures: {RESULT} | memory/peak_gb -->\nIt takes 80.3 GB.", "holds no such value"),
        (f"<!-- figures: {RESULT} | train/tflops -->\nIt takes 80.2 GB.", "holds no such value"),
        (f"<!-- figures: {RESULT} | memory/peak_gb -->\nIt takes 80.2 GB †.", "dirty"),
        ("<!-- by hand: a run of yesterday -->\nIt takes 80.3 GB.", None),
        (f"<!-- by hand: a run of yesterday -->\n{TABLE}", None),
        ("<!-- by hand, the whole page: a diary -->\n\nIt takes 80.3 GB.", None),
        ("Twice 3 times, `5%`, [a link](b.md#5%), 10 s, 0.95 and 12 GPUs.", None),
        ("| a | default |\n|---|---|\n| x | 0.95 |\n| y | as `x` |", None),
        ("```\nIt takes 80.3 GB.\n```", None),
    ],
)
def test_prose_says_where_its_numbers_come_from(text: str, says: str | None) -> None:
    with nullcontext() if says is None else pytest.raises(AssertionError, match=says):
        for paragraph in paragraphs(f"# Title\n\n{text}\n"):
            check_paragraph(paragraph)


def test_a_marker_may_name_several_files() -> None:
    assert {"llama-3.1-8b", "qwen3-0.6b"} <= {row["file"] for row in measured_rows("lab/results/rollout_*.json")}
    first, second = (f"lab/results/step_qwen3-8b_2_gpus{end}.json" for end in ("", "_bf16"))
    rows = measured_rows(f"{first},{second}")
    assert [row["precision"] for row in rows] == ["fp8_full"] * 2 + ["bf16"] * 2
    assert {row["measured_model"] for row in rows} == {"qwen3-8b"}
    for absent in ("lab/results/no_such_*.json", f"{first},lab/results/no_such.json"):
        with pytest.raises(AssertionError, match="no file is"):
            measured_rows(absent)


# ---------------------------------------------------------------- pictures


def test_the_picture_is_of_the_present_results() -> None:
    drawn = PICTURE.read_text(encoding="utf-8")
    assert drawn == draw(RESULTS), "run `python -m lab.picture`"


def test_picture_and_table_of_several_gpus_are_of_the_present_results() -> None:
    points = [point for path in scaling.shown_on(scaling.PAGE) for point in scaling.read_points(path)]
    series = scaling.series_of(points)
    _, between, _ = scaling.split_page(scaling.PAGE)
    assert scaling.PICTURE.read_text(encoding="utf-8") == scaling.draw(series), "run `python -m lab.scaling`"
    assert between.strip() == scaling.table(series).strip(), "run `python -m lab.scaling`"


def test_the_tutorials_picture_is_of_its_result() -> None:
    result = json.loads((RESULTS / "tutorial_smollm2-135m-instruct_cpu.json").read_text(encoding="utf-8"))
    assert tutorial.PICTURE.read_text(encoding="utf-8") == tutorial.draw(result["rows"])

"""Reading a Markdown document as far as the house tests need: code blocks, tables, links, markers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Block(NamedTuple):
    language: str  # what follows the opening fence; "" for none
    text: str


class Table(NamedTuple):
    marker: str | None  # the file of `<!-- figures: path | column | column -->` right above the table
    header: list[str]
    rows: list[list[str]]
    columns: list[str]  # of the marker


class Paragraph(NamedTuple):
    """Lines without an empty one between them, outside fences, and what a comment in them says."""

    text: str
    file: str | None  # of `<!-- figures: path | field | field -->`
    fields: list[str]
    by_hand: bool  # `<!-- by hand: ... -->`, or the whole page is
    is_table: bool
    columns_of_cells: list[tuple[str, ...]]  # of a table, without its header and first column


def code_blocks(document: str) -> Iterator[Block]:
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```\s*$", document, flags=re.MULTILINE | re.DOTALL):
        yield Block(match[1].strip(), match[2])


def commands(document: str) -> Iterator[str]:
    """The lines of shell blocks, continuation lines joined, comments and prompts taken off."""
    for block in code_blocks(document):
        if block.language in ("bash", "sh", "console", "shell"):
            for line in block.text.replace("\\\n", " ").splitlines():
                command = re.sub(r"(^|\s)#.*", "", line).strip().removeprefix("$ ")
                if command:
                    yield command


def without_code(document: str) -> str:
    """The page without its code blocks and without inline code that looks like a link."""
    text = re.sub(r"^```.*?^```[ \t]*$", "", document, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*\]\([^`\n]*`", "", text)


def tables(document: str) -> Iterator[Table]:
    lines = re.sub(r"^```.*?^```\s*$", "", document, flags=re.MULTILINE | re.DOTALL).splitlines()
    for number, line in enumerate(lines):
        if number == 0 or not re.fullmatch(r"\s*\|?[\s:|-]*-[\s:|-]*\|?\s*", line) or "|" not in line:
            continue
        above = "\n".join(lines[max(0, number - 4) : number - 1])
        marker = re.search(r"<!-- figures: ([^\s|]+)((?: \| [^|]+)*) -->\s*\Z", above)
        rows = []
        for row in lines[number + 1 :]:
            if "|" not in row:
                break
            rows.append(_cells(row))
        columns = [column.strip() for column in marker[2].split("|")[1:]] if marker else []
        yield Table(marker[1] if marker else None, _cells(lines[number - 1]), rows, columns)


def paragraphs(document: str) -> Iterator[Paragraph]:
    """Every paragraph, list, table and indented block."""
    document = re.sub(r"^```.*?^```\s*$", "", document, flags=re.MULTILINE | re.DOTALL)
    page = re.search(r"^<!-- by hand, the whole page: .*?-->", document, flags=re.MULTILINE | re.DOTALL)
    for text in re.split(r"\n\s*\n", document):
        marker = re.match(r"<!-- figures: (.*?) -->", text)
        found = list(tables(text))
        yield Paragraph(
            text,
            file=marker[1].split(" | ")[0] if marker else None,
            fields=marker[1].split(" | ")[1:] if marker else [],
            by_hand=page is not None or "<!-- by hand: " in text,
            is_table=bool(found),
            columns_of_cells=[column for table in found for column in list(zip(*table.rows, strict=True))[1:]],
        )


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]

"""Reading a Markdown document as far as the house tests need: code blocks, tables, links, markers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Block(NamedTuple):
    language: str  # what follows the opening fence; "" for none
    text: str


class Table(NamedTuple):
    marker: str | None  # the JSON of `<!-- figures: path -->` right above the table
    header: list[str]
    rows: list[list[str]]


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


def links(document: str) -> list[str]:
    """Targets of links to files of the repository, anchors taken off."""
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", document)
    return [target.split("#")[0] for target in targets if "://" not in target and not target.startswith("#")]


def tables(document: str) -> Iterator[Table]:
    lines = re.sub(r"^```.*?^```\s*$", "", document, flags=re.MULTILINE | re.DOTALL).splitlines()
    for number, line in enumerate(lines):
        if number == 0 or not re.fullmatch(r"\s*\|?[\s:|-]*-[\s:|-]*\|?\s*", line) or "|" not in line:
            continue
        above = "\n".join(lines[max(0, number - 4) : number - 1])
        marker = re.search(r"<!--\s*figures:\s*(\S+)\s*-->\s*\Z", above)
        rows = []
        for row in lines[number + 1 :]:
            if "|" not in row:
                break
            rows.append(_cells(row))
        yield Table(marker[1] if marker else None, _cells(lines[number - 1]), rows)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]

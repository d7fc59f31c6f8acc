"""The pages of the documentation, and what the tests look up in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]

_FENCE = re.compile(r"^(```+|~~~+).*?^\1", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)


def name_of(page: Path) -> str:
    """Return a page's path as people write it."""
    return page.relative_to(ROOT).as_posix()


def prose_of(page: Path) -> str:
    """Return a page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that a page's headings make, as GitHub and MkDocs make them."""
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in _HEADING.findall(prose_of(page))]
    return {slug.replace(" ", "-") for slug in slugs}


def table_of(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without the table's own two heading lines."""
    section = f"\n{page.read_text()}".split(f"\n{heading}\n", 1)[1]
    lines: list[str] = []
    for line in section.splitlines():
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            break
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def code(cell: str) -> str:
    """Return the first code span of a table's cell."""
    found = re.search(r"`([^`]+)`", cell)
    assert found is not None, f"no code span in {cell!r}"
    return found[1]

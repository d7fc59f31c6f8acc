"""What the pages say of the package is what the package is, and what they point to is there."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

import fastapi_dedup
from fastapi_dedup import Claim, Dedup, DedupMiddleware, errors
from fastapi_dedup.batches import Batch, BatchOutcome, Entry
from fastapi_dedup.guard import GenerationalGuard
from fastapi_dedup.hooks import Event, EventKind
from fastapi_dedup.http.problems import KINDS, answer_to
from fastapi_dedup.messaging.envelope import Envelope
from fastapi_dedup.messaging.handler import Result
from fastapi_dedup.policy import Policy, failure_status
from fastapi_dedup.tables import claims_table
from tests.docs import support
from tests.docs.pages import DOCS, PAGES, ROOT, anchors_of, code, name_of, prose_of, table_of

REFERENCE = DOCS / "reference"
PROBLEMS = REFERENCE / "problems.md"

pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


# Links


@pages
def test_internal_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose_of(page))
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_the_index_lists_every_page() -> None:
    index = DOCS / "index.md"
    listed = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", index.read_text())}
    assert {page for page in DOCS.rglob("*.md") if page != index} <= listed


@pages
def test_no_page_promises_more_than_can_be_kept(page: Path) -> None:
    assert not re.search(r"exactly[\s-]+once", page.read_text(), re.IGNORECASE)


# Problems


def test_every_problem_s_type_leads_to_an_anchor_of_the_page() -> None:
    for kind in KINDS.values():
        address, _, anchor = kind.type.partition("#")
        page = DOCS / address.partition("/stable/")[2].rstrip("/")
        assert page.with_suffix(".md") == PROBLEMS
        assert anchor in anchors_of(PROBLEMS)


def test_the_page_of_problems_tells_status_title_and_retry_of_each_kind() -> None:
    sections = dict(
        re.findall(r"^## (\S+)\n\n(.*?)(?=^## |\Z)", PROBLEMS.read_text(), re.MULTILINE | re.DOTALL)
    )
    assert sections.keys() == {kind.slug for kind in KINDS.values()}
    for kind in KINDS.values():
        first_line = sections[kind.slug].partition("\n\n")[0]
        assert first_line.startswith(f"Status {kind.status}")
        assert f"*{kind.title}.*" in first_line
        assert ("Retry-After" in first_line) == kind.retry


def test_the_table_of_statuses_agrees_with_the_answers() -> None:
    rows = table_of(REFERENCE / "statuses.md", "# Statuses")
    told = {
        row[3].partition("#")[2].rstrip(")"): (int(row[1][:3]), "Retry-After" in row[2])
        for row in rows
        if row[3]
    }
    assert told == {kind.slug: (kind.status, kind.retry) for kind in KINDS.values()}
    seconds = dict(answer_to(errors.StoreUnavailableError()).headers)[b"retry-after"]  # type: ignore[union-attr]
    assert {row[2] for row in rows} == {"", f"`Retry-After: {seconds.decode()}`"}


# Options


def options_told(page: str, heading: str) -> dict[str, Any]:
    """Return the options that a table tells, with their defaults; `...` for those that it tells none of."""
    names = {
        "timedelta": timedelta,
        "failure_status": failure_status,
        "GenerationalGuard": GenerationalGuard,
    }
    return {
        code(option): eval(code(default), names) if default else ...  # noqa: S307 - a page of ours
        for option, default, _ in table_of(REFERENCE / page, heading)
    }


def options_of(call: Callable[..., Any]) -> dict[str, Any]:
    """Return the options that a callable takes, with their defaults."""
    parameters = inspect.signature(call).parameters.values()
    return {
        each.name: ... if each.default is each.empty else each.default
        for each in parameters
        if each.name not in {"self", "app"}
    }


def test_the_options_of_a_policy() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Policy)}
    assert options_told("policy.md", "## Options") == fields
    assert list(options_told("policy.md", "## Options")) == list(fields)


def test_the_options_of_dedup() -> None:
    assert options_told("dedup.md", "## Options") == options_of(Dedup)


def test_the_options_of_a_claim() -> None:
    assert options_told("dedup.md", "## dedup.claim") == options_of(Dedup.claim)


def test_the_options_of_a_batch() -> None:
    assert options_told("dedup.md", "## dedup.claim_many") == options_of(Dedup.claim_many)


def test_the_options_of_the_middleware() -> None:
    assert options_told("middleware.md", "## Options") == options_of(DedupMiddleware)


def test_the_members_of_dedup() -> None:
    rows = table_of(REFERENCE / "dedup.md", "## Members")
    told = {re.findall(r"\w+", code(row[0]).removeprefix("await "))[0] for row in rows}
    public = {name for name in dir(Dedup("sqlite:///x.db")) if not name.startswith("_")}
    # These are for the doors, the two that claim have tables of their own, and `window` is an option.
    for_doors = {"borrow", "delivery", "has_database", "intent", "place", "prepare", "required_of"}
    assert told == public - for_doors - {"claim", "claim_many", "window"}


# Values


def attributes_told(page: str, heading: str) -> list[str]:
    return [code(row[0]) for row in table_of(REFERENCE / page, heading)]


def test_the_attributes_of_a_claim() -> None:
    public = [field.name for field in dataclasses.fields(Claim) if not field.name.startswith("_")]
    assert attributes_told("policy.md", "## Claim") == [*public, "session"]


def test_the_members_of_a_batch_its_entries_and_outcomes() -> None:
    transaction: Any = None
    batch: Batch[str] = Batch([], transaction)
    public = {name for name in dir(batch) if not name.startswith("_")} | {*vars(batch)}
    assert {re.findall(r"\w+", name)[0] for name in attributes_told("batches.md", "## Batch")} == {
        name for name in public if not name.startswith("_")
    }
    assert attributes_told("batches.md", "## Entry") == [each.name for each in dataclasses.fields(Entry)]
    assert attributes_told("batches.md", "## BatchOutcome") == [each.value for each in BatchOutcome]


def test_the_attributes_of_an_event_and_its_kinds() -> None:
    assert attributes_told("events.md", "## Event") == [field.name for field in dataclasses.fields(Event)]
    assert attributes_told("events.md", "## Kinds") == [kind.value for kind in EventKind]


def test_the_results_of_a_message_and_the_attributes_of_an_envelope() -> None:
    results = table_of(REFERENCE / "messages.md", "## Results")
    assert [(code(row[0]), code(row[1]).strip('"')) for row in results] == [
        (result.name, result.value) for result in Result
    ]
    envelope = [field.name for field in dataclasses.fields(Envelope)]
    assert attributes_told("messages.md", "## Envelope") == envelope


def test_the_errors() -> None:
    page = REFERENCE / "errors.md"
    told = attributes_told("errors.md", "# Errors")
    assert {"DedupError", *told} == {*errors.__all__}
    assert set(re.findall(r"[├└]── (\w+)", page.read_text())) == {*told}
    exported = {name for name in errors.__all__ if hasattr(fastapi_dedup, name)}
    assert {*errors.__all__} - exported == {"PayloadTooLargeError"}


# The table of claims


@pytest.mark.parametrize(
    ("heading", "dialect"),
    [
        ("## PostgreSQL", postgresql.dialect()),  # type: ignore[no-untyped-call]
        ("## MariaDB and MySQL", mysql.dialect()),
        ("## SQLite", sqlite.dialect()),
    ],
)
def test_the_statements_are_what_sqlalchemy_makes(heading: str, dialect: Any) -> None:
    page = REFERENCE / "table.md"
    told = page.read_text().split(f"\n{heading}\n")[1].split("```sql\n")[1].split("```")[0]
    table = claims_table(MetaData())
    (index,) = table.indexes
    made = f"{CreateTable(table).compile(dialect=dialect)};{CreateIndex(index).compile(dialect=dialect)};"
    made = re.sub(" COMMENT '[^']*'", "", made)
    assert "".join(told.split()) == "".join(made.split())


def test_the_columns() -> None:
    assert attributes_told("table.md", "## Columns") == [
        column.name for column in claims_table(MetaData()).columns
    ]


# Databases


def test_the_table_of_databases_says_what_the_suite_goes_by() -> None:
    page = support.PAGE.read_text()
    assert page == support.written(page), "run python -m tests.docs.support"
    assert support.support() in page


# The front door


def test_the_readme_starts_with_a_sentence_the_problem_twelve_lines_two_commands_and_the_limits() -> None:
    first_screen = (ROOT / "README.md").read_text().split("\n## ")[0]
    (code_block,) = re.findall(r"```python\n(.*?)```", first_screen, re.DOTALL)
    (commands,) = re.findall(r"```sh\n(.*?)```", first_screen, re.DOTALL)
    assert len([line for line in code_block.splitlines() if line]) == 12
    assert [line.split()[:2] for line in commands.splitlines()] == [["make", "demo"], ["make", "test"]]
    assert "not promised" in first_screen

"""Every Python snippet of the documentation runs, page by page, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from fastapi_dedup.stores.engines import DATABASE_URL_VARIABLE
from tests.docs.pages import PAGES, name_of

SYBIL = Sybil(parsers=[PythonCodeBlockParser()], pattern="*.md")
WITH_SNIPPETS = [page for page in PAGES if "```python" in page.read_text()]

# Starlette's TestClient prefers httpx2 by now, and works with httpx.
pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx` with `starlette.testclient`")


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(DATABASE_URL_VARIABLE, raising=False)


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=name_of)
def test_the_snippets_of_a_page_run(page: Path) -> None:
    document = SYBIL.parse(page)
    document.namespace["__name__"] = page.stem
    examples = list(document.examples())
    assert examples
    for example in examples:
        example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_snippet_escapes(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"<!-+ *skip", text)
    languages = {*re.findall(r"^ *```+(\S+)", text, re.MULTILINE)}
    assert not languages & {"py", "py3", "python3", "pycon", "Python"}, "write ```python, and it is run"

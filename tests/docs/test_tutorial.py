"""The tutorial, followed to the letter: `app.py` as each step leaves it, and the requests that it sends."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from fastapi_dedup.stores.engines import DATABASE_URL_VARIABLE
from tests.docs.pages import DOCS
from tests.servers import driver_url, postgres_database

PAGE = DOCS / "tutorial" / "first-steps.md"

# What the requests of each step are answered with, as the page tells it.
ANSWERS = {
    "2. A service that doubles orders": [201, 201, ["A-1", "A-1"]],
    "3. The same service, deduplicated": [201, 409, ["A-1", "A-1", "A-2"]],
    "4. A failure gives the id back": [422, 422, 201],
    "5. Let the client name the intent": [201, 422],
}

pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx` with `starlette.testclient`")


def steps() -> Iterator[tuple[str, str, list[list[str]]]]:
    """Yield each step's heading, what `app.py` holds at its end, and the requests that it sends."""
    source = ""
    for section in PAGE.read_text().split("\n## ")[1:]:
        for block in re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
            # After the first step, a block is the new version of one function of the file.
            source = re.sub(r"@app\.post\(.*?(?=\n\n\n)", block.strip(), source, flags=re.DOTALL) or block
        commands = [shlex.split(line) for line in re.findall(r"^curl .*$", section, re.MULTILINE)]
        yield section.partition("\n")[0], source, commands


def send(client: Any, command: list[str]) -> Any:
    """Do what a `curl` command does; return the body of a GET, and the status of a POST."""
    url = next(word for word in command if word.startswith("localhost"))
    path = url.removeprefix("localhost:8000")
    if "--json" not in command:
        return client.get(path).json()
    headers = dict([command[command.index("-H") + 1].split(": ")]) if "-H" in command else {}
    body = json.loads(command[command.index("--json") + 1])
    return client.post(path, json=body, headers=headers).status_code


def follow(folder: Path) -> None:
    """Follow the tutorial in a folder."""
    from fastapi.testclient import TestClient  # noqa: PLC0415 - warns, and only tests may ignore that

    followed = []
    for heading, source, commands in steps():
        if heading not in ANSWERS:
            continue
        followed.append(heading)
        (folder / "app.py").write_text(source)
        app = runpy.run_path(str(folder / "app.py"), run_name="app")["app"]
        assert isinstance(app, FastAPI)
        with TestClient(app) as client:
            assert [send(client, command) for command in commands] == ANSWERS[heading], heading
    assert followed == list(ANSWERS)


def test_the_tutorial_keeps_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(DATABASE_URL_VARIABLE, raising=False)
    follow(tmp_path)
    assert (tmp_path / "fastapi_dedup.db").exists()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_the_tutorial_keeps_its_word_on_postgresql(
    driver: str, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgres_database(postgres_url) as url:
        monkeypatch.setenv(DATABASE_URL_VARIABLE, driver_url(url, driver))
        follow(tmp_path)

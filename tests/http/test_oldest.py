"""The oldest FastAPI that is supported keeps the main promises too.

`make test` builds the environment with the oldest versions that pyproject.toml admits, and names its
interpreter in FASTAPI_DEDUP_OLDEST_PYTHON. The tests here are run there by a pytest of its own.
"""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
VARIABLE = "FASTAPI_DEDUP_OLDEST_PYTHON"
CHOSEN = [
    "test_doors.py",  # the basic doors
    "test_middleware.py",
    "test_mounts.py",
    "test_precedence.py",
    "test_failures.py",  # cases A1, A3
    "test_commit.py",  # case A2
    "test_background.py",  # case A5
    "test_startup.py",
    "test_two_sessions.py",
    "test_members.py",
    "test_openapi.py",
    "test_authentication.py",  # case A9
]


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} is not set; `make test` sets it")
@pytest.mark.timeout(300)
def test_the_main_promises_hold_on_the_oldest_supported_versions() -> None:
    # What differs between releases of FastAPI is no matter of the database: SQLite will do. The oldest
    # FastAPI was not written for the pydantic of today, whose warnings are none of ours.
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
    run = subprocess.run(
        [
            os.environ[VARIABLE],
            "-m",
            "pytest",
            *options,
            "-k",
            "not asyncpg",
            *(f"tests/http/{name}" for name in CHOSEN),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]


@pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} is not set; `make test` sets it")
def test_the_oldest_versions_are_those_that_pyproject_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = dict(each.split("[")[0].split(">=") for each in project["dependencies"] if "[" not in each)
    code = "import importlib.metadata as m, sys; print(*[m.version(each) for each in sys.argv[1:]])"
    run = subprocess.run(
        [os.environ[VARIABLE], "-c", code, *floors], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [*floors.values()]

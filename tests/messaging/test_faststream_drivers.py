"""What the modules for FastStream and taskiq say where their driver is not installed, or is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

drivers = pytest.mark.parametrize("driver", ["faststream", "taskiq"])


def told(statement: str, *paths: Path) -> str:
    """Run a statement in a fresh interpreter, and return the last line of its traceback."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))}
    run = subprocess.run(
        [sys.executable, "-c", statement], env=environ, capture_output=True, text=True, check=False
    )
    return run.stderr.strip().splitlines()[-1]


@drivers
def test_a_missing_driver_is_named_with_the_extra_that_brings_it(driver: str) -> None:
    absent = f"import sys; sys.modules[{driver!r}] = None; import fastapi_dedup.messaging.{driver}"
    message = f"ImportError: {driver} is not installed: pip install 'fastapi-dedup[{driver}]'"
    assert told(absent) == message


@drivers
def test_what_a_driver_itself_misses_is_not_blamed_on_the_extra(driver: str, tmp_path: Path) -> None:
    (tmp_path / driver).mkdir()
    (tmp_path / driver / "__init__.py").write_text("import what_the_driver_needs")
    error = told(f"import fastapi_dedup.messaging.{driver}", tmp_path)
    assert error == "ModuleNotFoundError: No module named 'what_the_driver_needs'"


def test_the_module_for_faststream_imports_no_broker() -> None:
    brokers = {"aio_pika", "aiokafka", "confluent_kafka", "nats", "redis"}
    statement = f"import fastapi_dedup.messaging.faststream, sys; sys.exit(str({brokers} & {{*sys.modules}}))"
    assert told(statement) == "set()"

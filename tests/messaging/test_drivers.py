"""What a broker module says where its driver is not installed, or is broken."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULES = [("aio_pika", "aio-pika"), ("nats", "nats")]


@pytest.fixture(autouse=True)
def _fresh_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the broker modules and their drivers for a test, and remember them afterwards."""
    forgotten = {
        name: module
        for name, module in sys.modules.items()
        if name.split(".")[0] in {"aio_pika", "nats"}
        or name in {"fastapi_dedup.messaging.aio_pika", "fastapi_dedup.messaging.nats"}
    }
    for name in forgotten:
        monkeypatch.delitem(sys.modules, name)
    yield
    for driver, _ in MODULES:
        sys.modules.pop(f"fastapi_dedup.messaging.{driver}", None)


@pytest.mark.parametrize(("driver", "extra"), MODULES)
def test_a_missing_driver_is_named_with_the_extra_that_brings_it(
    driver: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", [Absent(driver), *sys.meta_path])
    with pytest.raises(ImportError, match=rf"pip install 'fastapi-dedup\[{extra}\]'"):
        importlib.import_module(f"fastapi_dedup.messaging.{driver}")


@pytest.mark.parametrize(("driver", "extra"), MODULES)
def test_what_a_driver_itself_misses_is_not_blamed_on_the_extra(
    driver: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / driver).mkdir()
    (tmp_path / driver / "__init__.py").write_text("import what_the_driver_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_the_driver_needs") as caught:
        importlib.import_module(f"fastapi_dedup.messaging.{driver}")
    assert extra not in str(caught.value)


class Absent:
    """Finds that one top-level module is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - the protocol
        if name == self._name:
            raise ModuleNotFoundError(name=name)

"""The import law: core ← stores ← doors, and the core knows no framework and no driver."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastapi_dedup

PACKAGE = Path(fastapi_dedup.__file__).parent
CORE = (
    "beside",
    "batch_delivery",
    "batches",
    "cancellation",
    "claims",
    "core",
    "declared",
    "errors",
    "fingerprint",
    "flights",
    "guard",
    "held",
    "hooks",
    "identities",
    "identity",
    "leases",
    "policy",
    "reaper",
    "refusals",
    "stamping",
    "store",
)
FOREIGN = (
    *("fastapi", "starlette", "sqlalchemy", "pydantic"),
    *("aiosqlite", "asyncpg", "psycopg", "asyncmy", "aiomysql", "pymysql", "redis"),
    *("faststream", "aio_pika", "nats", "aiokafka", "grpc"),
)

# A parent package that is only a folder: the real one imports every door.
LOADER = f"""
import importlib, sys, types
parent = types.ModuleType("fastapi_dedup")
parent.__path__ = [{str(PACKAGE)!r}]
sys.modules["fastapi_dedup"] = parent
importlib.import_module("fastapi_dedup." + sys.argv[1])
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & {{*{FOREIGN!r}}}))
print(*sorted(name for name in sys.modules if name.startswith("fastapi_dedup.")))
"""


def loaded_by(module: str) -> tuple[set[str], set[str]]:
    """Import one module in a process of its own; return the foreign and the own modules that came with it."""
    run = subprocess.run([sys.executable, "-c", LOADER, module], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    foreign, own = run.stdout.split("\n")[:2]
    return {*foreign.split()}, {*own.split()}


@pytest.mark.parametrize("module", CORE)
def test_the_core_brings_no_framework_no_database_and_no_driver(module: str) -> None:
    foreign, own = loaded_by(module)
    assert foreign == set()
    assert own <= {f"fastapi_dedup.{name}" for name in CORE}


def imports_of(path: Path) -> Iterator[str]:
    """Yield what a module imports, anywhere in it, blocks for type checkers included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offenders(folder: str, forbidden: tuple[str, ...]) -> list[str]:
    """Return who in a folder, or in a module of that name, imports what it must not."""
    files = (
        [PACKAGE / f"{folder}.py"] if not (PACKAGE / folder).is_dir() else (PACKAGE / folder).rglob("*.py")
    )
    return [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in files
        for name in imports_of(file)
        if any(name == root or name.startswith(f"{root}.") for root in forbidden)
    ]


def test_no_module_of_the_core_names_a_framework_or_a_database_even_for_types() -> None:
    assert [one for module in CORE for one in offenders(module, FOREIGN)] == []


def test_stores_know_no_door() -> None:
    doors = ("http", "messaging", "grpc", "cli", "blocks", "runtime")
    forbidden = (*(f"fastapi_dedup.{door}" for door in doors), "fastapi", "starlette", "fastapi_dedup.Dedup")
    assert offenders("stores", forbidden) == []


def test_the_core_knows_no_store_and_no_door() -> None:
    above = tuple(
        f"fastapi_dedup.{name}"
        for name in ("stores", "http", "messaging", "grpc", "cli", "blocks", "runtime")
    )
    assert [one for module in CORE for one in offenders(module, above)] == []


def test_every_module_is_of_the_core_or_known_to_stand_above_it() -> None:
    above = {
        "__init__",
        "blocks",
        "runtime",
        "tables",
        "testing",
        "cli",
        "grpc",
        "http",
        "messaging",
        "stores",
    }
    there = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert there <= {*CORE} | above


def test_the_root_exports_few_names_sorted_and_each_of_them_exists() -> None:
    names = fastapi_dedup.__all__
    assert len(names) <= 15
    assert names == sorted(names)
    assert len({*names}) == len(names)
    for name in names:
        assert getattr(fastapi_dedup, name).__module__.startswith("fastapi_dedup") or name == "RequestSession"


def test_every_public_name_of_the_root_is_exported() -> None:
    public = {
        name
        for name, value in vars(fastapi_dedup).items()
        if not name.startswith("_") and type(value).__name__ != "module"
    }
    assert public == {*fastapi_dedup.__all__}


def test_every_error_has_one_base() -> None:
    errors = [
        value
        for name, value in vars(fastapi_dedup).items()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(errors) >= 8
    assert all(issubclass(error, fastapi_dedup.DedupError) for error in errors)


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_no_module_is_long_or_holds_state(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= 430, "DESIGN 6: about 400 lines"
    assert path.name != "utils.py"
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value, ast.List | ast.Dict | ast.Set
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                assert isinstance(target, ast.Name)
                assert target.id.isupper() or target.id == "__all__", f"{target.id} may change"
    assert not any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(source)))

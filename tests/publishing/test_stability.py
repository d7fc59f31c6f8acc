"""An id is the same in every process; and importing the publisher's side imports no framework."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fastapi_dedup

PACKAGE = Path(fastapi_dedup.__file__).parent

# The package without what its __init__ imports.
ALONE = f"""
import sys, types
package = types.ModuleType("fastapi_dedup")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["fastapi_dedup"] = package
import fastapi_dedup.identities
"""

PURE = """
heavy = {"attr", "attrs", "fastapi", "httpx", "msgspec", "pydantic", "sqlalchemy", "starlette"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""

DERIVE = """
import enum, uuid
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any
import attrs, msgspec, pydantic
from fastapi_dedup.identities import *

class Index(enum.Enum):
    PRODUCTS = "products"

class Model(pydantic.BaseModel):
    sku: Annotated[Index, DeduplicationIdentity()]

class Struct(msgspec.Struct):
    sku: Annotated[uuid.UUID, DeduplicationIdentity()]

@attrs.define
class Attrs:
    sku: Annotated[date, DeduplicationIdentity()]

@deduplication_identity("c", "a", "b")
@dataclass
class Data:
    a: str = "1"
    b: str = "2"
    c: str = "3"

identities = Identities()
identities.by_member_named("idempotency_key", "deduplication_id")
identities.by_predicate(lambda kind: kind is str, lambda message: message)
for message in (
    Model(sku=Index.PRODUCTS), Struct(uuid.UUID(int=7)), Attrs(date(2026, 11, 30)), Data(), "text",
    {"deduplication_id": 2, "idempotency_key": 1},
):
    print(identities.of(message))
print(sqs_deduplication_id("x" * 200))
"""

EXPECTED = """\
products
00000000-0000-0000-0000-000000000007
2026-11-30
3|1|2
text
1
aa20c23e3201834050679e1d88941b9a6fed0557c9a705cb2c315e2e63fd486d
"""


def _started(script: str, hash_seed: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.Popen(
        [sys.executable, "-c", ALONE + script], env=environ, stdout=subprocess.PIPE, text=True
    )


def test_ids_are_the_same_in_every_process_whatever_its_hash_seed() -> None:
    runs = [_started(DERIVE, seed) for seed in ("0", "1", "4711", "random")]

    assert [run.communicate()[0] for run in runs] == [EXPECTED] * 4


def test_the_publisher_s_side_imports_no_framework() -> None:
    assert _started(PURE, "random").communicate()[0] == "[]\n"

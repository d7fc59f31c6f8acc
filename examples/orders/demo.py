"""Run the order service as a real server, send it what clients send in earnest, and look into its database.

    make demo        (or: python -m examples.orders.demo)

Everything goes over a socket to a process of its own, and what the database holds is read from the file of
the database. The exit status is 0 if every promise held.
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0
"""How long to wait, in seconds, for what takes milliseconds on a machine that has nothing else to do."""


class BrokenError(Exception):
    """The demonstration could not be finished; the text says where."""


def main() -> int:
    """Run the demonstration, and return the exit status."""
    started = time.monotonic()
    print("Orders go to a uvicorn process over its socket; what is held is read from its SQLite file.\n")
    with tempfile.TemporaryDirectory(prefix="fastapi-dedup-demo-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            with server(folder) as url:
                report = asyncio.run(demonstrate(url, folder / "fastapi_dedup.db"))
        except (BrokenError, TimeoutError, httpx.HTTPError, sqlite3.Error) as error:
            print(f"The demonstration broke: {error!r}. The server's log:\n")
            print((folder / "server.log").read_text())
            return 1
    print(report.table())
    print(f"\n{report.verdict()} ({time.monotonic() - started:.1f} s)")
    return 0 if report.kept else 1


# The server


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run the service in a process of its own, with its database in a folder, and yield its base URL."""
    environ = {name: value for name, value in os.environ.items() if name != "FASTAPI_DEDUP_DATABASE_URL"}
    command = [
        *(sys.executable, "-m", "uvicorn", "examples.orders.app:app", "--app-dir", str(ROOT)),
        *("--host", "127.0.0.1", "--port", "0", "--no-access-log"),
    ]
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield address(process, log)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the URL that the server says it listens at; the system has chosen the port."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"running on (http://[\d.]+:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.02)
    msg = "the server did not start"
    raise BrokenError(msg)


# What is sent


async def demonstrate(url: str, database: Path) -> Report:
    """Send the orders, and report what was answered and what the database holds afterwards."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        shop = Shop(client)
        report = Report(database, shop.sent)
        await shop.deliver("tea", 99)

        answers = [await shop.order("A-1", "tea") for _ in range(2)]
        report.add("order A-1, twice", "A-1", answers, {"201": 1, "409 duplicate": 1}, held=1)
        answers = await asyncio.gather(*(shop.order("A-1", "tea") for _ in range(50)))
        report.add("order A-1, 50 more copies at once", "A-1", answers, {"409 duplicate": 50}, held=1)

        answers = await asyncio.gather(*(shop.order("A-2", "tea") for _ in range(50)))
        report.add("new order A-2, 50 copies at once", "A-2", answers, {"201": 1, "409": 49}, held=1)

        answers = [await shop.order("A-3", "coffee")]
        report.add("order A-3, of what is not in stock", "A-3", answers, {"422": 1}, held=0)
        await shop.deliver("coffee", 1)
        answers = [await shop.order("A-3", "coffee")]
        report.add("order A-3 again, now in stock", "A-3", answers, {"201": 1}, held=1)

        slow = asyncio.create_task(shop.order("A-4", "tea", gift=True))
        await shop.wrapping_starts("A-4", slow)
        answers = [await shop.order("A-4", "tea", gift=True)]
        report.add("slow order A-4, a copy meanwhile", "A-4", answers, {"409 in-flight": 1}, held=0)
        await shop.wrapping_ends("A-4")
        report.add("slow order A-4, in the end", "A-4", [await slow], {"201": 1}, held=1)
        answers = [await shop.order("A-4", "tea", gift=True)]
        report.add("slow order A-4, a copy afterwards", "A-4", answers, {"409 duplicate": 1}, held=1)

        report.total()
    return report


class Shop:
    """The service, as its clients see it.

    Attributes:
        sent: How often each order was sent, by its reference.
    """

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.sent: Counter[str] = Counter()
        self._client = client

    async def order(self, reference: str, sku: str, *, gift: bool = False) -> httpx.Response:
        """Order, and return the answer."""
        self.sent[reference] += 1
        return await self._client.post("/orders", json={"reference": reference, "sku": sku, "gift": gift})

    async def deliver(self, sku: str, quantity: int) -> None:
        """Bring articles."""
        key = {"Idempotency-Key": f"delivery of {sku}"}
        response = await self._client.post(f"/stock/{sku}", json={"quantity": quantity}, headers=key)
        response.raise_for_status()

    async def wrapping_starts(self, reference: str, order: asyncio.Task[httpx.Response]) -> None:
        """Wait until an order's handler is at work on its gift: the order is in flight from then on."""
        async with asyncio.timeout(PATIENCE):
            while reference not in (await self._client.get("/gifts")).json():
                if order.done():
                    msg = f"order {reference} ended before its gift was wrapped: {order.result()}"
                    raise BrokenError(msg)
                await asyncio.sleep(0.01)

    async def wrapping_ends(self, reference: str) -> None:
        """Let the handler go on."""
        (await self._client.put(f"/gifts/{reference}/wrapped")).raise_for_status()


# What came of it


def kind_of(response: httpx.Response) -> str:
    """Return a response's status, with the kind of refusal if it is one: `409 in-flight`."""
    problem = response.headers.get("content-type") == "application/problem+json"
    kind = " " + response.json()["type"].partition("#")[2] if problem else ""
    return f"{response.status_code}{kind}"


def counted(count: int, noun: str, plural: str) -> str:
    """Return a count with its noun."""
    return f"{count} {noun if count == 1 else plural}"


@dataclass
class Report:
    """The rows of the table, and whether each is as promised.

    Attributes:
        database: The file of the service's database.
        sent: How often each order was sent, by its reference.
        rows: What was sent, what was answered, what the database holds.
        broken: What was not as promised.
    """

    database: Path
    sent: Counter[str]
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    _answers: Counter[str] = field(default_factory=Counter)

    def add(
        self,
        what: str,
        reference: str,
        answers: list[httpx.Response],
        expected: Mapping[str, int],
        *,
        held: int,
    ) -> None:
        """Add a row.

        Args:
            what: What was sent.
            reference: The order that it was copies of.
            answers: What was answered.
            expected: How many of each answer are promised; `409` is either kind of 409.
            held: How many rows of that order, and how many claims, the database must hold now.
        """
        counts = Counter(kind_of(answer) for answer in answers)
        orders, claims = self._held("reference = ?", "logical_id = ?", reference)
        self._row(what, counts, orders, claims, copies=self.sent[reference])
        found = {
            wanted: sum(count for kind, count in counts.items() if kind.startswith(wanted))
            for wanted in expected
        }
        if found != expected or sum(found.values()) != len(answers):
            self.broken.append(f"{what}: the answers are not {dict(expected)}")
        if (orders, claims) != (held, held):
            self.broken.append(f"{what}: the database does not hold {held} of each")
        if any("retry-after" not in each.headers for each in answers if kind_of(each) == "409 in-flight"):
            self.broken.append(f"{what}: an in-flight 409 has no Retry-After")
        self._answers += counts

    def total(self) -> None:
        """Add the last row: everything that was sent, and everything that is held."""
        orders, claims = self._held("true", "scope = 'orders'")
        self._row("all of it", self._answers, orders, claims, copies=self.sent.total())
        if (orders, claims) != (len(self.sent), len(self.sent)):
            self.broken.append(f"the database does not hold {len(self.sent)} orders and as many claims")

    def _row(self, what: str, counts: Counter[str], orders: int, claims: int, *, copies: int) -> None:
        answered = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))
        held = f"{counted(orders, 'order', 'orders')}, {counted(claims, 'claim', 'claims')}"
        self.rows.append((what, answered, f"{held} for {counted(copies, 'copy', 'copies')}"))

    def _held(self, of_orders: str, of_claims: str, *parameters: str) -> tuple[int, int]:
        """Count orders and claims in the file of the database, past the server."""
        with closing(sqlite3.connect(f"{self.database.as_uri()}?mode=ro", uri=True)) as connection:
            orders = f"SELECT count(*) FROM orders WHERE {of_orders}"  # noqa: S608 - conditions of ours
            claims = f"SELECT count(*) FROM dedup_claims WHERE {of_claims}"  # noqa: S608
            return (
                int(connection.execute(orders, parameters).fetchone()[0]),
                int(connection.execute(claims, parameters).fetchone()[0]),
            )

    @property
    def kept(self) -> bool:
        """Whether every promise held."""
        return not self.broken

    def table(self) -> str:
        """Return the table, as text."""
        lines = [("what was sent", "what was answered", "what the database holds"), *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        lines.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2]))
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def verdict(self) -> str:
        """Return the verdict, as text."""
        if self.broken:
            return "BROKEN: " + "; ".join(self.broken)
        return f"Every promise held: the work of {len(self.sent)} orders was done, and each was done once."


if __name__ == "__main__":
    sys.exit(main())

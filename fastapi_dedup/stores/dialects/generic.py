"""Every other database that SQLAlchemy speaks to: a savepoint, an INSERT, and its unique key.

SQLAlchemy writes the statements, from constructs on the table of claims, so they compile for whatever it has
a dialect for. What no standard says is in `habits`: the clock, and what to do about locks.

An INSERT waits for an unfinished twin. So a twin in the same process is found among the process's own
flights. One in another process is waited for, for as long as the database lets a statement wait, and is then
told the outcome. For each id, at most one delivery of a process waits like that.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, case, delete, exc, func, insert, literal_column, select, update

from fastapi_dedup.claims import Claimed, InFlight, Intent, Receipt, scope_text, verdict
from fastapi_dedup.errors import ConfigurationError
from fastapi_dedup.stores.codes import Kind, kind
from fastapi_dedup.stores.dialects.habits import habits_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from sqlalchemy import Connection, Dialect, Engine, Row, Select, Table, Update

    from fastapi_dedup.claims import Duplicate, Mismatch, Outcome

__all__ = ["Generic"]

_LOOKS = 5
"""How often to look again. Each further look needs another commit, rollback or reaping in between."""
_PATIENCE = "1s"
"""How long to wait for an unfinished twin, where that can be said."""
_COLLISIONS = {Kind.DUPLICATE, Kind.INTEGRITY}


class Generic:
    """The statements of any database.

    Args:
        table: The table of claims.
        dialect: SQLAlchemy's dialect.

    Raises:
        ConfigurationError: It is SQLite, whose driver begins no transaction before a savepoint.
    """

    def __init__(self, table: Table, dialect: Dialect) -> None:
        if dialect.name == "sqlite":
            msg = "the generic dialect cannot keep claim and work together on SQLite: leave dialect= out"
            raise ConfigurationError(msg)
        self._name = dialect.name
        self._table = table
        self._habits = habits_of(dialect.name)
        claims = table.c
        self._moments = (claims.claimed_at, claims.expires_at, claims.leased_until)
        self._seeing = self._to_see()
        self.keeps = self._habits.keeps
        self.was_run = self._habits.was_run

    def claim(self, connection: Connection, intent: Intent, token: bytes) -> Outcome:
        """Take the id, or say why not."""
        collided = missed = False
        for _ in range(_LOOKS):
            seen = self._see(connection, intent.key)
            if seen.claimed_at is not None and (answer := _answer(seen, intent)) is not None:
                return answer
            taken = {
                "token": token,
                "fingerprint": intent.fingerprint,
                "claimed_at": seen.moment,
                "expires_at": seen.moment + intent.term,
                "leased_until": None if intent.lease is None else seen.moment + intent.lease.length,
            }
            # An expired claim that could not be taken over and still shows is only there in the snapshot.
            take = self._insert if seen.claimed_at is None or missed else self._take_over
            try:
                missed = not take(connection, intent.key, intent, taken)
            except exc.DBAPIError as error:
                if kind(error) is Kind.BUSY:
                    return InFlight()
                if kind(error) not in _COLLISIONS:
                    raise
                if not collided:  # most likely with a twin that has committed since: look again
                    collided = True
                    continue
                if self._would_collide_anyway(connection, intent, taken):
                    raise
                return InFlight()  # behind the snapshot of the caller's transaction
            if not missed:
                return Claimed(Receipt(token, _utc(seen.moment), _utc(seen.moment + intent.term)))
        return InFlight()

    def look(self, connection: Connection, intent: Intent) -> Duplicate | InFlight | Mismatch | None:
        """Return what a committed, unexpired claim answers; None where there is none."""
        seen = self._see(connection, intent.key)
        return None if seen.claimed_at is None else _answer(seen, intent)

    def holds(self, connection: Connection, key: bytes, token: bytes) -> bool:
        """Tell whether the token's claim is there, by the view of the connection's transaction."""
        claims = self._table.c
        count = select(func.count()).select_from(self._table)
        return bool(connection.execute(count.where(claims.key == key, claims.token == token)).scalar_one())

    def renew(self, connection: Connection, intent: Intent, token: bytes) -> None:
        """Count the window of the token's claim anew from now."""
        connection.execute(self._mine(intent.key, token, expires_at=self._now(connection) + intent.window))

    def extend(self, connection: Connection, key: bytes, token: bytes, length: timedelta) -> int:
        """Count the lease of the token's claim anew from now, and return how many there were."""
        claims = self._table.c
        until = self._now(connection) + length
        extended = self._mine(key, token, leased_until=until).where(claims.leased_until.is_not(None))
        later = case(
            (claims.expires_at > self._habits.write(until), claims.expires_at),
            else_=self._habits.write(until),
        )
        return connection.execute(extended.values(expires_at=later)).rowcount

    def complete(self, connection: Connection, intent: Intent, token: bytes) -> int | None:
        """Make the token's leased claim a settled one, and return how many there were.

        None where the snapshot of the transaction does not show the claim as it is.
        """
        seen = self._see(connection, intent.key)
        if seen.claimed_at is None:
            return None
        end = (seen.moment if intent.from_end else seen.claimed_at) + intent.window
        try:
            with connection.begin_nested():
                return connection.execute(
                    self._mine(intent.key, token, leased_until=None, expires_at=end)
                ).rowcount
        except exc.DBAPIError as error:
            if kind(error) is not Kind.BUSY:
                raise
            return None

    def release(self, connection: Connection, key: bytes, token: bytes | None) -> int:
        """Delete a claim if it is the token's (None: whoever's), and return how many were deleted."""
        claims = self._table.c
        released = delete(self._table).where(claims.key == key)
        if token is not None:
            released = released.where(claims.token == token)
        return connection.execute(released).rowcount

    def reap(self, connection: Connection, limit: int) -> int:
        """Delete at most so many expired claims; rows that somebody holds are left where that can be told."""
        habits, claims = self._habits, self._table.c
        if habits.reap_at is not None:
            connection.exec_driver_sql(habits.reap_at)
        now = self._now(connection)  # as a value: no database uses an index for a clock that goes on
        keys = connection.execute(self._expired(now, limit)).scalars().all()
        is_expired = claims.expires_at <= habits.write(now)
        reaped = delete(self._table).where(claims.key == bindparam("reaped"), is_expired)
        if not (habits.skip_locked or habits.lock_past_locks):
            return sum(connection.execute(reaped, {"reaped": key}).rowcount for key in keys)
        if keys:  # locked by now, so each of them is deleted
            connection.execute(reaped, [{"reaped": key} for key in keys])
        return len(keys)

    def adopt(self, engine: Engine) -> None:
        """Nothing to prepare."""

    def serialize_creation(self, connection: Connection) -> bool:  # noqa: ARG002 - the protocol's
        """No lock is known that every database has."""
        return False

    def verify(self, connection: Connection) -> None:
        """Try out what everything here rests on, with a claim that is rolled back.

        Raises:
            ConfigurationError: The database does not keep it, and so it can keep no promise.
        """
        is_exact = self._habits.past_locks is not None or _level(connection) != "READ UNCOMMITTED"
        self._require(is_exact, "at READ UNCOMMITTED, an unfinished twin looks like a finished one")
        intent = Intent(("fastapi_dedup",), f"start-up {os.urandom(16).hex()}")
        token = os.urandom(16)
        try:
            claimed = isinstance(self.claim(connection, intent, token), Claimed)
            self._require(claimed and self.holds(connection, intent.key, token), "a claim is not there")
            self._require(
                self._refuses(connection, intent), "its unique key lets the same claim be made twice"
            )
            held = self.holds(connection, intent.key, token)
            self._require(held, "what was done before a savepoint is undone with it")
        finally:
            connection.rollback()
        self._require(self._see(connection, intent.key).claimed_at is None, "a rollback undoes no claim")

    def _require(self, kept: bool, otherwise: str) -> None:  # noqa: FBT001 - like an assertion
        if not kept:
            msg = f"{self._name} cannot keep claims: {otherwise}"
            raise ConfigurationError(msg)

    def _refuses(self, connection: Connection, intent: Intent) -> bool:
        """Tell whether the database refuses a row of a key that is there, in a way that is understood."""
        moment = self._now(connection)
        taken = {"token": os.urandom(16), "claimed_at": moment, "expires_at": moment + intent.window}
        try:
            self._insert(connection, intent.key, intent, taken)
        except exc.DBAPIError as error:
            if kind(error) not in _COLLISIONS:
                raise
            return True
        return False

    # statements

    def _now(self, connection: Connection) -> datetime:
        return connection.execute(select(self._habits.clock)).scalar_one()

    def _see(self, connection: Connection, key: bytes) -> Row[Any]:
        """Return the time, and the claim of a key if one is there, past the locks of others."""
        return connection.execute(self._seeing, {"wanted": key}).one()

    def _to_see(self) -> Select[Any]:
        claims, read = self._table.c, self._habits.read
        clock = select(self._habits.clock.label("moment")).subquery("clock")
        moments = [read(column).label(column.name) for column in self._moments]
        seeing = select(clock.c.moment, *moments, claims.fingerprint).select_from(
            clock.outerjoin(self._table, claims.key == bindparam("wanted"))
        )
        hint = self._habits.past_locks
        return seeing if hint is None else seeing.with_hint(self._table, hint, self._name)

    def _insert(self, connection: Connection, key: bytes, intent: Intent, taken: dict[str, Any]) -> bool:
        """Insert a claim in a savepoint."""
        # Oracle takes an empty text for none.
        row = {"key": key, "scope": scope_text(intent.scope) or " ", "logical_id": intent.logical_id}
        with connection.begin_nested(), self._patience(connection):
            connection.execute(insert(self._table).values(**row, **self._written(taken)))
        return True

    def _take_over(self, connection: Connection, key: bytes, _: Intent, taken: dict[str, Any]) -> bool:
        """Take an expired claim over in a savepoint, and tell whether it still was one."""
        claims = self._table.c
        expired = (claims.key == key, claims.expires_at <= self._habits.write(taken["claimed_at"]))
        with connection.begin_nested(), self._patience(connection):
            taking = update(self._table).where(*expired).values(**self._written(taken))
            return connection.execute(taking).rowcount > 0

    def _would_collide_anyway(self, connection: Connection, intent: Intent, taken: dict[str, Any]) -> bool:
        """Tell whether a claim of any other key would collide as well: then it is not with our own key."""
        around = connection.begin_nested()
        try:
            self._insert(connection, os.urandom(len(intent.key)), intent, taken)
        except exc.DBAPIError as error:
            if kind(error) not in _COLLISIONS:
                raise
            return True
        finally:
            around.rollback()
        return False

    @contextmanager
    def _patience(self, connection: Connection) -> Iterator[None]:
        """Wait for others a moment only, unless the app has said how long; in a savepoint that may fail."""
        bounded = self._habits.lock_timeout and connection.exec_driver_sql("SHOW lock_timeout").scalar() in {
            0,
            "0",
        }
        if bounded:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_PATIENCE}'")
        yield
        if bounded:
            connection.exec_driver_sql("SET LOCAL lock_timeout = 0")

    def _mine(self, key: bytes, token: bytes, **values: Any) -> Update:
        """Return the statement that changes the token's claim."""
        claims = self._table.c
        mine = (claims.key == key, claims.token == token)
        return update(self._table).where(*mine).values(**self._written(values))

    def _written(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: self._habits.write(value) if isinstance(value, datetime) else value
            for name, value in values.items()
        }

    def _expired(self, now: datetime, limit: int) -> Select[Any]:
        habits, claims = self._habits, self._table.c
        expired = select(claims.key).where(claims.expires_at <= habits.write(now))
        if habits.by_rownum:
            return expired.where(literal_column("ROWNUM") <= limit).with_for_update(skip_locked=True)
        expired = expired.order_by(claims.expires_at).limit(limit)
        if habits.lock_past_locks is not None:
            return expired.with_hint(self._table, habits.lock_past_locks, self._name)
        return expired.with_for_update(skip_locked=True) if habits.skip_locked else expired


def _answer(seen: Row[Any], intent: Intent) -> Duplicate | InFlight | Mismatch | None:
    return verdict(
        intent,
        claimed_at=_utc(seen.claimed_at),
        expires_at=_utc(seen.expires_at),
        leased_until=None if seen.leased_until is None else _utc(seen.leased_until),
        fingerprint=seen.fingerprint,
        now=_utc(seen.moment),
    )


def _level(connection: Connection) -> str | None:
    """Return the isolation level; None where SQLAlchemy cannot tell."""
    try:
        return connection.get_isolation_level()
    except NotImplementedError:
        return None


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)

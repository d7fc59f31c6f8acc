"""The SQL that the tests need beside the package's own, for each kind of database."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hands:
    """What the tests do behind the package's back, in one database's own words.

    Attributes:
        expire: Assignments that end a claim's window just now.
        fill: Inserts `:total` claims, of which the first `:expired` have expired, one second after the other.
        explain: What shows the plan of the statement that follows.
        range_scan: How a plan says that the index gives the expired claims, and no others.
        hold_up: Makes every claim elsewhere wait until this transaction ends.
        settings: Lists what a connection could leave behind for its next user.
        held_locks: Counts the locks that a connection holds beyond its transaction; None where none can be.
        backend: Returns which process of the server serves this connection; None where there is no server.
        kill: Ends that process, and waits for its end.
        set_zone: Sets the time zone of new connections; None where connections have none.
        reset_zone: Undoes that.
        zone: Returns a connection's time zone.
        stop_clock: Has a table `stopped.clock` be the clock of new connections; () where the driver does it.
        start_clock: Undoes that.
        strict: What a new connection needs to be told before it checks foreign keys.
        tables: Returns what tells our tables from others of their names; None where that costs more than
            making new ones.
    """

    expire: str
    fill: str
    explain: str
    range_scan: str
    hold_up: str
    settings: str
    held_locks: str | None = None
    backend: str | None = None
    kill: str = ""
    set_zone: str | None = None
    reset_zone: str = ""
    zone: str = ""
    stop_clock: tuple[str, ...] = ()
    start_clock: tuple[str, ...] = ()
    strict: str | None = None
    tables: str | None = None


_POSTGRESQL = Hands(
    expire="claimed_at = claimed_at - (expires_at - clock_timestamp()), expires_at = clock_timestamp()",
    fill="""
        insert into dedup_claims (key, scope, logical_id, token, claimed_at, expires_at)
        select sha256(n::text::bytea), 'tests', n::text, '\\x00', now() - interval '2 days',
               case when n <= :expired then now() - interval '1 day' + n * interval '1 second'
                    else now() + interval '1 day' end
          from generate_series(1, :total) as n
    """,
    explain="explain",
    range_scan="Index Cond: (expires_at <=",
    hold_up="lock table dedup_claims in access exclusive mode",
    settings="select name, setting from pg_settings where source <> 'client' order by 1",
    held_locks="select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()",
    backend="select pg_backend_pid()",
    kill="select pg_terminate_backend(:backend, 5000)",
    set_zone="alter database {database} set timezone = '{zone}'",
    reset_zone="alter database {database} reset timezone",
    zone="show timezone",
    stop_clock=(
        "create schema stopped",
        "create table stopped.clock as select now() as at",
        "create function stopped.at() returns timestamptz language sql as 'select at from stopped.clock'",
        "create function stopped.clock_timestamp() returns timestamptz language sql as 'select stopped.at()'",
        "create function stopped.now() returns timestamptz language sql stable as 'select stopped.at()'",
        "alter database {database} set search_path = public, stopped, pg_catalog",
    ),
    start_clock=("drop schema stopped cascade", "alter database {database} reset search_path"),
    tables="select concat(to_regclass('orders')::oid, ' ', to_regclass('dedup_claims')::oid)",
)

_SQLITE = Hands(
    expire="claimed_at = strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 day') || '000', "
    "expires_at = strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'",
    fill="""
        with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < :total)
        insert into dedup_claims (key, scope, logical_id, token, claimed_at, expires_at)
        select cast(n as blob), 'tests', n, x'00', datetime('now', '-2 days') || '.000000',
               iif(n <= :expired, datetime('now', '-1 day', n || ' seconds'),
                   datetime('now', '+1 day')) || '.000000'
          from numbers where n <= :total
    """,
    explain="explain query plan",
    range_scan="(expires_at<?)",
    hold_up="begin immediate",
    settings="select timeout from pragma_busy_timeout()",
    strict="pragma foreign_keys = on",
)

HANDS = {"postgresql": _POSTGRESQL, "sqlite": _SQLITE}

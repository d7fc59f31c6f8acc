"""The SQL that the tests need beside the package's own, for each kind of database."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hands:
    """What the tests do behind the package's back, in one database's own words.

    Attributes:
        key: The name of the column `key`, as it must be written there.
        expire: Assignments that end a claim's window just now.
        fill: Inserts `:total` claims, of which the first `:expired` have expired, one second after the other.
        now: A moment that is just now, as a constant of a statement.
        analyze: Makes statistics of the table of claims.
        explain: What shows the plan of the statement that follows.
        range_scan: How a plan says that the index gives the expired claims, and no others.
        scope: The column `scope`, as an index takes it.
        aborts: Whether a statement that fails spoils the whole transaction.
        undo: A statement that fails and undoes the transaction it is in; None where only a deadlock does.
        snapshot: Fixes what a transaction sees of others, at levels that do so, and locks nothing.
        keeps_snapshots: Whether a transaction may go on that has read an older state.
        impatient: Makes a connection fail where it would wait for a lock; None where nothing does.
        hold_up: Makes every claim elsewhere wait until this transaction ends.
        settings: Lists what a connection could leave behind for its next user.
        held_locks: Counts the locks that a connection holds beyond its transaction; None where none can be.
        backend: Returns which process of the server serves this connection; None where there is no server.
        kill: Ends that process.
        lives: Counts the processes of that number.
        set_zone: Sets the time zone of new connections; None where connections have none.
        reset_zone: Undoes that.
        set_own_zone: Sets the time zone of one connection, where there is no way to set it for new ones.
        zone: Returns a connection's time zone.
        stop_clock: Has a table `stopped.clock` be the clock of new connections; () where there is no way to.
        start_clock: Undoes that.
        set_clock: Sets the clock of one connection; None where the driver must do it.
        late: Makes a table whose foreign key is looked at by COMMIT; None where there is no such thing.
        strict: What a new connection needs to be told before it checks foreign keys.
        deadlocks: Counts the deadlocks that the database has met; None where it has none.
        tables: Returns what tells our tables from others of their names; None where that costs more than
            making new ones.
    """

    key: str = "key"
    expire: str
    fill: str
    now: str = "now()"
    analyze: str = "analyze dedup_claims"
    explain: str
    range_scan: str
    scope: str = "scope"
    aborts: bool = False
    undo: str | None = None
    snapshot: str = "select sku from orders"
    keeps_snapshots: bool = True
    impatient: str | None = None
    hold_up: str
    settings: str
    held_locks: str | None = None
    backend: str | None = None
    kill: str = ""
    lives: str = ""
    set_zone: str | None = None
    reset_zone: str = ""
    set_own_zone: str | None = None
    zone: str = ""
    stop_clock: tuple[str, ...] = ()
    start_clock: tuple[str, ...] = ()
    set_clock: str | None = None
    late: str | None = (
        "create table late (order_id integer references orders (id) deferrable initially deferred)"
    )
    strict: str | None = None
    deadlocks: str | None = None
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
    aborts=True,
    undo="select nothing",
    impatient="set local lock_timeout = 1",
    hold_up="lock table dedup_claims in access exclusive mode",
    settings="select name, setting from pg_settings where source <> 'client' order by 1",
    held_locks="select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()",
    backend="select pg_backend_pid()",
    kill="select pg_terminate_backend(:backend)",
    lives="select count(*) from pg_stat_activity where pid = :backend",
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
    deadlocks="select deadlocks from pg_stat_database where datname = current_database()",
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
    undo="insert or rollback into orders (sku) values (null)",
    hold_up="begin immediate",
    settings="select timeout from pragma_busy_timeout()",
    keeps_snapshots=False,
    strict="pragma foreign_keys = on",
)

_MARIADB = Hands(
    key="`key`",
    expire="claimed_at = utc_timestamp(6) - interval 1 day, expires_at = utc_timestamp(6)",
    fill="""
        insert into dedup_claims (`key`, scope, logical_id, token, claimed_at, expires_at)
        select unhex(sha2(seq, 256)), 'tests', seq, '', utc_timestamp(6) - interval 2 day,
               if(seq <= :expired, utc_timestamp(6) - interval 1 day + interval seq second,
                  utc_timestamp(6) + interval 1 day)
          from seq_1_to_100000 where seq <= :total
    """,
    now="utc_timestamp(6)",
    analyze="analyze table dedup_claims",
    explain="explain",
    range_scan="'range', 'ix_dedup_claims_expires_at'",
    scope="scope(100)",
    snapshot="start transaction with consistent snapshot",  # at SERIALIZABLE, to read is to lock
    impatient="set innodb_lock_wait_timeout = 0",
    # InnoDB lets nobody insert into the gaps between rows that a SELECT at REPEATABLE READ has locked.
    hold_up="select count(*) from dedup_claims for update",
    settings="""
        select variable_name, variable_value from information_schema.session_variables
         where variable_name not in ('error_count', 'gtid_seq_no', 'identity', 'insert_id', 'last_gtid',
               'last_insert_id', 'pseudo_thread_id', 'rand_seed1', 'rand_seed2', 'timestamp', 'warning_count')
         order by 1
    """,
    held_locks="select release_all_locks()",
    backend="select connection_id()",
    kill="kill :backend",
    lives="select count(*) from information_schema.processlist where id = :backend",
    set_own_zone="set time_zone = '{zone}'",
    zone="select @@session.time_zone",
    set_clock="set timestamp = {seconds}",
    late=None,
    tables="""
        select group_concat(table_id order by table_id) from information_schema.innodb_sys_tables
         where name in (concat(database(), '/orders'), concat(database(), '/dedup_claims'))
    """,
)

HANDS = {"mysql": _MARIADB, "postgresql": _POSTGRESQL, "sqlite": _SQLITE}

"""What is looked at when a runtime starts: the table of claims, and what its database cannot promise."""

from __future__ import annotations

import logging
import os
from multiprocessing import parent_process
from typing import TYPE_CHECKING

from fastapi_dedup.errors import ConfigurationError, StoreUnavailableError
from fastapi_dedup.stores.promises import Promise

if TYPE_CHECKING:
    from fastapi_dedup.stores.sql import SqlStore

__all__ = ["has_siblings", "prepare"]

logger = logging.getLogger("fastapi_dedup")


async def prepare(store: SqlStore, *, create: bool) -> None:
    """Create or check the table of claims, and say what the store does not promise.

    Args:
        store: The store.
        create: Whether to create the table.

    Raises:
        ConfigurationError: The table is missing or an earlier release's, or the database keeps no promise.
        StoreUnavailableError: The table is to be created, and the database did not answer.
    """
    try:
        if create:
            await store.create_table()
        missing = await store.missing()
        if missing == []:
            await store.verify()
    except StoreUnavailableError:
        if create:
            raise
        logger.warning("%s does not answer; claims are refused until it does", store.where, exc_info=True)
        return
    _must_be_there(store, missing)
    _announce(store)


def _must_be_there(store: SqlStore, missing: list[str] | None) -> None:
    if missing is None:
        msg = (
            f"the table {store.table!r} is missing in {store.where}: "
            "create it with Dedup(..., create_table=True), await dedup.create_table(), or a migration"
        )
        raise ConfigurationError(msg)
    if missing:
        msg = (
            f"the table {store.table!r} in {store.where} is an earlier release's. Add what it lacks, with a "
            "migration or by hand (it may be null, so that earlier releases go on working):\n"
        ) + "\n".join(missing)
        raise ConfigurationError(msg)


def _announce(store: SqlStore) -> None:
    """Name the promises that the store does not keep."""
    broken = [promise.otherwise for promise in Promise if promise not in store.keeps]
    if not broken:
        return
    alarming = store.is_generic or (has_siblings() and not store.sees_in_flight)
    kind = "the generic store of claims" if store.is_generic else "the store of claims"
    logger.log(
        logging.WARNING if alarming else logging.INFO,
        "%s on %s%s does not promise everything: %s",
        kind,
        store.where,
        "" if store.was_run else ", where its statements were compiled and never run,",
        "; ".join(broken),
    )


def has_siblings() -> bool:
    """Tell whether this process looks like one of several workers: nobody tells it how many there are."""
    forked = "gunicorn" in os.environ.get("SERVER_SOFTWARE", "")
    return forked or parent_process() is not None or os.environ.get("WEB_CONCURRENCY", "1") not in {"", "1"}

"""What a failed statement has left of its transaction is noted on every engine, whenever that was made."""

from __future__ import annotations

import pytest
from sqlalchemy import Dialect, create_engine
from sqlalchemy.exc import OperationalError

from fastapi_dedup.stores.undone import has_failed, note_failures


def test_an_engine_at_the_address_of_one_that_is_gone_is_noted_too() -> None:
    # Whoever keeps a dialect, as compiled statements do, keeps the listeners that SQLAlchemy has put there.
    kept: list[Dialect] = []
    addresses: set[int] = set()
    reused = 0
    for _ in range(300):
        engine = create_engine("sqlite://")
        reused += id(engine) in addresses
        addresses.add(id(engine))
        kept.append(engine.dialect)
        note_failures(engine)
        with engine.connect() as connection:
            with pytest.raises(OperationalError):
                connection.exec_driver_sql("select * from nowhere")
            assert has_failed(connection)
        engine.dispose()
        del connection, engine
    assert reused


def test_an_engine_that_is_noted_twice_is_noted_once() -> None:
    engine = create_engine("sqlite://")
    note_failures(engine)
    listening = [*engine.dialect.dispatch.handle_error]
    note_failures(engine)
    assert [*engine.dialect.dispatch.handle_error] == listening
    engine.dispose()

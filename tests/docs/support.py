"""The table of databases in the documentation, made of what the suite goes by.

`python -m tests.docs.support` writes it into its page.
"""

from __future__ import annotations

from tests.docs.pages import DOCS
from tests.stores.promises import BACKENDS, COMPILED, LEASING, Promise, Store

PAGE = DOCS / "reference" / "databases.md"
_BEGIN = "<!-- `python -m tests.docs.support` writes from here ... -->\n"
_END = "<!-- ... to here. -->\n"


def support() -> str:
    """Return the table, and what its columns mean."""
    run = [
        (each.store, each.driver, ", ".join(each.store.run_on), str(len(each.claiming)))
        for each in BACKENDS
        if each.driver
    ]
    elsewhere = [
        (each.store, each.driver, ", ".join(each.store.run_on), "1")
        for each in (backend.leases for backend in LEASING)
        if each is not None
    ]
    compiled = [(store, store.drivers, store.instead, "") for store in COMPILED]
    numbers = [str(number) for number, _ in enumerate(Promise, 1)]
    head = ["Database", "Driver", "Tests run on", "Statements of a claim", *numbers]
    rows = [
        [_named(store), *told, *(_kept(promise, store) for promise in Promise)]
        for store, *told in [*run, *elsewhere, *compiled]
    ]
    table = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    meaning = [
        f"{number}. {_sentence(promise.kept)} Otherwise: {promise.otherwise}."
        for number, promise in enumerate(Promise, 1)
    ]
    return "\n".join([*table, "", *meaning]) + "\n"


def _named(store: Store) -> str:
    floor = ".".join(map(str, store.floor))
    return f"{store.title}, {floor} and newer" if floor else store.title


def _kept(promise: Promise, store: Store) -> str:
    if promise in store.lacks:
        return ""
    return "yes" if promise in store.keeps else "no"


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def written(page: str) -> str:
    """Return a page with the tables in their place."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{support()}\n{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

"""What a broker module says where its driver is not installed."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["driver"]


@contextmanager
def driver(module: str, *, extra: str) -> Iterator[None]:
    """Name the extra to install if an import fails because the driver itself is missing.

    What is missing inside of an installed driver is its own affair, and its error is left as it is.

    Args:
        module: The driver's top-level module.
        extra: The extra of this package that brings it.

    Raises:
        ImportError: The driver is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        msg = f"{module} is not installed: pip install 'fastapi-dedup[{extra}]'"
        raise ImportError(msg, name=module) from error

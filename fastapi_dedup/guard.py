"""The guard: the in-memory, generational, best-effort set of seen ids.

Two generations of processed ids are both consulted on look-up. Ids land in the current one; when half
the window has passed, or half the ceiling has landed, the previous one is dropped whole and the current
one takes its place. So a call costs O(1), no entry carries a timestamp, and an id is remembered for at
least half the window and never beyond the window; for less only where the ceiling forces a rotation.

A generation is a dict from id to fingerprint: the payload that the work was done for, or None. In-flight ids
live apart from the generations, so no rotation takes its mark from a slow handler.
"""
# ruff: noqa: SLF001 - an attempt and its guard are one concept in two classes.

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from fastapi_dedup.claims import positive
from fastapi_dedup.errors import ConfigurationError, MissingLogicalIdError
from fastapi_dedup.hooks import GuardEvent, GuardSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Attempt", "GenerationalGuard", "GuardEvent", "GuardSnapshot", "Seen"]

logger = logging.getLogger("fastapi_dedup")

_Key: TypeAlias = str | bytes | tuple[str | bytes, str]


class Seen(enum.Enum):
    """What the guard knows of an id.

    Attributes:
        NEW: Nothing: it may run.
        IN_FLIGHT: It was begun and has not been settled: "not yet", never "done".
        PROCESSED: It was completed, inside the window.
        MISMATCH: So it was, but for another payload.
    """

    NEW = "new"
    IN_FLIGHT = "in_flight"
    PROCESSED = "processed"
    MISMATCH = "mismatch"


# Looking a member up on its class is slow on CPython 3.11, and these are on the hot path.
_NEW, _IN_FLIGHT, _PROCESSED, _MISMATCH = Seen


class _Mark:
    """The in-flight mark of one attempt.

    Attributes:
        fingerprint: The payload that it is an attempt at.
        forgotten: Whether the id was forgotten meanwhile: then its success is not remembered.
    """

    __slots__ = ("fingerprint", "forgotten")

    def __init__(self, fingerprint: bytes | None) -> None:
        self.fingerprint = fingerprint
        self.forgotten = False


class GenerationalGuard:
    """Best-effort suppression of duplicates in one process, at the cost of a set look-up.

    Threads and tasks may share it: no method waits or does I/O.

    Args:
        window: The longest that a processed id is remembered; the shortest is half of it, unless the
            ceiling forces a rotation. Default 5 minutes.
        max_tracked: The most ids held at once, processed and in flight together. At least 2; default
            100,000. Once in-flight ids alone fill it, further ids run untracked and are counted as such:
            the ceiling costs suppression, it never keeps an id from running.
        identity: `"id_and_destination"` (default) tells the same id at two destinations apart; `"id"`
            ignores the destination.
        clock: A monotonic clock, in seconds. Default `time.monotonic`.
        on_event: Called with every `GuardEvent`, inline and outside the lock, so it must be quick; what
            it raises is logged and changes nothing. Default None: the counters of `snapshot()` only.

    Attributes:
        window: The longest that a processed id is remembered.

    Raises:
        ConfigurationError: A setting is unusable; the message names the fix.
    """

    def __init__(
        self,
        window: timedelta = timedelta(minutes=5),
        max_tracked: int = 100_000,
        *,
        identity: Literal["id", "id_and_destination"] = "id_and_destination",
        clock: Callable[[], float] = time.monotonic,
        on_event: Callable[[GuardEvent], object] | None = None,
    ) -> None:
        self._half_window = positive("the guard's window", window).total_seconds() / 2
        if type(max_tracked) is not int or max_tracked < 2:  # noqa: PLR2004 - one for each generation
            msg = f"the guard's max_tracked must be an int of at least 2, not {max_tracked!r}: try 100_000"
            raise ConfigurationError(msg)
        if identity not in ("id", "id_and_destination"):
            msg = f"the guard's identity must be 'id' or 'id_and_destination', not {identity!r}"
            raise ConfigurationError(msg)
        if not callable(clock) or not (on_event is None or callable(on_event)):
            msg = f"the guard's clock and on_event must be callables, not {clock!r} and {on_event!r}"
            raise ConfigurationError(msg)
        self.window = window
        self._max_tracked = max_tracked
        self._identity = identity
        self._clock = clock
        self._on_event = on_event
        self._in_flight: dict[_Key, _Mark | None] = {}  # None: begun by hand, and nobody's
        self._current: dict[_Key, bytes | None] = {}
        self._previous: dict[_Key, bytes | None] = {}
        self._due = clock() + self._half_window  # when the current generation has lasted its half
        self._room = max_tracked // 2  # how many more ids may come in before anyone has to count
        self._counts = dict.fromkeys(GuardEvent, 0)
        self._news: deque[GuardEvent] = deque()
        self._orphans: deque[tuple[_Key, _Mark]] = deque()
        self._lock = threading.Lock()

    def begin(self, logical_id: str | bytes, destination: str | None = None) -> bool:
        """Take an id, for one caller only.

        The caller owes the guard `complete` or `release`: until then the id is in flight, however long
        that lasts. An `attempt` cannot forget, so prefer it wherever the caller might.

        Args:
            logical_id: The id.
            destination: Where it is bound for, such as a queue; None where there is only one.

        Returns:
            True if the id may run; False if it is in flight or processed.
        """
        key = logical_id if destination is None and logical_id else self._key(logical_id, destination)
        # Here and in `complete`: `with lock` costs twice these calls, and `self._clock()` twice a local's.
        lock = self._lock
        lock.acquire()
        try:
            # A new id needs no clock: what lingers beyond its time could only refuse it.
            if (
                key not in self._in_flight
                and key not in self._current
                and key not in self._previous
                and self._room > 0
            ):
                self._room -= 1
                self._in_flight[key] = None
                return True
        finally:
            lock.release()
        return self._begin(key, None)[0] is _NEW

    def complete(self, logical_id: str | bytes, destination: str | None = None) -> None:
        """Remember that an id's work is done. Call it once that cannot be undone: after COMMIT.

        Args:
            logical_id: The id. One that was never begun is remembered too.
            destination: As given to `begin`.
        """
        key = logical_id if destination is None else self._key(logical_id, destination)
        lock, clock = self._lock, self._clock
        lock.acquire()
        try:
            if clock() < self._due and self._in_flight[key] is None:
                del self._in_flight[key]
                self._current[key] = None
                return
        except KeyError:  # never begun, or untracked
            pass
        finally:
            lock.release()
        self._complete(key, None, None)

    def release(self, logical_id: str | bytes, destination: str | None = None) -> None:
        """Forget an id, in flight or processed, so that it runs again. An unknown id is no error.

        Args:
            logical_id: The id.
            destination: As given to `begin`.
        """
        key = self._key(logical_id, destination)
        with self._lock:
            for held in (self._in_flight, self._current, self._previous):
                held.pop(key, None)

    def forget(self, logical_id: str | bytes, destination: str | None = None) -> bool:
        """Forget an id that was processed, and do not remember the one that is in flight.

        Unlike `release` it leaves an in-flight mark where it is, so that no twin runs beside its owner.

        Args:
            logical_id: The id.
            destination: As given to `begin`.

        Returns:
            Whether it was remembered.
        """
        key = self._key(logical_id, destination)
        with self._lock:
            self._tidy()
            if key in self._in_flight:
                mark = self._in_flight[key] = self._in_flight[key] or _Mark(None)
                mark.forgotten = True
            gone = [each.pop(key, _NEW) for each in (self._current, self._previous)]
        self._tell()
        return gone != [_NEW, _NEW]

    def with_window(self, window: timedelta) -> GenerationalGuard:
        """Return a new and empty guard that differs from this one in its window only."""
        return GenerationalGuard(
            window, self._max_tracked, identity=self._identity, clock=self._clock, on_event=self._on_event
        )

    def attempt(
        self, logical_id: str | bytes, destination: str | None = None, *, fingerprint: bytes | None = None
    ) -> Attempt:
        """Try to begin an id, and own its mark until `complete`, `release`, or the attempt's own end.

        Args:
            logical_id: The id.
            destination: Where it is bound for, such as a queue; None where there is only one.
            fingerprint: Digest of the payload, where the payload counts: then an id that was completed for
                another one is seen as `Seen.MISMATCH`.

        Returns:
            The attempt; its `seen` says whether the id may run.
        """
        key = self._key(logical_id, destination)
        hash(key)  # what is no key must fail here, and not in whoever takes the attempt's orphan back
        return Attempt(self, key, fingerprint)

    def look(
        self, logical_id: str | bytes, destination: str | None = None, *, fingerprint: bytes | None = None
    ) -> Seen:
        """Say what is known of an id, given as to `attempt`. Takes nothing, counts nothing."""
        key = self._key(logical_id, destination)
        with self._lock:
            self._tidy()
            seen = self._look(key, fingerprint)
        self._tell()
        return seen

    def snapshot(self) -> GuardSnapshot:
        """Return the counters, and how many ids are held."""
        with self._lock:
            self._tidy()
            snapshot = GuardSnapshot(
                **{event.value: count for event, count in self._counts.items()},
                processed=len(self._current) + len(self._previous),
                in_flight=len(self._in_flight),
            )
        self._tell()
        return snapshot

    def _key(self, logical_id: str | bytes, destination: str | None) -> _Key:
        if not logical_id:  # else all that have none would be one
            raise MissingLogicalIdError("logical_id")
        return logical_id if destination is None or self._identity == "id" else (logical_id, destination)

    def _begin(self, key: _Key, mark: _Mark | None) -> tuple[Seen, float]:
        """Try to begin a key, and return what was seen of it, and when that was."""
        with self._lock:
            now = self._tidy()
            seen = self._look(key, None if mark is None else mark.fingerprint)
            if seen is not _NEW:
                self._note(GuardEvent.SUPPRESSED)
            elif self._has_room(now):
                self._room -= 1
                self._in_flight[key] = mark
            else:
                self._note(GuardEvent.UNTRACKED)
        self._tell()
        return seen, now

    def _complete(self, key: _Key, mark: _Mark | None, not_beyond: float | None) -> None:
        """Land a key. With a mark, only if it is in flight under that mark."""
        with self._lock:
            now = self._tidy()
            if key in self._in_flight:
                if mark is None or self._in_flight[key] is mark:
                    self._land(key, self._in_flight.pop(key), not_beyond)
            elif mark is None:  # never begun, or untracked
                if self._has_room(now):
                    self._room -= 1
                    self._land(key, None, None)
                else:
                    self._note(GuardEvent.UNTRACKED)
        self._tell()

    # What follows is called with the lock held, but for `_tell`.

    def _look(self, key: _Key, fingerprint: bytes | None) -> Seen:
        if key in self._in_flight:
            return _IN_FLIGHT
        for generation in (self._current, self._previous):
            if key in generation:
                other = None not in (fingerprint, generation[key]) and fingerprint != generation[key]
                return _MISMATCH if other else _PROCESSED
        return _NEW

    def _land(self, key: _Key, mark: _Mark | None, not_beyond: float | None) -> None:
        if mark is not None and mark.forgotten:
            return
        # What lands now is dropped at the end of the generation after this one, at the latest.
        if not_beyond is None or not_beyond >= self._due + self._half_window:
            self._current[key] = None if mark is None else mark.fingerprint

    def _give_back(self, key: _Key, mark: _Mark) -> None:
        """Take a key out of flight, if it still is in flight under this mark."""
        if self._in_flight.get(key) is mark:
            del self._in_flight[key]

    def _tidy(self) -> float:
        """Take back orphaned marks, rotate what is due, and return the time that this was judged by."""
        while self._orphans:
            self._give_back(*self._orphans.popleft())
        now = self._clock()
        if now >= self._due:
            # On the generation's own schedule: a late call must not lengthen anybody's memory.
            self._rotate(self._due + self._half_window)
        if now >= self._due:  # a whole window without a rotation: nothing held is young enough
            self._rotate(now + self._half_window)
        return now

    def _has_room(self, now: float) -> bool:
        if self._room <= 0:
            self._count_room()
        while self._room <= 0 and (self._current or self._previous):
            self._rotate(now + self._half_window)
            self._note(GuardEvent.ROTATED_EARLY)
        return self._room > 0

    def _rotate(self, due: float) -> None:
        self._previous, self._current = self._current, {}
        self._due = due
        self._count_room()
        self._note(GuardEvent.ROTATED)

    def _count_room(self) -> None:
        # Nobody gives room back, so between two counts it can only be too small: the ceiling holds.
        landed = len(self._current)
        free = self._max_tracked - len(self._in_flight) - landed - len(self._previous)
        self._room = min(self._max_tracked // 2 - landed, free)

    def _note(self, event: GuardEvent) -> None:
        self._counts[event] += 1
        if self._on_event is not None:
            self._news.append(event)

    def _tell(self) -> None:
        """Tell the callback what is new. Without the lock: the callback may use the guard."""
        while self._news and self._on_event is not None:
            try:
                event = self._news.popleft()
            except IndexError:  # another thread told it
                return
            try:
                self._on_event(event)
            except Exception:
                logger.exception("the guard's on_event %r failed on %s", self._on_event, event.value)


class Attempt:
    """One try at an id, made by `GenerationalGuard.attempt`: the owner of its in-flight mark.

    Leaving the `with` block gives the mark back unless `complete` or `keep` was called. So does losing the
    attempt: a mark lives no longer than its owner.

    Attributes:
        seen: `Seen.NEW` if the id may run; otherwise why not.
    """

    __slots__ = ("_begun_at", "_guard", "_kept", "_key", "_mark", "seen")

    def __init__(self, guard: GenerationalGuard, key: _Key, fingerprint: bytes | None) -> None:
        self._guard = guard
        self._key = key
        self._mark: _Mark | None = _Mark(fingerprint)
        self._kept = False
        self.seen, self._begun_at = guard._begin(key, self._mark)
        if self.seen is not _NEW:
            self._mark = None

    def complete(self, *, window: timedelta | None = None) -> None:
        """Remember the id. Call it once the work cannot be undone: after COMMIT.

        Does nothing if the id was refused, ran untracked, or was taken away by `GenerationalGuard.release`.

        Args:
            window: The window of a durable claim that was taken since this attempt began. The guard never
                answers for the id beyond it: an id that it might keep for longer is not remembered, and
                the durable store answers alone. Default None: there is no such claim.
        """
        mark, self._mark = self._mark, None
        if mark is not None:
            not_beyond = None if window is None else self._begun_at + window.total_seconds()
            self._guard._complete(self._key, mark, not_beyond)

    def release(self) -> None:
        """Give the mark back, so that the id runs again. Does nothing once the attempt is settled."""
        mark, self._mark = self._mark, None
        if mark is not None:
            with self._guard._lock:
                self._guard._give_back(self._key, mark)

    def keep(self) -> None:
        """Keep the mark beyond the `with` block: the caller settles the attempt later."""
        self._kept = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            self.release()

    def __del__(self) -> None:
        # The collector may come by in the midst of the guard's critical section: leave a note, lock nothing.
        if self._mark is not None:
            self._guard._orphans.append((self._key, self._mark))

"""The guard against a model that does keep a timestamp for every id."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastapi_dedup.guard import Attempt, GenerationalGuard, GuardEvent, Seen

WINDOW = 8.0
HALF = WINDOW / 2
EVERY_ID = "abcdefgh"
IDS = st.sampled_from(EVERY_ID)
CEILINGS = st.sampled_from([2, 3, 4, 7, 12, 100])
# Exact in binary, so that rounding blurs no edge; on the edges of both halves, and beside them.
STEPS = st.sampled_from([0.125, 1.0, 2.0, 3.875, 4.0, 4.125, 7.875, 8.0, 8.125, 40.0])
PAYLOADS = st.sampled_from([None, b"tea", b"cocoa"])
CLAIM_WINDOWS = st.sampled_from([1.0, 4.0, 6.0, 8.0, 12.0, 100.0])


@dataclass
class Begun:
    """An id in flight: when it was begun, for which payload, and whether it was forgotten since.

    Where it was begun by hand, and by no attempt, there is no attempt and no payload.
    """

    at: float
    attempt: Attempt | None = None
    fingerprint: bytes | None = None
    forgotten: bool = False


@dataclass
class Success:
    """A completed id.

    `certain` means that the guard has no excuse for forgetting it: nothing but time speaks against it.
    """

    at: float
    fingerprint: bytes | None
    claimed_until: float
    certain: bool


class GuardAgainstModel(RuleBasedStateMachine):
    """Every answer of the guard, judged by a model that forgets nothing."""

    @initialize(ceiling=CEILINGS)
    def start(self, ceiling: int) -> None:
        self.now = 1_000.0
        self.ceiling = ceiling
        self.guard = GenerationalGuard(timedelta(seconds=WINDOW), ceiling, clock=lambda: self.now)
        self.in_flight: dict[str, Begun] = {}
        self.done: dict[str, Success] = {}
        self.completions: list[float] = []

    @rule(seconds=STEPS)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(logical_id=IDS)
    def begin(self, logical_id: str) -> None:
        untracked = self.untracked
        begun = self.guard.begin(logical_id)
        if begun:
            self.judge(logical_id, Seen.NEW)
            self.admit(logical_id, Begun(self.now), untracked)
        else:
            self.judge(logical_id, self.guard.look(logical_id))
            assert self.guard.look(logical_id) is not Seen.NEW

    @rule(logical_id=IDS, fingerprint=PAYLOADS)
    def attempt(self, logical_id: str, fingerprint: bytes | None) -> None:
        untracked = self.untracked
        attempt = self.guard.attempt(logical_id, fingerprint=fingerprint)
        self.judge(logical_id, attempt.seen, fingerprint)
        if attempt.seen is Seen.NEW:
            self.admit(logical_id, Begun(self.now, attempt, fingerprint), untracked)

    @rule(logical_id=IDS, fingerprint=PAYLOADS)
    def look(self, logical_id: str, fingerprint: bytes | None = None) -> None:
        self.judge(logical_id, self.guard.look(logical_id, fingerprint=fingerprint), fingerprint)

    @rule()
    def look_at_every_id(self) -> None:
        for logical_id in EVERY_ID:
            self.look(logical_id)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), claim_window=CLAIM_WINDOWS | st.none())
    def complete(self, data: st.DataObject, claim_window: float | None) -> None:
        logical_id = data.draw(st.sampled_from(sorted(self.in_flight)))
        begun = self.in_flight.pop(logical_id)
        claimed_until = math.inf
        if begun.attempt is None:
            self.guard.complete(logical_id)
        elif claim_window is None:
            begun.attempt.complete()
        else:
            begun.attempt.complete(window=timedelta(seconds=claim_window))
            claimed_until = begun.at + claim_window
        if not begun.forgotten:
            # Only a claim that outlives whatever the guard may remember leaves no excuse.
            certain = claimed_until >= self.now + WINDOW
            self.succeed(logical_id, begun.fingerprint, claimed_until, certain=certain)

    @rule(logical_id=IDS)
    def complete_by_hand(self, logical_id: str) -> None:
        untracked = self.untracked
        begun = self.in_flight.pop(logical_id, None)
        self.guard.complete(logical_id)
        if begun is None:
            assert self.untracked == untracked or len(self.in_flight) == self.ceiling
            self.succeed(logical_id, None, certain=self.untracked == untracked)
        elif not begun.forgotten:
            self.succeed(logical_id, begun.fingerprint)

    @rule(logical_id=IDS)
    def release(self, logical_id: str) -> None:
        self.guard.release(logical_id)
        self.in_flight.pop(logical_id, None)
        self.done.pop(logical_id, None)

    @rule(logical_id=IDS)
    def forget(self, logical_id: str) -> None:
        seen = self.guard.look(logical_id)
        self.judge(logical_id, seen)
        assert self.guard.forget(logical_id) == (seen is Seen.PROCESSED)
        assert self.guard.look(logical_id) is (Seen.IN_FLIGHT if logical_id in self.in_flight else Seen.NEW)
        self.done.pop(logical_id, None)
        if logical_id in self.in_flight:
            self.in_flight[logical_id].forgotten = True

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def lose_an_attempt(self, data: st.DataObject) -> None:
        logical_id = data.draw(st.sampled_from(sorted(self.in_flight)))
        if self.in_flight[logical_id].attempt is not None:
            del self.in_flight[logical_id]  # the last reference: CPython runs the finaliser here

    @invariant()
    def the_ceiling_holds(self) -> None:
        # Without `snapshot()`: that would do the guard's chores, and hide a chore that comes too late.
        guard = self.guard
        assert len(guard._in_flight) + len(guard._current) + len(guard._previous) <= self.ceiling

    @precondition(lambda self: not self.guard._orphans)
    @invariant()
    def in_flight_ids_are_exactly_those_that_were_begun_and_not_settled(self) -> None:
        assert self.guard._in_flight.keys() == self.in_flight.keys()

    @property
    def untracked(self) -> int:
        return self.guard._counts[GuardEvent.UNTRACKED]

    def judge(self, logical_id: str, seen: Seen, fingerprint: bytes | None = None) -> None:
        """Say whether this answer is one that the model allows."""
        if logical_id in self.in_flight:
            assert seen is Seen.IN_FLIGHT, "an id in flight never begins twice"
            return
        success = self.done.get(logical_id)
        if success is None:
            assert seen is Seen.NEW
            return
        age = self.now - success.at
        if seen in {Seen.PROCESSED, Seen.MISMATCH}:
            other = None not in (fingerprint, success.fingerprint) and fingerprint != success.fingerprint
            assert (seen is Seen.MISMATCH) == other
            assert age < WINDOW, "never remembers past the window"
            assert self.now < success.claimed_until, "never answers beyond the claim"
        else:
            assert seen is Seen.NEW
            assert age > HALF or not success.certain, "never forgets before half the window"
            del self.done[logical_id]

    def admit(self, logical_id: str, begun: Begun, untracked: int) -> None:
        if self.untracked > untracked:
            assert len(self.in_flight) == self.ceiling, "only in-flight ids that fill the ceiling hide one"
        else:
            self.in_flight[logical_id] = begun
            self.weigh()

    def succeed(
        self,
        logical_id: str,
        fingerprint: bytes | None,
        claimed_until: float = math.inf,
        *,
        certain: bool = True,
    ) -> None:
        self.completions.append(self.now)
        earlier = self.done.get(logical_id)
        if earlier is not None:  # completed once more without being begun: the later one may be the one kept
            claimed_until = max(claimed_until, earlier.claimed_until)
        self.done[logical_id] = Success(self.now, fingerprint, claimed_until, certain)
        self.weigh()

    def weigh(self) -> None:
        """Excuse every forgetting once the ids of one window weigh half the ceiling."""
        self.completions = [at for at in self.completions if self.now - at < WINDOW]
        if len(self.completions) + len(self.in_flight) >= self.ceiling // 2:
            for success in self.done.values():
                success.certain = False


TestGuardAgainstModel = GuardAgainstModel.TestCase
TestGuardAgainstModel.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)

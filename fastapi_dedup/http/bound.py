"""A policy as FastAPI calls it on a route: one dependency for all that is to happen there.

FastAPI has work with every dependency, whether that has anything to do or not. So what start-up adds to a
route (`http.routes`) goes into the dependency that the route has already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.dependencies.utils import request_params_to_args

from fastapi_dedup.http.dependency import Deduplicated
from fastapi_dedup.http.exchange import OWN

if TYPE_CHECKING:
    from fastapi.dependencies.models import Dependant
    from starlette.requests import HTTPConnection

    from fastapi_dedup.claims import Claim

__all__ = ["Bound", "policies_of"]


class Bound:
    """A policy, bound to a route.

    Args:
        policy: The policy.

    Attributes:
        policy: The policy.
        also: The middleware's own policy, where it claims on this route too.
        checked: The route's dependencies whose parameters must be valid before anything is claimed.
    """

    def __init__(self, policy: Deduplicated) -> None:
        self.policy = policy
        self.also: Deduplicated | None = None
        self.checked: list[Dependant] = []
        self.__signature__ = policy.__signature__  # type: ignore[attr-defined]  # made in __post_init__

    def __eq__(self, other: object) -> bool:
        """Be equal to the same policy, bound for FastAPI's cache, and unbound for its overrides."""
        policy = other.policy if isinstance(other, Bound) else other
        return isinstance(policy, Deduplicated) and self.policy == policy

    def __hash__(self) -> int:
        """Hash like the policy."""
        return hash(self.policy)

    async def __call__(
        self, connection: HTTPConnection, session: Any = OWN, principal: Any = None
    ) -> Claim | None:
        """Claim what the policy says, and what the middleware's says; return the first. FastAPI calls this.

        Args:
            connection: The request.
            session: What the policy's `session=` gave.
            principal: What the policy's `scope=` gave, where that is a dependency.
        """
        if self.checked and not self._is_valid(connection):
            return None
        claim = await self.policy(connection, session, principal)
        if self.also is not None:
            await self.also(connection)
        return claim

    def _is_valid(self, connection: HTTPConnection) -> bool:
        """Tell whether FastAPI finds nothing missing in headers, cookies, query and path.

        FastAPI goes on to solve dependencies although one of them lacks its credentials, and answers 422 in
        the end. A claim that were made meanwhile would tell that caller about ids, or keep the rightful one
        waiting. Where a test overrides dependencies, what they ask for is not known here.
        """
        overridden = getattr(connection.scope.get("app"), "dependency_overrides", None)
        return bool(overridden) or not any(
            errors
            for each in self.checked
            for fields, given in (
                (each.header_params, connection.headers),
                (each.cookie_params, connection.cookies),
                (each.query_params, connection.query_params),
                (each.path_params, connection.path_params),
            )
            for errors in request_params_to_args(fields, given)[1:]
        )


def policies_of(call: object) -> list[Deduplicated]:
    """Return the policies that FastAPI asks when it calls a dependency; none where it is no claim."""
    if isinstance(call, Bound):
        return [call.policy] if call.also is None else [call.policy, call.also]
    return [call] if isinstance(call, Deduplicated) else []

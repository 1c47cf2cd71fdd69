"""A request's body that does not leave before we know of it. See `http`.

The client asks for it piece by piece, on our loop, and only once it is connected. So what was not asked for has not
left; and what is not given, because the call has ended meanwhile, never will.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

LARGE_BODY_OCTETS: Final = 64 * 1024
"""From here on a body leaves but for its last octet before `leaving` is called. Without it the server cannot accept, so
that a connection which breaks half-way through ten megabytes is a definite no."""
ANSWERS_SHARE: Final = 0.25
MOST_FOR_ANSWER_SECONDS: Final = 1.0
"""Of a call's time so much is the answer's, at most a second: what could only leave in that time stays, for its answer
would hardly be met."""


def latest_departure(deadline: float) -> float:
    """Until when a body may leave that is to be answered by the deadline; in the loop's `time()`."""
    remaining = deadline - asyncio.get_running_loop().time()
    return deadline - min(MOST_FOR_ANSWER_SECONDS, max(0.0, remaining) * ANSWERS_SHARE)


class GuardedBody:
    """A body that the client has to ask for: given once, not too late, and only while somebody waits for the answer.

    Attributes:
        refusal: What `leaving` raised.
        has_begun: Whether some of a large body was handed over.
        has_left: Whether all of it was.
    """

    def __init__(self, body: bytes, leaving: Callable[[], None], latest: float) -> None:
        """A body that stays until it is asked for.

        Args:
            leaving: Called just before the octet without which the server cannot accept.
            latest: In the loop's `time()`; afterwards nothing leaves.
        """
        self._body: memoryview | None = memoryview(body)
        self._leaving = leaving
        self._latest = latest
        self.refusal: BaseException | None = None
        self.has_begun = False
        self.has_left = False

    def keep(self) -> None:
        """Hand nothing over from now on: nobody waits for the answer any more."""
        self._body = None

    def __aiter__(self) -> GuardedBody:
        return self

    async def __anext__(self) -> memoryview:
        if self.has_left:
            raise StopAsyncIteration
        if self._body is None:
            raise ConnectionAbortedError("nobody waits for the answer any more")
        if len(self._body) > LARGE_BODY_OCTETS:
            self.has_begun = True
            most, self._body = self._body[:-1], self._body[-1:]
            return most
        if asyncio.get_running_loop().time() >= self._latest:
            raise TimeoutError("too late to be answered in time")
        try:
            self._leaving()
        except BaseException as refusal:
            self.refusal = refusal
            raise
        self.has_left = True
        body, self._body = self._body, None
        return body

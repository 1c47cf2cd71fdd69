"""AWS credentials, ready to sign with. botocore finds and renews them in a thread, so that the loop never waits.

The search and each renewal may ask a server (an instance's metadata, STS, SSO), which may take minutes. Emails wait
only if no valid credentials are at hand: until the first search has ended, or if a renewal does not end before the old
credentials expire.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import botocore.session
from botocore.credentials import ReadOnlyCredentials, RefreshableCredentials
from botocore.exceptions import NoCredentialsError

LOOK_SECONDS: Final = 1.0
"""Between two checks whether the credentials have to be renewed."""
RENEW_AGAIN_SECONDS: Final = 30.0
"""Between two renewals, while the credentials are valid."""
LAST_SECONDS: Final = 30
"""Credentials that expire within so many seconds sign no request: it has to reach SES before."""

_Found = tuple[Any, ReadOnlyCredentials]
"""What renews them, and the credentials themselves."""


class AwsCredentials:
    """The credentials of a session, for one loop."""

    def __init__(self, session: botocore.session.Session) -> None:
        """Asks nobody; the first email starts the search."""
        self._session = session
        self._source: Any = None
        self._frozen: ReadOnlyCredentials | None = None
        self._coming: asyncio.Future[_Found] | None = None
        self._looks_at = 0.0
        self._renews_at = 0.0

    def at_hand(self) -> ReadOnlyCredentials | None:
        """The credentials to sign with now; None if an email has to `wait`. Starts a renewal when one is due."""
        if isinstance(self._source, RefreshableCredentials):
            now = asyncio.get_running_loop().time()
            if now >= self._looks_at:
                self._looks_at = now + LOOK_SECONDS
                self._look(now)
        return self._frozen

    async def wait(self, deadline: float) -> ReadOnlyCredentials:
        """The credentials to sign with, once botocore has found or renewed them.

        Args:
            deadline: In the loop's `time()`.

        Raises:
            TimeoutError: the deadline passed.
            Exception: what botocore raised because it found none.
        """
        if found := self.at_hand():
            return found
        async with asyncio.timeout_at(deadline):
            # One email's deadline must not cancel what all of them wait for.
            _, found = await asyncio.shield(self._begin())
        return found

    def _look(self, now: float) -> None:
        """Starts a renewal if one is due, and drops credentials that expire."""
        if self._coming is None and now >= self._renews_at and self._source.refresh_needed():
            self._renews_at = now + RENEW_AGAIN_SECONDS
            self._begin()
        if self._source.refresh_needed(LAST_SECONDS):
            self._frozen = None

    def _begin(self) -> asyncio.Future[_Found]:
        """Starts a thread that finds or renews them, unless one is running; done when the thread has ended."""
        if self._coming is None:
            self._coming = _in_thread(self._find)
            self._coming.add_done_callback(self._take)
        return self._coming

    def _find(self) -> _Found:
        """What the thread does."""
        source = self._source or self._session.get_credentials()
        if source is None:
            raise NoCredentialsError
        return source, source.get_frozen_credentials()

    def _take(self, found: asyncio.Future[_Found]) -> None:
        self._coming = None
        if found.exception() is None:
            self._source, self._frozen = found.result()
            self._looks_at = found.get_loop().time() + LOOK_SECONDS


def _in_thread(find: Callable[[], _Found]) -> asyncio.Future[_Found]:
    """The function's result, from a daemon thread: a process that exits does not wait for it."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[_Found] = loop.create_future()

    def run() -> None:
        settle: Callable[[], None]
        try:
            settle = functools.partial(found.set_result, find())
        except Exception as error:  # noqa: BLE001 - the edge of a thread
            settle = functools.partial(found.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name="aws-credentials", daemon=True).start()
    return found

"""Access tokens that the processes of a host share, so that one process requests a token, and all of them use it.

The tokens are in a file of the run directory that only its owner can read. A process requests a token under a lock on
the file, after it has read the file again. A token is renewed before it expires; meanwhile, the old token stays in use.
Times are those of the steady clock, and the server says how long a token is valid, so a wrong wall clock does no harm.

If the run directory belongs to another user, as for `dispatcher doctor` of root, the file is neither read nor written.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

import orjson

from dispatcher.domain.scrub import OWN_SECRETS
from dispatcher.domain.values import dataclass, field, replace
from dispatcher.errors import ProviderFault
from dispatcher.host.clock import boot_id, steady_clock
from dispatcher.telemetry.log import get_log
from dispatcher.transport.oauth import GrantedToken, OAuthGrant

EARLY_SECONDS: Final = 300.0
"""A token is renewed this long before it expires, or after three quarters of its life if that is later."""
FRESH_SECONDS: Final = 60.0
"""A token with which no login has succeeded is not replaced for this long after it was requested: the server
would refuse a new one for the same reason."""
RETRY_SECONDS: Final = 30.0
"""After a failed renewal, the next one begins after this time, while the old token is valid."""
LOCKED_SECONDS: Final = 0.1
"""While another process requests a token, this process looks for the token at this interval."""


@dataclass(frozen=True, slots=True)
class AccessToken:
    """A token. Instants are those of the steady clock."""

    text: str = field(repr=False)
    requested_at: float
    expires_at: float

    @property
    def renew_at(self) -> float:
        return self.expires_at - min(EARLY_SECONDS, (self.expires_at - self.requested_at) / 4)


@dataclass(frozen=True, slots=True)
class _Stored:
    token: AccessToken | None = None
    refresh_token: str = field(default="", repr=False)  # the server replaced the configured one by it


class AccessTokens:
    """The access tokens for one account of a provider, for one event loop."""

    def __init__(
        self,
        grant: OAuthGrant,
        request: Callable[[OAuthGrant], Awaitable[GrantedToken]],
        *,
        folder: Path | None,
        clock: Callable[[], float] = steady_clock,
        name: Callable[[], str] = lambda: "",
    ) -> None:
        """`folder`: the run directory; None if no other process shares the tokens. `name`: the provider's, for logs."""
        self._grant = grant
        self._name = name
        self._request = request
        self._clock = clock
        # With other settings, the file is another one.
        self._key = sha256(orjson.dumps([*sorted(grant.form.items()), ("url", grant.token_url)])).hexdigest()[:24]
        self._path = folder / f"oauth-{self._key}.json" if folder and _is_ours(folder) else None
        self._stored = _Stored()
        self._proven = self._refused = ""  # the tokens with which the last login succeeded, and failed
        self._pending: asyncio.Task[AccessToken] | None = None
        self._next_renewal_at = 0.0

    async def get(self) -> AccessToken:
        """A valid token. Waits only if there is none. Raises TokenUnavailable or ProviderFault."""
        now, token = self._clock(), self._stored.token
        if token is not None and now < token.renew_at:
            return token
        if token is not None and now < token.expires_at:
            if self._pending is None and now >= self._next_renewal_at:
                self._next_renewal_at = now + RETRY_SECONDS
                self._begin_renewal().add_done_callback(self._report)
            return token
        # Many emails wait for the same request, so the deadline of one email must not cancel the request.
        return await asyncio.shield(self._pending or self._begin_renewal())

    def note_login(self, token: AccessToken) -> None:
        self._proven = token.text

    def drop(self, refused: AccessToken) -> bool:
        """Forgets a token that the server has refused. Returns whether another token may be accepted."""
        current = self._stored.token
        if current is not None and current.text == refused.text:
            if self._proven != refused.text and self._clock() - refused.requested_at < FRESH_SECONDS:
                return False
            self._proven, self._refused = "", refused.text
            self._stored = replace(self._stored, token=None)
        return True

    async def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.wait({self._pending})

    def _begin_renewal(self) -> asyncio.Task[AccessToken]:
        self._pending = asyncio.create_task(self._renew())
        self._pending.add_done_callback(self._on_renewed)
        return self._pending

    def _on_renewed(self, done: asyncio.Task[AccessToken]) -> None:
        self._pending = None
        if not done.cancelled():
            done.exception()  # marks it as seen; callers that wait for the task get it, too

    def _report(self, done: asyncio.Task[AccessToken]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            fields = {"provider": self._name(), "reason": str(error), "retry_in_seconds": RETRY_SECONDS}
            get_log().warning("provider.token_not_renewed", **fields)

    async def _renew(self) -> AccessToken:
        while True:
            with self._locked() as is_ours:
                found = self._read()
                # While another process renews a token, this one uses it until it expires.
                if (token := found.token) is not None and self._clock() < (
                    token.renew_at if is_ours else token.expires_at
                ):
                    self._keep(found)
                    return token
                if is_ours:
                    return await self._request_new(found.refresh_token)
            await asyncio.sleep(LOCKED_SECONDS)

    async def _request_new(self, renewed: str) -> AccessToken:
        """`renewed`: the refresh token by which the server has replaced the configured one."""
        began_at = self._clock()  # before the request, so that the token never looks younger than it is
        try:
            granted = await self._request(replace(self._grant, refresh_token=renewed or self._grant.refresh_token))
        except ProviderFault:
            if not renewed:
                raise
            renewed = ""
            granted = await self._request(self._grant)
        token = AccessToken(granted.access_token, began_at, began_at + granted.seconds)
        self._keep(_Stored(token, granted.refresh_token or renewed))
        self._write(self._stored)
        return token

    def _keep(self, found: _Stored) -> None:
        self._stored = found
        assert found.token is not None
        OWN_SECRETS.register(f"OAuth {self._key}", [found.token.text, found.refresh_token])

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Yields whether this process may write the file: no other process has the lock."""
        if self._path is None:
            yield True
            return
        try:
            descriptor = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # for example, the disk is full; then each process has its own token
            yield True
            return
        try:
            yield _try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _read(self) -> _Stored:
        """What the file has; what this process has, if there is no file. Leaves out a refused token, and a token from
        before the host's restart, because the steady clock has begun again."""
        if self._path is None:
            return self._stored
        try:
            found = orjson.loads(self._path.read_bytes())
            refresh_token = str(found["refresh_token"])
            text, requested_at, expires_at = found["token"] or ("", 0.0, 0.0)
            if not text or text == self._refused or found["boot_id"] != boot_id():
                return _Stored(None, refresh_token)
            return _Stored(AccessToken(str(text), float(requested_at), float(expires_at)), refresh_token)
        except (OSError, ValueError, KeyError, TypeError):
            return _Stored()

    def _write(self, stored: _Stored) -> None:
        if self._path is None:
            return
        token = stored.token and (stored.token.text, stored.token.requested_at, stored.token.expires_at)
        document = {"boot_id": boot_id(), "token": token, "refresh_token": stored.refresh_token}
        temporary = self._path.with_suffix(".new")
        with suppress(OSError):  # as in `_locked`
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, orjson.dumps(document))
            finally:
                os.close(descriptor)
            temporary.replace(self._path)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_ours(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.geteuid()
    except OSError:
        return False

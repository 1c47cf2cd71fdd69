"""What the signatures of all providers have in common: their encoding, and how old they may be."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Final

from dispatcher.events.contract import EventsRefused, Refusal

MAX_AHEAD_SECONDS: Final = 600.0
"""How far the provider's clock may be ahead of this host's clock."""
_MAX_CHARACTERS: Final = 1024
"""The longest accepted signature, in base64. The signatures of all RSA keys in use are shorter."""


def decode(signature: str) -> bytes:
    """A signature's bytes, from base64. Raises EventsRefused."""
    try:
        if len(signature) <= _MAX_CHARACTERS:
            return base64.b64decode(signature, validate=True)
    except ValueError:
        pass
    raise EventsRefused(Refusal.SIGNATURE, "The signature is not valid base64.")


class Freshness:
    """Checks how old a signature is. `max_age_seconds`: 0 for any age.

    A copy of an old request would change nothing, because its events are already stored. But each copy would cost a
    transaction, so old requests are refused.
    """

    def __init__(self, max_age_seconds: float, clock: Callable[[], float]) -> None:
        self._max_age_seconds = max_age_seconds
        self._clock = clock

    def check(self, signed_at: float) -> None:
        """Raises EventsRefused if a signature made at this Unix time is too old, or too far in the future."""
        if not self._max_age_seconds:
            return
        age = self._clock() - signed_at
        if not -MAX_AHEAD_SECONDS <= age <= self._max_age_seconds:
            detail = "The signature's time is too far from this host's time. See DISPATCHER_EVENTS_MAX_AGE_SECONDS."
            raise EventsRefused(Refusal.STALE, detail)

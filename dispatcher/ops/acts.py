"""The actor and the reason, which the audit log records for every operator action."""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import dataclass
from typing import Final, Self

from dispatcher.domain.scrub import scrub
from dispatcher.errors import DispatcherError

MAX_ACTOR_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class Act:
    """The actor of an operator action (a login and its host, such as `ann@ops-1`, or the name of an API key), and the
    reason: one line without addresses, because audit records may be kept for ever. Create an act with `of`."""

    actor: str
    reason: str

    @classmethod
    def of(cls, actor: str | None, reason: str) -> Self:
        """Removes addresses from the reason, which is required. Without an actor, uses this process's user and host."""
        why = scrub(reason)
        if not why:
            raise DispatcherError(
                "The reason is missing.", remedy="Give a short reason; it is stored in the audit log."
            )
        who = "".join(c for c in actor or this_user() if c.isprintable())[:MAX_ACTOR_CHARACTERS].strip()
        return cls(who or this_user(), why)


def this_user() -> str:
    """The operating system's user and the host, as `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, a user id may have no name
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"

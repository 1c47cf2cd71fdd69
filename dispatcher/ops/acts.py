"""Who acts, and why: what every change by a person is recorded with."""

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
    """A person's decision; make it by `of`.

    Attributes:
        actor: Who, such as `ann@ops-1`: a login and its host, or what an API's caller is known as.
        reason: Why, on one line, addresses taken out: it stays for good.
    """

    actor: str
    reason: str

    @classmethod
    def of(cls, actor: str | None, reason: str) -> Self:
        """An act; by this process's user on this host if nobody else is named.

        Raises:
            DispatcherError: there is no reason.
        """
        why = scrub(reason)
        if not why:
            raise DispatcherError("A reason is missing.", remedy="Say why, in a few words: they stand in the audit.")
        who = "".join(c for c in actor or this_user() if c.isprintable())[:MAX_ACTOR_CHARACTERS].strip()
        return cls(who or this_user(), why)


def this_user() -> str:
    """The operating system's user, and the host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's number without a name
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"

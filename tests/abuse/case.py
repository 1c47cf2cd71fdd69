"""Defines a case: what hostile clients do, and which results are allowed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final
from uuid import UUID, uuid4

HEALTHY: Final = "200"
ENDED: Final = "end"
"""The result if the connection ended without a response."""


@dataclass(frozen=True, slots=True)
class Target:
    """What an attacker knows about the API.

    Attributes:
        keys: API keys by kind: `send`, `read`, `operate`, `revoked`, `bound` (to one sender), `slow`
            (one request per second), `poor` (fifty recipients per day).
        held: Ids of held emails of the attacker's own tenant.
        foreign: The id of an email of another tenant.
        foreign_replay: The id of a replay of another tenant.
        seconds: How long the attack lasts.
    """

    port: int
    keys: dict[str, str]
    held: list[UUID]
    foreign: UUID
    foreign_replay: int
    seconds: float
    name: str = field(default_factory=lambda: uuid4().hex[:8])
    numbers: count[int] = field(default_factory=count)

    def message_key(self) -> str:
        """A unique message key."""
        return f"abuse-{self.name}-{next(self.numbers)}"

    def authorization(self, kind: str = "send") -> str:
        """The Authorization header with the key of this kind (see `keys`)."""
        return f"Authorization: Bearer {self.keys[kind]}"


Attack = Callable[[Target], Awaitable[list[str]]]
"""Makes one round of an attack; returns the result of each request: status and code, or how the connection ended."""


@dataclass(frozen=True, slots=True)
class Case:
    """One attack, repeated by several clients.

    Attributes:
        allowed: The results that the attackers may get.
        clients: How many attackers repeat the attack concurrently.
        seconds: How long the attackers repeat it.
    """

    family: str
    name: str
    attack: Attack
    allowed: frozenset[str]
    clients: int = 4
    seconds: float = 2.0

    @property
    def id(self) -> str:
        """The case's name on the command line."""
        return f"{self.family}: {self.name}"

"""A case of abuse: what one hostile client does, and what it may get for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final
from uuid import UUID, uuid4

HEALTHY: Final = "200"
ENDED: Final = "end"
"""The connection ended without an answer."""


@dataclass(frozen=True, slots=True)
class Prey:
    """What an attacker knows of the API.

    Attributes:
        keys: API keys by what they may do: `send`, `read`, `operate`, `revoked`, `bound` (to one sender), `slow`
            (one request per second), `poor` (fifty recipients per day).
        held: Ids of held emails of the attacker's own tenant.
        foreign: An email of another tenant.
        foreign_replay: A replay of another tenant.
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
        """A key that no other email has."""
        return f"abuse-{self.name}-{next(self.numbers)}"

    def authorization(self, kind: str = "send") -> str:
        """The header with one of the keys."""
        return f"Authorization: Bearer {self.keys[kind]}"


Attack = Callable[[Prey], Awaitable[list[str]]]
"""One round of an attack; returns what each of its requests got: status and code, or how the connection ended."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        allowed: What the attacker may get.
        clients: How many do it at once, again and again until the time is over.
        seconds: How long they do.
    """

    family: str
    name: str
    attack: Attack
    allowed: frozenset[str]
    clients: int = 4
    seconds: float = 2.0

    @property
    def id(self) -> str:
        """Its name on the command line."""
        return f"{self.family}: {self.name}"

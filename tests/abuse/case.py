"""Defines a case: what hostile clients do, and which results are allowed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from uuid import uuid4


@dataclass(frozen=True, slots=True)
class Target:
    """What an attacker knows about the API. `keys`: by kind: `send`, `read`, `unknown`, `wrong` (an existing id with
    another secret)."""

    port: int
    keys: dict[str, str]
    seconds: float
    name: str = field(default_factory=lambda: uuid4().hex[:8])
    numbers: count[int] = field(default_factory=count)

    def message_key(self) -> str:
        return f"abuse-{self.name}-{next(self.numbers)}"

    def named(self, kind: str = "send") -> tuple[str, str]:
        """Headers with the key of this kind, and with a new message key."""
        return f"Authorization: Bearer {self.keys[kind]}", f"Idempotency-Key: {self.message_key()}"


Attack = Callable[[Target], Awaitable[list[str]]]
"""Makes one round of an attack; returns the result of each request: status and code, or how the connection ended."""


@dataclass(frozen=True, slots=True)
class Case:
    """One attack, which `clients` repeat concurrently for some seconds. They may get only the `allowed` results."""

    family: str
    name: str
    attack: Attack
    allowed: frozenset[str]
    clients: int = 4
    seconds: float = 2.0
    max_health_ms: float = 100.0

    @property
    def id(self) -> str:
        return f"{self.family}: {self.name}"

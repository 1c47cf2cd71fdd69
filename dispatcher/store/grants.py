"""The fewest rights that each kind of PostgreSQL role needs, as statements that the owner of the tables executes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dispatcher.store.queries import query

MAX_NAME_OCTETS: Final = 63
"""PostgreSQL's NAMEDATALEN minus the terminating octet."""


@dataclass(frozen=True, slots=True)
class Role:
    """A PostgreSQL role and its rights."""

    role: str  # `producer`, `dispatcher` or `reader`
    name: str
    about: str  # which program connects with it
    grants: tuple[str, ...]  # SQL statements without semicolons; idempotent


def roles_of(*, producer: str, dispatcher: str, reader: str, is_exact: bool = False) -> list[Role]:
    """The three kinds of roles, each with only the rights that it needs. The roles do not need to exist yet. Raises
    ValueError if PostgreSQL does not accept one of the names.

    If `is_exact`, the statements first take the rights that only the library of earlier releases needs.
    """
    revoked = query("revoke_producer") + b";" if is_exact else b""
    return [
        _role("producer", producer, "an application that enqueues with the library", revoked + query("grant_producer")),
        _role(
            "dispatcher",
            dispatcher,
            "`dispatcher run`, `api` and operators' commands; not `init`, which makes the tables",
            query("grant_dispatcher"),
        ),
        _role(
            "reader",
            reader,
            "`status`, `held list`, `dlq list`, `show`, `replays`, `prune --dry-run`; no content, no addresses",
            query("grant_reader"),
        ),
    ]


def _role(role: str, name: str, about: str, grants: bytes) -> Role:
    # PostgreSQL would truncate a longer name, and grant the rights to a different role.
    if not name or not name.isprintable() or len(name.encode()) > MAX_NAME_OCTETS:
        raise ValueError(f"{name!r} is not a valid name for a role")
    quoted = '"' + name.replace('"', '""') + '"'
    statements = [" ".join(grant.split()) for grant in grants.decode().split(";")]
    return Role(role, name, about, tuple(grant.format(role=quoted) for grant in statements))

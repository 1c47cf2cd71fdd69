"""The least that each kind of PostgreSQL role needs, as statements for the owner of the tables."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.store.queries import query


@dataclass(frozen=True, slots=True)
class Role:
    """A PostgreSQL role, and what it may do.

    Attributes:
        role: `producer`, `dispatcher` or `reader`.
        name: In PostgreSQL.
        about: Who connects as it.
        grants: SQL statements without their semicolons. They may be executed again.
    """

    role: str
    name: str
    about: str
    grants: tuple[str, ...]


def roles_of(*, producer: str, dispatcher: str, reader: str) -> list[Role]:
    """The three kinds of roles, each with no right more than it uses.

    Args:
        producer: A role's name, and so are the others. It need not exist yet.

    Raises:
        ValueError: PostgreSQL takes no such name.
    """
    return [
        _role("producer", producer, "an application that enqueues by the library", query("grant_producer")),
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
    if not name or not name.isprintable():
        raise ValueError(f"{name!r} is no name of a role")
    quoted = '"' + name.replace('"', '""') + '"'
    statements = [" ".join(grant.split()) for grant in grants.decode().split(";")]
    return Role(role, name, about, tuple(grant.format(role=quoted) for grant in statements))

"""Fixtures of the tests of the tables: PostgreSQL roles with the rights that the documentation names."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from dispatcher.store.grants import roles_of
from tests.store.books import Books, UrlOf


@pytest.fixture
def url_of(tables_url: str, books: Books) -> Iterator[UrlOf]:
    """Creates a role of a kind: `producer`, `dispatcher`, `reader`, or `stranger`, which has no right to the schema.
    Returns the URL with which the role connects."""
    created = []

    def create(kind: str) -> str:
        name = f"{kind}_{secrets.token_hex(4)}"
        books.connection.execute(f"create role {name} login password 'secret'".encode())
        created.append(name)
        for role in roles_of(producer=name, dispatcher=name, reader=name):
            for grant in role.grants if role.role == kind else ():
                books.connection.execute(grant.encode())
        parts = urlsplit(tables_url)
        return parts._replace(netloc=f"{name}:secret@{parts.hostname}:{parts.port}").geturl()

    yield create
    for name in created:
        books.connection.execute(
            b"select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = %s", [name]
        )
        books.connection.execute(f"drop owned by {name}".encode())
        books.connection.execute(f"drop role {name}".encode())

"""One-click unsubscribe (RFC 8058): POST suppresses the recipient, GET only asks, and other tokens are not found."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit
from uuid import UUID, uuid4

import psycopg
import pytest

from tests.api.running_api import EMAIL, Api
from tests.store.suppressing import hasher_of

ONE_CLICK = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """A database that only one test uses, because one test refuses connections to the database."""
    return own_database_url


def entries(connection: psycopg.Connection) -> list[tuple[str, str, str]]:
    return connection.execute("select tenant_id, masked, reason from suppression").fetchall()


async def test_post_suppresses_the_recipient_once_and_get_changes_nothing(
    api: Api, connection: psycopg.Connection
) -> None:
    email_id = UUID((await api.post("a", EMAIL | {"to": ["Ann <ann@example.org>"]})).json["id"])
    path = f"/v1/unsubscribe/{hasher_of(connection).unsubscribe_token(email_id, 'ann@example.org')}"

    asked = await api.call("GET", path)
    assert (asked.status, entries(connection)) == (200, [])
    assert b'method="post"' in asked.body
    for _ in range(2):
        done = await api.call("POST", path, raw=b"List-Unsubscribe=One-Click", headers=ONE_CLICK)
        assert done.status == 200

    assert entries(connection) == [("default", "a•••@example.org", "unsubscribe")]


async def test_tokens_that_are_not_genuine_and_unknown_emails_get_the_same_answer(
    api: Api, connection: psycopg.Connection
) -> None:
    hasher = hasher_of(connection)
    genuine = hasher.unsubscribe_token(uuid4(), "ann@example.org")
    tokens = [genuine, genuine[:-1] + ("A" if genuine[-1] != "A" else "B"), "x", "%00" * 64, "A" * 64, "é" * 32]

    answers = [await api.call("POST", f"/v1/unsubscribe/{token}", raw=b"", headers=ONE_CLICK) for token in tokens]

    assert {answer.status for answer in answers} == {404}
    assert len({answer.body for answer in answers}) == 1
    assert entries(connection) == []


async def test_a_forged_token_needs_no_database_session(api: Api, connection: psycopg.Connection) -> None:
    genuine = hasher_of(connection).unsubscribe_token(uuid4(), "ann@example.org")
    assert (await api.call("GET", f"/v1/unsubscribe/{genuine}")).status == 200
    url = urlsplit(api.settings.database_url)
    with psycopg.connect(urlunsplit(url._replace(path="/postgres")), autocommit=True) as outside:
        outside.execute(f'alter database "{url.path.removeprefix("/")}" with allow_connections false')
        outside.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [url.path.removeprefix("/")]
        )

        forged = [
            await api.call(method, f"/v1/unsubscribe/{token}")
            for method in ("GET", "POST")
            for token in ("x", "A" * 64, "A" * 63 + "=", "é" * 64)
        ]
        suppressing = await api.call("POST", f"/v1/unsubscribe/{genuine}")

    assert {answer.code for answer in forged} == {"not-found"}
    assert suppressing.code == "database-unavailable"

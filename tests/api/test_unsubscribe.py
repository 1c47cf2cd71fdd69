"""One-click unsubscribe (RFC 8058): POST suppresses the recipient, GET only asks, and other tokens are not found."""

from __future__ import annotations

from uuid import UUID, uuid4

import psycopg

from tests.api.running_api import EMAIL, Api
from tests.store.suppressing import hasher_of

ONE_CLICK = {"Content-Type": "application/x-www-form-urlencoded"}


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

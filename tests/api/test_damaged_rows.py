"""Damaged rows are shown beside all others: no request fails because of them."""

from __future__ import annotations

import psycopg

from tests.api.running_api import Api
from tests.store.books import Books
from tests.store.damaged_rows import insert_damaged


async def test_the_list_and_each_email_are_answered_beside_damaged_rows(
    api: Api, connection: psycopg.Connection
) -> None:
    ids = insert_damaged(Books(connection))
    other = (await api.post("other")).json["id"]

    listed = await api.get("/v1/emails?limit=200")
    by_recipient = await api.get("/v1/emails?recipient=ann@example.org&limit=200")
    singles = {name: await api.get(f"/v1/emails/{email_id}") for name, email_id in ids.items()}

    assert {email["id"] for email in listed.json["emails"]} == {other, *map(str, ids.values())}
    assert {email["id"] for email in by_recipient.json["emails"]} == {other, *map(str, ids.values())}
    assert {name: answer.status for name, answer in singles.items() if answer.status != 200} == {}
    assert {name: answer.json["id"] for name, answer in singles.items()} == {name: str(ids[name]) for name in ids}

"""The Python client returns typed results, and enqueues an email once, however many requests and responses are lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from dispatcher import Email
from dispatcher.actions import all_actions
from dispatcher.actions.dlq import REPLAYS
from dispatcher.actions.emails import ListEmails
from dispatcher.actions.feed import ListEvents
from dispatcher.client import ApiProblem, AsyncClient, Client, EmailPage, NoResponse, Receipt, Refused
from dispatcher.client.operations import Method, Operations
from dispatcher.domain.status import Status
from dispatcher.errors import DispatcherError, InvalidEmail
from tests.api.running_api import Api, make_key
from tests.store.test_outgoing_events import announce

TOMORROW = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)


def email(key: str = 'order 17 "a" / b', subject: str = "Your receipt") -> Email:
    return Email(message_key=key, sender="shop@example.com", to="ann@example.org", subject=subject, text="Thanks.")


async def test_both_clients_return_the_same_results(api: Api, connection: psycopg.Connection) -> None:
    key = make_key(connection)

    def use_every_method() -> list[object]:
        with Client(api.url, key=key) as client:
            first = client.send(email())
            return [
                first,
                client.send(email()),
                client.send_many([email("k-2"), email(subject="Another")]),
                client.get(first.id),
                client.get_by_key(email().message_key),
                client.find(recipient="Ann@example.org", sender="@example.com", status=Status.PENDING, limit=1),
            ]

    sent, again, many, by_id, by_key, page = await asyncio.to_thread(use_every_method)
    async with AsyncClient(api.url, key=key) as client:
        async_receipt = await client.send(email())
        assert await client.get(async_receipt.id) == by_id
        assert await client.get_by_key(email().message_key) == by_key
        assert isinstance(page, EmailPage)
        assert page.next is not None
        rest = await client.find(recipient="ann@example.org", after=page.next)
        assert [each.message_key for each in (*page.emails, *rest.emails)] == ["k-2", email().message_key]
        others = await client.send_many([email("k-2"), email("k-3")])
        receipt = await client.send(email("größe-漢字"))  # sent in the body
        assert await client.send(email("größe-漢字")) == Receipt(receipt.id, "größe-漢字", is_known=True)
        assert (await client.get_by_key("größe-漢字")).id == receipt.id

    assert isinstance(sent, Receipt)
    assert not sent.is_known
    assert again == async_receipt == Receipt(sent.id, email().message_key, is_known=True)
    assert isinstance(many, list)
    assert isinstance(many[0], Receipt)
    assert isinstance(many[1], Refused)
    assert many[1].problem.code == "idempotency-key-reused"
    assert [isinstance(each, Receipt) and each.is_known for each in others] == [True, False]
    assert by_id == by_key
    assert getattr(by_id, "status", None) is Status.PENDING


def test_a_url_without_a_usable_scheme_or_host_is_refused_at_once() -> None:
    for url, words in (("ann:secret@mail.example.com:8025", "has no scheme"), ("http://", "has no host")):
        with pytest.raises(DispatcherError, match=words) as refused:
            AsyncClient(url)
        assert "secret" not in str(refused.value)


async def test_a_refusal_is_an_exception_that_names_the_field(api: Api, connection: psycopg.Connection) -> None:
    key = make_key(connection, sender_domains=["example.net"])
    async with AsyncClient(api.url, key=key) as client:
        with pytest.raises(ApiProblem) as refused:
            await client.send(email())

    assert (refused.value.status, refused.value.code) == (403, "sender-forbidden")
    assert refused.value.errors[0]["pointer"] == "#/from"
    assert "ann@example.org" not in str(refused.value)


async def test_a_lost_response_is_retried_without_a_second_email(api: Api, connection: psycopg.Connection) -> None:
    lost = 0

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal lost
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", api.port)
        inner_writer.write(await reader.readuntil(b"}"))
        answer = await inner_reader.readuntil(b"}")
        lost += 1
        if lost > 2:
            writer.write(answer)
        inner_writer.close()
        writer.close()

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        async with AsyncClient(f"http://127.0.0.1:{port}") as client:
            receipt = await client.send(email())

    assert receipt.is_known
    assert connection.execute("select count(*) from email_log").fetchone() == (1,)


async def test_both_clients_iterate_and_remember_their_cursor(api: Api, connection: psycopg.Connection) -> None:
    key = make_key(connection)
    connection.execute("update outgoing_feed set is_on = true")
    wanted = announce(connection, count=1200)

    def use() -> tuple[list[object], str | None]:
        with Client(api.url, key=key) as client:
            events = client.events()
            found: list[object] = []
            for event in events:
                if len(found) == 700:
                    break  # the application failed, and has not handled this event
                found.append(event.id)
            return found + [event.id for event in events], events.cursor

    found, cursor = await asyncio.to_thread(use)
    assert found == wanted
    more = announce(connection, count=2)
    async with AsyncClient(api.url, key=key) as client:
        events = client.events(after=cursor)
        assert [event.id async for event in events] == more
        later = announce(connection)
        assert [(event.id, event.type) async for event in events] == [(later[0], "email.sent")]
        assert [event async for event in events] == []


async def test_both_clients_cancel_and_reschedule(api: Api, connection: psycopg.Connection) -> None:
    made = await api.post("k-1"), await api.post("k-2"), await api.post("k-3")
    waiting, cancelled, sent = (each.json["id"] for each in made)
    connection.execute("update email_log set status = 'sent', publish_due_at = null where message_key = 'k-3'")

    def use_client() -> list[Status]:
        with Client(api.url) as client:
            return [
                client.reschedule(waiting, TOMORROW, reason="asked for it"),
                client.cancel(cancelled, reason="has paid"),
            ]

    assert await asyncio.to_thread(use_client) == [Status.WAITING, Status.CANCELLED]
    async with AsyncClient(api.url) as client:
        assert await client.reschedule(waiting, TOMORROW, reason="asked for it") is Status.WAITING
        with pytest.raises(ApiProblem) as refused:
            await asyncio.wait_for(client.cancel(sent, reason="has paid"), 20)
        with pytest.raises(InvalidEmail):
            await client.reschedule(waiting, datetime(2026, 12, 24), reason="no zone")  # noqa: DTZ001

    assert (refused.value.code, refused.value.email_status) == ("too-late", Status.SENT)


def test_the_client_loads_none_of_the_servers_packages() -> None:
    loads = "import sys, dispatcher.client; print({'psycopg', 'pika', 'starlette', 'uvicorn'} & sys.modules.keys())"

    ran = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True)

    assert ran.stdout == "set()\n"


async def test_an_unreachable_api_raises_within_the_time_limit() -> None:
    async with AsyncClient("http://127.0.0.1:1", seconds=0.5) as client:
        with pytest.raises(NoResponse):
            await client.send(email())

    with pytest.raises(NoResponse), Client("http://127.0.0.1:1", seconds=0.5) as blocking:
        await asyncio.to_thread(partial(blocking.send, email()))


def test_the_client_has_a_method_for_every_operation() -> None:
    by_hand = {ListEmails: "find", ListEvents: "events"}
    made = {each.action for each in vars(Operations).values() if isinstance(each, Method) and each.action}
    actions: list[Any] = [*all_actions(), *REPLAYS, ListEvents]
    every = {each for each in actions if each.http}

    assert every - made == set(by_hand)
    assert [name for name in by_hand.values() if not hasattr(Client, name)] == []


async def test_both_clients_carry_out_operations_and_read_all_pages(api: Api, connection: psycopg.Connection) -> None:
    key = make_key(connection, scopes=["send", "read", "operate"])
    addresses = [f"a{number}@example.org" for number in range(5)]

    def use() -> list[Any]:
        with Client(api.url, key=key) as client:
            client.send_many([email(f"k-{number}") for number in range(5)])
            added = client.add_suppressions(recipients=tuple(addresses), reason="closed")
            page = client.list_suppressions(limit=2)
            webhook = client.add_webhook(url="https://shop.example.com/hooks")
            with pytest.raises(ApiProblem, match=f"Webhook {webhook.id} "):
                client.add_webhook(url=webhook.url)
            connection.execute("update webhook set url = 'https://127.0.0.1:1/hook'")
            tested = client.test_webhook(webhook.id)
            paused, resumed = client.pause_tenant(reason="maintenance"), client.resume_tenant()
            cancelled = client.cancel_emails(all=True, reason="wrong price")
            rows, keys = [*page], [each.message_key for each in client.find(limit=2)]
            removed = client.remove_webhook(webhook_id=webhook.id)
            return [
                *(added.added, len(page.rows), len(rows), keys, tested.is_accepted, paused == resumed),
                *(cancelled.results, removed.id == webhook.id),
            ]

    used = await asyncio.to_thread(use)
    async with AsyncClient(api.url, key=key) as client:
        keys = [each.message_key async for each in await client.find(limit=2)]
        masked = [each.recipient async for each in await client.list_suppressions(limit=2)]

    assert keys == [f"k-{number}" for number in reversed(range(5))]
    assert used == [5, 2, 5, keys, False, True, {"cancelled": 5}, True]
    assert masked == ["a•••@example.org"] * 5

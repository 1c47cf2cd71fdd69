"""The Python client returns typed results, and enqueues an email once, however many requests and responses are lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import partial

import psycopg
import pytest

from dispatcher import Email
from dispatcher.client import ApiProblem, AsyncClient, Client, EmailPage, NoResponse, Receipt, Refused
from dispatcher.domain.status import Status
from dispatcher.errors import DispatcherError
from tests.api.running_api import Api, make_key


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


async def test_a_key_that_is_not_ascii_is_sent_in_the_body(api: Api, connection: psycopg.Connection) -> None:
    async with AsyncClient(api.url, key=make_key(connection)) as client:
        receipt = await client.send(email("größe-漢字"))

        assert await client.send(email("größe-漢字")) == Receipt(receipt.id, "größe-漢字", is_known=True)
        assert (await client.get_by_key("größe-漢字")).id == receipt.id


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("url", ["mail.example.com", "ann:secret@mail.example.com:8025", "localhost:8025", ""])
def test_a_url_without_a_scheme_is_refused_with_an_example(kind: type[Client | AsyncClient], url: str) -> None:
    with pytest.raises(DispatcherError) as refused:
        kind(url)

    remedy = "Give the full URL, such as https://mail.example.com or http://127.0.0.1:8025."
    assert str(refused.value) == f"The HTTP API's URL has no scheme. {remedy}"


@pytest.mark.parametrize("url", ["ftp://mail.example.com", "http://", "https:///v1", "unix:///run/api.socket"])
def test_a_url_without_a_usable_scheme_or_host_is_refused_at_once(url: str) -> None:
    with pytest.raises(DispatcherError, match="has no host, or its scheme is not http or https"):
        Client(url)


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
        """Forwards each request to the API, and loses the first two responses."""
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

"""Providers post events to the API. Genuine events are committed before the response; other requests are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import psycopg
import pytest

from dispatcher.api.event_endpoints import MAX_BODY_BYTES
from dispatcher.config import Settings
from dispatcher.domain.email_id import new_email_id
from dispatcher.events.sendgrid import SIGNATURE_HEADER
from tests.api.running_api import EMAIL, Answer, Api, make_key, running
from tests.events.requests import TOPIC, SendGridKey, Sns, delivery, dumped, sendgrid_event
from tests.store.books import Books

SENDGRID = "/v1/events/sendgrid"
SES = "/v1/events/ses"


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """A database that only one test uses, because one test refuses connections to the database."""
    return own_database_url


@pytest.fixture(scope="module")
def key() -> SendGridKey:
    """The key of SendGrid's event webhook."""
    return SendGridKey()


@pytest.fixture
def event_settings(settings: Settings, key: SendGridKey) -> Settings:
    """Settings for an API that accepts SendGrid's events, and SES's events from one topic."""
    return replace(settings, sendgrid_events_keys=(key.public,), ses_events_topics=(TOPIC,))


@pytest.fixture
async def events_api(event_settings: Settings) -> AsyncIterator[Api]:
    """A running API that accepts events."""
    async with running(event_settings) as api:
        yield api


async def enqueued(api: Api, key: str = "k-1") -> UUID:
    """The id of a new email."""
    return UUID((await api.post(key)).json["id"])


async def post(api: Api, key: SendGridKey, events: Any, **headers: str) -> Answer:
    """Posts SendGrid's events."""
    body = events if isinstance(events, bytes) else dumped(events)
    return await api.call("POST", SENDGRID, raw=body, headers={**key.headers(body), **headers})


def rows(connection: psycopg.Connection) -> list[Any]:
    """The email, provider and kind of each stored event."""
    return connection.execute(
        "select email_id, provider, kind from dispatcher.email_event order by kind, event_key"
    ).fetchall()


async def test_events_are_committed_and_settle_the_email_before_the_response(
    events_api: Api, key: SendGridKey, connection: psycopg.Connection
) -> None:
    email_id = await enqueued(events_api)
    Books(connection).lose_attempt(email_id)

    answer = await post(events_api, key, [sendgrid_event(email_id, "processed"), sendgrid_event(email_id)])

    assert (answer.status, answer.body) == (204, b"")
    assert rows(connection) == [
        (email_id, "sendgrid", "accepted"),
        (email_id, "sendgrid", "delivered"),
    ]
    status = await events_api.get(f"/v1/emails/{email_id}")
    assert status.json["status"] == "sent"


async def test_a_repeated_delivery_is_stored_once(
    events_api: Api, key: SendGridKey, connection: psycopg.Connection
) -> None:
    email_id = await enqueued(events_api)
    batches = [[sendgrid_event(email_id, sg_event_id=f"{number}")] for number in range(46)]

    answers = await asyncio.gather(*(post(events_api, key, batch) for batch in batches))

    assert {answer.status for answer in answers} == {204}
    assert len(rows(connection)) == 1


async def test_an_unknown_email_gets_the_same_response_as_a_known_one(events_api: Api, key: SendGridKey) -> None:
    known = await post(events_api, key, [sendgrid_event(await enqueued(events_api))])
    unknown = await post(events_api, key, [sendgrid_event(new_email_id())])
    foreign = await post(events_api, key, [sendgrid_event("17")])

    assert known.status == unknown.status == foreign.status == 204
    assert known.body == unknown.body == foreign.body == b""


async def test_a_forged_request_changes_nothing_and_is_counted(
    events_api: Api, key: SendGridKey, connection: psycopg.Connection
) -> None:
    email_id = await enqueued(events_api)
    body = dumped([sendgrid_event(email_id)])

    forged = await events_api.call("POST", SENDGRID, raw=body, headers=SendGridKey().headers(body))
    unsigned = await events_api.call("POST", SENDGRID, raw=body)
    stale = await events_api.call("POST", SENDGRID, raw=body, headers=key.headers(body, timestamp=1_600_112_502))
    ahead = await events_api.call("POST", SENDGRID, raw=body, headers=key.headers(body, timestamp=9_999_999_999))

    assert [(answer.status, answer.code) for answer in (forged, unsigned)] == [(403, "signature-invalid")] * 2
    assert [(answer.status, answer.code) for answer in (stale, ahead)] == [(403, "signature-stale")] * 2
    assert rows(connection) == []
    assert (await events_api.get(f"/v1/emails/{email_id}")).json["status"] == "pending"


async def test_a_genuine_request_that_is_not_json_is_refused(events_api: Api, key: SendGridKey) -> None:
    assert (await post(events_api, key, b"[")).code == "malformed-json"
    assert (await post(events_api, key, b"[" * 100_000)).code == "malformed-json"


async def test_odd_events_do_not_stop_the_others(
    events_api: Api, key: SendGridKey, connection: psycopg.Connection
) -> None:
    email_id = await enqueued(events_api)
    odd = [
        sendgrid_event(email_id, "bounce", reason="\0\ud800", email="\ud800@example.org", type="bounce"),
        sendgrid_event(email_id, "open", timestamp=10**30),
        sendgrid_event(email_id, "invented"),
        17,
        sendgrid_event(email_id, "click", url="\0\ud800"),
        sendgrid_event(email_id, "deferred", response=9**99),
    ]

    answer = await post(events_api, key, json.dumps(odd).encode())

    assert answer.status == 204
    assert [row[2] for row in rows(connection)] == ["bounced", "clicked", "deferred"]


async def test_a_batch_of_a_thousand_events_is_stored(
    events_api: Api, key: SendGridKey, connection: psycopg.Connection
) -> None:
    email_id = await enqueued(events_api)
    events = [sendgrid_event(email_id, "click", url=f"https://example.com/{number}") for number in range(1500)]

    assert (await post(events_api, key, events)).status == 204
    assert len(rows(connection)) == 1500


async def test_a_batch_of_ten_megabytes_is_refused(events_api: Api, key: SendGridKey) -> None:
    answer = await post(events_api, key, b" " * 10_000_000)

    assert MAX_BODY_BYTES < 10_000_000
    assert (answer.status, answer.code) == (413, "body-too-large")


async def test_a_compressed_body_is_refused(events_api: Api, key: SendGridKey) -> None:
    assert (await post(events_api, key, [], **{"Content-Encoding": "gzip"})).code == "unsupported-media-type"


async def test_without_postgresql_the_provider_must_retry(
    event_settings: Settings, key: SendGridKey, connection: psycopg.Connection
) -> None:
    async with running(event_settings) as api:
        email_id = await enqueued(api)
        name = urlsplit(event_settings.database_url).path.removeprefix("/")
        admin = urlunsplit(urlsplit(event_settings.database_url)._replace(path="/postgres"))
        with psycopg.connect(admin, autocommit=True) as outside:
            outside.execute(f'alter database "{name}" with allow_connections false')
            outside.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
            away = await post(api, key, [sendgrid_event(email_id)])
            outside.execute(f'alter database "{name}" with allow_connections true')
        assert (away.status, away.code) == (503, "database-unavailable")
        assert "retry-after" in away.headers

    async with running(event_settings) as api:
        assert (await post(api, key, [sendgrid_event(email_id)])).status == 204


async def test_a_locked_email_makes_the_provider_retry(
    events_api: Api, key: SendGridKey, connection: psycopg.Connection
) -> None:
    email_id, other = await enqueued(events_api), await enqueued(events_api, "k-2")
    Books(connection).lose_attempt(email_id)
    with connection.transaction():
        connection.execute("select from dispatcher.email_log where email_id = %s for update", [email_id])
        locked, free = await asyncio.gather(
            post(events_api, key, [sendgrid_event(email_id)]), post(events_api, key, [sendgrid_event(other)])
        )

    assert (locked.status, free.status) == (503, 204)
    assert (await post(events_api, key, [sendgrid_event(email_id)])).status == 204


async def test_forged_requests_occupy_half_of_the_slots_at_most(event_settings: Settings, key: SendGridKey) -> None:
    settings = replace(event_settings, api_max_concurrent_requests=2)
    async with running(settings) as api:
        email_id = await enqueued(api)
        blocker = await psycopg.AsyncConnection.connect(settings.database_url)
        async with blocker:
            await blocker.execute("lock table dispatcher.email_event in share mode")
            both = [asyncio.create_task(post(api, key, [sendgrid_event(email_id)])) for _ in range(2)]
            done, (waiting,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            (second,) = [task.result() for task in done]
            mine = await api.get(f"/v1/emails/{email_id}")
        await waiting

    assert (second.status, second.code) == (503, "overloaded")
    assert mine.status == 200


HEAD = (
    "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\nExpect: 100-continue\r\n{}\r\n"
    "Content-Type: application/json\r\n\r\n"
)


async def stalled(api: Api, path: str, sent: int, size: int, more: str = "X: y") -> tuple[str, asyncio.StreamWriter]:
    """Sends the first bytes of a body, and then nothing. Returns what the API answered before the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(HEAD.format(path, size, more).encode())
    answer = (await reader.readline()).decode()
    writer.write(b"x" * sent)
    await writer.drain()
    return answer.split()[1], writer


@pytest.fixture
def small_settings(event_settings: Settings) -> Settings:
    """Settings with so little memory that a provider's share is 256 KiB."""
    return replace(event_settings, api_memory_bytes=1 << 20, api_max_body_bytes=100 << 10)


async def test_connections_that_send_one_byte_keep_no_event_out(small_settings: Settings, key: SendGridKey) -> None:
    sns = Sns()
    async with running(small_settings, fetch=sns.fetch) as api:
        email_id = await enqueued(api)
        headers = "\r\n".join(f"{name}: {value}" for name, value in key.headers(b"").items())
        begun = [await stalled(api, SES, 1, 100) for _ in range(200)]
        begun += [await stalled(api, SENDGRID, 1, 100, headers) for _ in range(200)]
        events = [await post(api, key, [sendgrid_event(email_id)]) for _ in range(20)]
        events += [await api.call("POST", SES, raw=dumped(sns.message(delivery(email_id)))) for _ in range(20)]
        for _, writer in begun:
            writer.close()

    assert {answer for answer, _ in begun} == {"100"}
    assert [answer.status for answer in events] == [204] * 40


async def test_one_providers_requests_keep_out_no_events_of_another_one(
    small_settings: Settings, key: SendGridKey
) -> None:
    sns = Sns()
    async with running(small_settings, fetch=sns.fetch) as api:
        email_id = await enqueued(api)
        large = [sendgrid_event(email_id, "click", url="https://example.com/" + "a" * 40_000)]
        begun = [await stalled(api, SES, 40 << 10, 90 << 10) for _ in range(40)]
        refused = await api.call("POST", SES, raw=b"x" * (40 << 10))
        events = [await post(api, key, large) for _ in range(20)]
        events += [await api.call("POST", SES, raw=dumped(sns.message(delivery(email_id)))) for _ in range(20)]
        enqueuing = await api.post("other", EMAIL | {"text": "a" * 60_000})
        for _, writer in begun:
            writer.close()

    assert (refused.status, refused.code) == (503, "overloaded")
    assert [answer.status for answer in events] == [204] * 40
    assert enqueuing.status == 202


async def test_an_unconfigured_provider_has_no_path(api: Api) -> None:
    body = dumped([])

    answers = [await api.call("POST", path, raw=body) for path in (SENDGRID, SES)]

    assert [answer.status for answer in answers] == [404, 404]
    assert not any("/events/" in path for path in (await api.get("/openapi.json")).json["paths"])


async def test_no_api_key_is_needed_and_other_methods_are_refused(
    events_api: Api, key: SendGridKey, connection: psycopg.Connection
) -> None:
    make_key(connection)

    assert (await post(events_api, key, [])).status == 204
    answer = await events_api.get(SENDGRID)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


async def test_every_response_is_documented(events_api: Api, key: SendGridKey) -> None:
    document = (await events_api.get("/openapi.json")).json

    for path, codes in ((SENDGRID, {"204", "400", "403", "413", "503"}), (SES, {"204", "400", "403", "413", "503"})):
        operation = document["paths"][path]["post"]
        assert codes <= operation["responses"].keys()
        assert "401" not in operation["responses"]
        assert operation["security"] == []
    names = {parameter["name"].lower() for parameter in document["paths"][SENDGRID]["post"]["parameters"]}
    assert SIGNATURE_HEADER in names


async def test_messages_of_sns_without_a_valid_signature_are_refused(
    events_api: Api, connection: psycopg.Connection
) -> None:
    sns = Sns()
    email_id = await enqueued(events_api)
    evil = sns.message(delivery(email_id), SigningCertURL="https://evil.example/SimpleNotificationService-0.pem")
    topic = sns.message(delivery(email_id), TopicArn=TOPIC.replace("ses", "other"))
    raw = delivery(email_id)

    answers = [
        await events_api.call("POST", SES, raw=dumped(each), headers={"Content-Type": "text/plain; charset=UTF-8"})
        for each in (evil, topic, raw)
    ]

    assert [(answer.status, answer.code) for answer in answers] == [
        (403, "signature-invalid"),
        (403, "topic-forbidden"),
        (403, "signature-invalid"),
    ]
    assert rows(connection) == []

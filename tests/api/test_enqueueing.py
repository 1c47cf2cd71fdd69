"""Enqueueing over HTTP: each message key is stored once, however often it is requested."""

from __future__ import annotations

import asyncio
import base64
import re
from dataclasses import replace
from functools import partial
from urllib.parse import quote

import psycopg
import pytest

from dispatcher import Email, enqueue
from dispatcher.admission.validation import KEY_PATTERN
from dispatcher.api.server import LOCK_SECONDS
from dispatcher.broker.topology import Topology, depths
from dispatcher.config import Settings
from dispatcher.dev.servers import Servers
from tests.acceptance.rabbit import Rabbit
from tests.api.running_api import EMAIL, Api, make_key, running, settings_of
from tests.mime_corpus import CASES, ics
from tests.waiting import until, until_answer


def stored(connection: psycopg.Connection) -> list[str]:
    return [row[0] for row in connection.execute("select message_key from email_log order by email_id").fetchall()]


async def test_an_accepted_email_is_stored_and_due_and_the_same_request_again_gets_the_same_answer(
    api: Api, connection: psycopg.Connection
) -> None:
    file = {"filename": "a.pdf", "content_type": "application/pdf", "content": "JVBERg=="}
    email = EMAIL | {"attachments": [file], "erase_after_sending": True}

    first = await api.post("order-17", email)
    second = await api.post("order-17", email)
    reused = await api.post("order-17", email | {"subject": "Another"})

    assert first.status == 202
    assert first.json == {"id": first.json["id"], "message_key": "order-17", "status": "pending"}
    assert first.headers["location"] == f"/v1/emails/{first.json['id']}"
    assert (second.status, second.body, second.headers["location"]) == (202, first.body, first.headers["location"])
    replayed = [answer.headers.get("idempotent-replayed") for answer in (first, second)]
    assert replayed == [None, "true"]
    assert (reused.status, reused.code) == (422, "idempotency-key-reused")
    rows = connection.execute(
        "select message_key, tenant_id, status, publish_due_at is not null, subject, tags, filename, content"
        " from email_log join email_content using (email_id) join email_attachment using (email_id)"
    ).fetchall()
    assert rows == [("order-17", "default", "pending", True, "Your receipt", ["one_time_code"], "a.pdf", b"%PDF")]


SIGNED = next(each.message for each in CASES if each.name == "pgp signed")
IMAGE = {"filename": "a.png", "content_type": "image/png", "content": "iVBORw==", "content_id": "logo"}


def raw(message: bytes, **more: object) -> dict[str, object]:
    return {"raw": base64.b64encode(message).decode(), **more}


async def test_inline_images_calendars_and_mime_messages_are_stored(api: Api, connection: psycopg.Connection) -> None:
    html = {"html": '<img src="cid:logo">', "attachments": [IMAGE], "calendar": {"content": ics()}}

    answers = [
        await api.post("fields", EMAIL | html),
        await api.post("raw", raw(SIGNED, recipients=["ann@example.org", "bob@example.org"])),
        await api.post("read", raw(b"From: Shop <shop@example.com>\r\nTo: ann@example.org\r\n\r\nHi\r\n", tags=["a"])),
        await api.post("raw", raw(SIGNED, recipients=["ann@example.org", "bob@example.org"])),
    ]

    assert [each.status for each in answers] == [202] * 4
    assert answers[3].body == answers[1].body
    rows = connection.execute(
        "select message_key, position, part, content_id, content_type from email_log join email_attachment"
        " using (email_id) order by email_id, position"
    ).fetchall()
    assert rows == [
        ("fields", 0, None, "logo", "image/png"),
        ("fields", 1, "calendar", None, "text/calendar; method=REQUEST"),
        ("raw", 0, "raw", None, "message/rfc822"),
    ]
    contents = connection.execute(
        "select sender, recipients, text_body from email_content order by email_id"
    ).fetchall()
    assert contents[1:] == [
        ("shop@example.com", {"to": ["ann@example.org"], "bcc": ["bob@example.org"]}, None),
        ("Shop <shop@example.com>".replace("Shop", '"Shop"'), {"to": ["ann@example.org"]}, "Hi\n"),
    ]


async def test_the_rules_of_a_key_and_of_the_api_hold_inside_of_a_mime_message(
    settings: Settings, connection: psycopg.Connection
) -> None:
    token = make_key(connection, sender_domains=["example.com"])
    exe = SIGNED.replace(b"application/pgp-signature", b'application/x; name="a.exe"')
    cases = {
        b"From: eve@evil.example\r\nTo: ann@example.org\r\n\r\nHi\r\n": ("sender-forbidden", "#/from"),
        b"Sender: eve@evil.example\r\n" + SIGNED: ("sender-forbidden", "#/from"),
        b"X-MC-Subaccount: x\r\n" + SIGNED: ("invalid-email", "#/raw"),
        b"Foo: x\r\n" + SIGNED: ("email-not-allowed", "#/headers/Foo".lower()),
        exe: ("email-not-allowed", "#/raw"),
    }
    async with running(settings) as api:
        answers = [await api.post("k", raw(message), token=token) for message in cases]
    async with running(replace(settings, providers=("sendgrid",))) as api:
        unable = await api.post("k", raw(SIGNED), token=token)

    assert [(each.code, each.pointers) for each in answers] == [(code, [at]) for code, at in cases.values()]
    assert (unable.status, unable.code, unable.pointers) == (422, "no-capable-provider", ["#/raw"])
    assert "because it has a part multipart/signed" in unable.json["detail"]


async def test_a_key_in_quotes_is_the_same_key(api: Api, connection: psycopg.Connection) -> None:
    keys = {"order 17, 50%25": '"order 17, 50%25"', "a\\b": r'"a\\b"', "k" * 255: f'"{"k" * 255}"'}

    for key, quoted in keys.items():
        assert (await api.post(quoted)).body == (await api.post(key)).body
        assert re.search(KEY_PATTERN, key)
        assert re.search(KEY_PATTERN, quoted)
    assert set(stored(connection)) == keys.keys()


async def test_a_key_beyond_ascii_is_read_from_the_body(api: Api, connection: psycopg.Connection) -> None:
    first = await api.post(None, EMAIL | {"message_key": "größe-漢字-🦊"})

    again = await api.post(None, EMAIL | {"message_key": "größe-漢字-🦊"})
    found = await api.get(f"/v1/emails/by-key/{quote('größe-漢字-🦊')}")

    assert (first.status, again.status, again.body) == (202, 202, first.body)
    assert again.headers["idempotent-replayed"] == "true"
    assert found.json["id"] == first.json["id"]
    assert stored(connection) == ["größe-漢字-🦊"]


async def test_header_and_body_must_have_the_same_key(api: Api) -> None:
    header = await api.post("order-17")

    both = await api.post("order-17", EMAIL | {"message_key": "order-17"})
    null = await api.post("order-17", EMAIL | {"message_key": None})
    body = await api.post(None, EMAIL | {"message_key": "order-17"})
    other = await api.post("order-17", EMAIL | {"message_key": "order-18"})

    assert both.body == null.body == body.body == header.body
    assert (other.status, other.pointers) == (422, ["#/message_key"])


async def test_a_request_without_a_usable_key_is_refused(api: Api) -> None:
    for key in (None, ""):
        for fields in ({}, {"message_key": None}):
            answer = await api.post(key, EMAIL | fields)
            assert (answer.status, answer.code) == (400, "idempotency-key-missing")
    for key in ('"a', "é", "k" * 256, '"a"b"', '""', '" a"', '"a "', f'"{"k" * 256}"'):
        answer = await api.post(key)
        assert (answer.status, answer.code) == (400, "idempotency-key-invalid")
        assert not re.search(KEY_PATTERN, key)
    assert (await api.post("k", headers={"Idempotency-Key": "k"})).code == "idempotency-key-invalid"  # two headers


async def test_fifty_clients_with_one_key_create_one_email_and_get_equal_responses(
    api: Api, connection: psycopg.Connection
) -> None:
    answers = await asyncio.gather(*(api.post("order-17") for _ in range(50)))

    assert {(answer.status, answer.body) for answer in answers} == {(202, answers[0].body)}
    assert sum("idempotent-replayed" not in answer.headers for answer in answers) == 1
    assert stored(connection) == ["order-17"]


async def test_concurrent_requests_share_statements_and_an_invalid_email_does_not_affect_the_others(
    api: Api, connection: psycopg.Connection
) -> None:
    bad = EMAIL | {"to": ["ann@example.org", "nobody"]}

    answers = await asyncio.gather(*(api.post(f"k-{number}", bad if number == 7 else EMAIL) for number in range(65)))

    assert [answer.status for answer in answers] == [422 if number == 7 else 202 for number in range(65)]
    assert (answers[7].code, answers[7].pointers) == ("invalid-email", ["#/to/1"])
    assert "nobody" not in answers[7].body.decode()
    assert len(stored(connection)) == 64
    (statements,) = connection.execute("select count(distinct xmin::text) from email_log").fetchone() or (0,)
    assert statements < 32


async def test_an_open_transaction_with_its_key_delays_only_that_email(settings: Settings, database_url: str) -> None:
    async with running(settings, lock_seconds=LOCK_SECONDS) as api:
        with psycopg.connect(database_url) as application:
            twin = Email(message_key="k-7", sender="a@example.com", to="b@example.org", subject="", text="x")
            enqueue(application, twin)

            answers = await asyncio.gather(*(api.post(f"k-{number}") for number in range(30)))

    assert [answer.status for answer in answers] == [409 if number == 7 else 202 for number in range(30)]
    assert answers[7].code == "idempotency-key-in-use"
    assert answers[7].headers["retry-after"] == "1"


async def test_a_batch_answers_for_each_email_in_order(api: Api, connection: psycopg.Connection) -> None:
    await api.post("known")
    expected: list[tuple[object, str]] = [
        (EMAIL | {"message_key": "new"}, "accepted"),
        (EMAIL | {"message_key": "known"}, "known"),
        (EMAIL | {"message_key": "known", "subject": "Another"}, "idempotency-key-reused"),
        (EMAIL | {"message_key": "bad", "headers": {"Bcc": "eve@example.net"}}, "invalid-email"),
        (EMAIL | {"message_key": "old", "expires_at": "2026-01-01T00:00:00Z"}, "invalid-email"),
        (EMAIL | {"message_key": "new"}, "known"),
        (EMAIL, "invalid-email"),
        (17, "invalid-email"),
    ]

    answer = await api.call("POST", "/v1/emails/batch", body={"emails": [email for email, _ in expected]})

    results = answer.json["results"]
    outcomes = [item.get("problem", {}).get("code") or item["outcome"] for item in results]
    assert (answer.status, outcomes) == (200, [outcome for _, outcome in expected])
    pointers = [results[number]["problem"]["errors"][0]["pointer"] for number in (4, 6, 7)]
    assert pointers == ["#/emails/4/expires_at", "#/emails/6/message_key", "#/emails/7"]
    assert stored(connection) == ["known", "new"]


async def test_an_invalid_batch_is_refused(api: Api) -> None:
    bodies: tuple[object, ...] = ({}, {"emails": []}, {"emails": [EMAIL] * 1001}, {"emails": 7}, [])
    for body in bodies:
        answer = await api.call("POST", "/v1/emails/batch", body=body)
        assert (answer.status, answer.code) == (422, "invalid-body")


async def test_an_enqueued_email_is_published_at_once_and_its_due_mark_cleared_also_if_the_api_stops(
    servers: Servers, database_url: str, topology: Topology, connection: psycopg.Connection
) -> None:
    async with running(settings_of(database_url, servers.amqp_url, topology)) as api:
        await asyncio.gather(*(api.post(f"k-{number}") for number in range(10)))
        await until_answer(lambda: depths(servers.amqp_url, topology), lambda found: found[topology.queue] == 10)
        await until(lambda: not due(connection))
        await api.post("last")

    assert not due(connection)


def due(connection: psycopg.Connection) -> int:
    (count,) = connection.execute("select count(*) from email_log where publish_due_at is not null").fetchone() or (0,)
    return int(count)


async def test_a_missing_queue_of_a_lane_does_not_delay_the_emails_of_other_lanes(
    servers: Servers, database_url: str, topology: Topology
) -> None:
    rabbit = Rabbit(servers.amqp_url, servers.management_url)
    rabbit.delete(topology.send_queues["bulk"])
    async with running(settings_of(database_url, servers.amqp_url, topology)) as api:
        for number in range(10):
            for lane in ("bulk", "normal"):
                assert (await api.post(f"{lane}-{number}", EMAIL | {"lane": lane})).status == 202

        # No relay runs, so the API published these messages itself.
        await until(lambda: rabbit.waiting(topology.queue) == 10)


async def test_after_database_errors_which_are_logged_once_each_requests_succeed_again(
    api: Api, connection: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    location = (await api.post("k-0")).headers["location"]
    answers = []
    for table, ask in (("email_idempotency", partial(api.post, "k-1")), ("email_event", partial(api.get, location))):
        connection.execute(f"alter table {table} rename to gone".encode())
        try:
            answers.append(await ask())
        finally:
            connection.execute(f"alter table gone rename to {table}".encode())

    assert {(answer.status, answer.code) for answer in answers} == {(500, "internal-error")}
    logged = "".join(capsys.readouterr())
    assert logged.count("error.unexpected") == 2
    assert all(answer.headers["x-request-id"] in logged for answer in answers)
    assert all(b"email_idempotency" not in answer.body for answer in answers)
    assert (await api.post("k-2")).status == 202


async def test_a_tenant_does_not_wait_for_all_emails_of_another_tenant(
    settings: Settings, connection: psycopg.Connection
) -> None:
    emails = [EMAIL | {"message_key": f"k-{number}", "tenant_id": "busy"} for number in range(1000)]
    async with running(replace(settings, api_insert_batch_emails=1)) as api:
        busy = asyncio.create_task(api.call("POST", "/v1/emails/batch", body={"emails": emails}))
        await until(lambda: stored(connection))

        assert (await api.post("k-1", EMAIL | {"tenant_id": "other"})).status == 202
        assert not busy.done()

        assert {result["outcome"] for result in (await busy).json["results"]} == {"accepted"}

"""Providers post events, and recipients unsubscribe. Genuine events are committed before the response."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit, urlunsplit
from uuid import UUID, uuid4

import psycopg
import pytest

from dispatcher.api.event_endpoints import MAX_BODY_BYTES, MAX_RESEND_BYTES
from dispatcher.cli.api import api_settings
from dispatcher.config import Settings
from dispatcher.domain.email_id import new_email_id
from dispatcher.events import twilio
from dispatcher.providers.twilio import TwilioSettings
from tests.abuse.raw_connection import JSON, head
from tests.api.running_api import EMAIL, Answer, Api, make_key, running
from tests.events.requests import TOPIC, ResendSecret, SendGridKey, Sns, delivery, dumped, resend_event, sendgrid_event
from tests.store.books import Books
from tests.store.suppressing import hasher_of

TOKEN = "the_token_of_the_account_0123456789"
STATUS_URL = "https://mail.example.org/v1/events/twilio"
INBOUND_URL = "https://mail.example.org/v1/inbound/twilio"
NUMBER = "+4915112345678"
SID, OTHER_SID = {"MessageSid": "SM" + "0" * 32}, {"MessageSid": "SM" + "1" * 32}
ENTRIES = "select tenant_id, masked, reason from dispatcher.suppression"
SMS = {"to": "+49 151 12345678", "text": "Your code is 1234."}
SENDGRID = "/v1/events/sendgrid"
SES = "/v1/events/ses"
RESEND = "/v1/events/resend"
ONE_CLICK = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture(scope="module")
def key() -> SendGridKey:
    return SendGridKey()


@pytest.fixture
def settings(settings: Settings, key: SendGridKey) -> Settings:
    """Settings of a host to which all providers but Resend may post."""
    texts = TwilioSettings(account_sid="AC" + "0" * 32, auth_token=TOKEN, callback_url=STATUS_URL)
    own = {**settings.own, "twilio": texts}
    events: dict[str, Any] = {"sendgrid_events_keys": (key.public,), "ses_events_topics": (TOPIC,)}
    return replace(settings, providers=("smtp", "twilio"), own=own, **events)


async def enqueued(api: Api) -> UUID:
    return UUID((await api.post()).json["id"])


async def post(api: Api, key: SendGridKey, events: Any, **headers: str) -> Answer:
    body = events if isinstance(events, bytes) else dumped(events)
    return await api.call("POST", SENDGRID, raw=body, headers={**key.headers(body), **headers})


def rows(connection: psycopg.Connection) -> list[Any]:
    return connection.execute(
        "select email_id, provider, kind from dispatcher.email_event order by kind, event_key"
    ).fetchall()


async def test_events_are_stored_once_and_settle_the_email_before_the_response_which_does_not_show_if_an_email_exists(
    api: Api, key: SendGridKey, connection: psycopg.Connection
) -> None:
    email_id = await enqueued(api)
    Books(connection).lose_attempt(email_id)
    known = [sendgrid_event(email_id, "processed"), sendgrid_event(email_id)]

    for events in (known, known, [sendgrid_event(new_email_id()), sendgrid_event("17")]):
        answer = await post(api, key, events)
        assert (answer.status, answer.body) == (204, b"")

    assert rows(connection) == [(email_id, "sendgrid", "accepted"), (email_id, "sendgrid", "delivered")]
    assert (await api.get(f"/v1/emails/{email_id}")).json["status"] == "sent"


async def test_a_forged_request_changes_nothing(api: Api, key: SendGridKey, connection: psycopg.Connection) -> None:
    email_id, sms_id = await enqueued(api), (await enqueued_sms(api)).json["id"]
    body, raw = dumped([sendgrid_event(email_id)]), delivery(email_id)
    topic = Sns().message(raw, TopicArn=TOPIC.replace("ses", "other"))
    status, stop = {**SID, "MessageStatus": "delivered", "To": NUMBER}, {**SID, "From": NUMBER, "Body": "STOP"}

    answers = [
        (await api.call("POST", path, raw=sent, headers=headers), code)
        for path, sent, headers, code in (
            (SENDGRID, body, SendGridKey().headers(body), "signature-invalid"),
            (SENDGRID, body, {}, "signature-invalid"),
            *((SENDGRID, body, key.headers(body, timestamp=at), "signature-stale") for at in (1.6e9, 9_999_999_999)),
            (SES, dumped(raw), {"Content-Type": "text/plain"}, "signature-invalid"),
            (SES, dumped(topic), {"Content-Type": "text/plain"}, "topic-forbidden"),
        )
    ]
    for url, form, query in ((STATUS_URL, status, f"email_id={sms_id}"), (INBOUND_URL, stop, "")):
        answers.append((await called_back(api, url, form, query=query, token="other"), "signature-invalid"))

    assert [(answer.status, answer.code) for answer, _ in answers] == [(403, code) for _, code in answers]
    assert connection.execute("select from email_event union all select from suppression").fetchall() == []


async def test_the_key_that_verifies_a_request_decides_about_which_account_it_is_believed(
    settings: Settings, key: SendGridKey, connection: psycopg.Connection
) -> None:
    acme = SendGridKey()
    known = replace(
        settings,
        sendgrid_events_keys=(key.public,),
        account_events={"sendgrid:acme": (acme.public,), "ses:acme": (TOPIC,)},
    )
    async with running(known) as api:
        for signed_by, email_id in zip((key, acme), Books(connection).enqueue_tried(2), strict=True):
            assert (await post(api, signed_by, [sendgrid_event(email_id)])).status == 204
        assert (await post(api, SendGridKey(), [sendgrid_event(new_email_id())])).code == "signature-invalid"
        assert (await api.call("POST", SES, raw=b"{}")).status != 404

    assert sorted(provider for _, provider, _ in rows(connection)) == ["sendgrid", "sendgrid:acme"]


async def test_a_batch_of_a_thousand_events_is_stored_and_larger_odd_or_compressed_bodies_are_refused(
    api: Api, key: SendGridKey, connection: psycopg.Connection
) -> None:
    email_id = await enqueued(api)
    events = [sendgrid_event(email_id, "click", url=f"https://example.com/{number}") for number in range(1500)]

    assert (await post(api, key, events)).status == 204
    assert len(rows(connection)) == 1500
    for body in (b"[", b"[" * 100_000):
        assert (await post(api, key, body)).code == "malformed-json"
    assert (await post(api, key, b" " * (MAX_BODY_BYTES + 1))).code == "body-too-large"
    assert (await post(api, key, [], **{"Content-Encoding": "gzip"})).code == "unsupported-media-type"


@contextmanager
def unreachable(database_url: str) -> Iterator[None]:
    """PostgreSQL ends all sessions of a database, and refuses new ones during the block."""
    url = urlsplit(database_url)
    name = url.path.removeprefix("/")
    with psycopg.connect(urlunsplit(url._replace(path="/postgres")), autocommit=True) as outside:
        outside.execute(f'alter database "{name}" with allow_connections false'.encode())
        try:
            outside.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
            yield
        finally:
            outside.execute(f'alter database "{name}" with allow_connections true'.encode())


async def test_without_postgresql_the_provider_must_retry(settings: Settings, key: SendGridKey) -> None:
    async with running(settings) as api:
        email_id = await enqueued(api)
        with unreachable(settings.database_url):
            away = await post(api, key, [sendgrid_event(email_id)])
        assert (away.status, away.code) == (503, "database-unavailable")
        assert "retry-after" in away.headers

    async with running(settings) as api:
        assert (await post(api, key, [sendgrid_event(email_id)])).status == 204


async def test_forged_requests_occupy_half_of_the_slots_at_most(settings: Settings, key: SendGridKey) -> None:
    settings = replace(settings, api_max_concurrent_requests=2)
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


async def stalled(api: Api, path: str, sent: int, size: int) -> tuple[str, asyncio.StreamWriter]:
    """Sends the first bytes of a body, and then nothing. Returns what the API answered before the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(head(f"POST {path}", JSON, f"Content-Length: {size}", "Expect: 100-continue"))
    answer = (await reader.readline()).decode()
    writer.write(b"x" * sent)
    await writer.drain()
    return answer.split()[1], writer


@pytest.fixture
def small_settings(settings: Settings) -> Settings:
    """Settings with so little memory that a provider's share is 256 KiB."""
    return replace(settings, api_memory_bytes=1 << 20, api_max_body_bytes=100 << 10)


async def test_one_providers_requests_keep_out_no_events_of_another(small_settings: Settings, key: SendGridKey) -> None:
    sns = Sns()
    async with running(small_settings, fetch=sns.fetch) as api:
        email_id = await enqueued(api)
        large = [sendgrid_event(email_id, "click", url="https://example.com/" + "a" * 40_000)]
        begun = [await stalled(api, SES, 40 << 10, 90 << 10) for _ in range(40)]
        refused = await api.call("POST", SES, raw=b"x" * (40 << 10))
        events = [await post(api, key, large) for _ in range(5)]
        events += [await api.call("POST", SES, raw=dumped(sns.message(delivery(email_id)))) for _ in range(5)]
        enqueuing = await api.post("other", EMAIL | {"text": "a" * 60_000})
        for _, writer in begun:
            writer.close()

    assert (refused.status, refused.code) == (503, "overloaded")
    assert [answer.status for answer in events] == [204] * 10
    assert enqueuing.status == 202


async def post_resend(api: Api, secret: ResendSecret, event: Any, **signing: Any) -> Answer:
    body = event if isinstance(event, bytes) else dumped(event)
    return await api.call("POST", RESEND, raw=body, headers=secret.headers(body, **signing))


async def test_an_event_of_resend_is_stored_once_with_each_of_two_secrets_and_an_odd_or_forged_request_changes_nothing(
    settings: Settings, connection: psycopg.Connection
) -> None:
    old, new = ResendSecret(), ResendSecret()
    async with running(replace(settings, resend_events_secrets=(old.text, new.text))) as api:
        email_id = await enqueued(api)
        Books(connection).lose_attempt(email_id)
        known = resend_event(email_id)
        for secret, event, signing, status, code in (
            (ResendSecret(), known, {}, 403, "signature-invalid"),
            (old, known, {"timestamp": 1.6e9}, 403, "signature-stale"),
            (old, b"{", {}, 400, "malformed-json"),
            (old, b" " * (MAX_RESEND_BYTES + 1), {}, 413, "body-too-large"),
            (old, resend_event(new_email_id()), {}, 204, None),
            (old, {**known, "created_at": "yesterday"}, {}, 204, None),
            (old, {"type": "contact.created", "data": {}}, {}, 204, None),
        ):
            answer = await post_resend(api, secret, event, **signing)
            assert (answer.status, answer.code if code else None) == (status, code)
        unsigned = await api.call("POST", RESEND, raw=dumped(known))
        assert (unsigned.status, unsigned.code) == (403, "signature-invalid")
        assert rows(connection) == []

        for secret in (old, new):
            answer = await post_resend(api, secret, known)
            assert (answer.status, answer.body) == (204, b"")

        assert rows(connection) == [(email_id, "resend", "delivered")]
        assert (await api.get(f"/v1/emails/{email_id}")).json["status"] == "sent"


async def test_a_provider_without_a_setting_cannot_post_events(api: Api) -> None:
    answer = await post_resend(api, ResendSecret(), resend_event(new_email_id()))

    assert (answer.status, answer.code) == (404, "not-found")


async def enqueued_sms(api: Api, key: str = "sms-1", **changes: Any) -> Answer:
    return await api.call("POST", "/v1/sms", body={**SMS, **changes}, key=key)


async def called_back(api: Api, url: str, form: dict[str, str], *, query: str = "", token: str = TOKEN) -> Answer:
    public = f"{url}?{query}" if query else url
    headers = {
        "Content-Type": "application/x-www-form-urlencoded; charset=UTF-8",
        twilio.SIGNATURE_HEADER: twilio.sign(token, public, form),
    }
    path = public.removeprefix("https://mail.example.org")
    return await api.call("POST", path, raw=urlencode(form).encode(), headers=headers)


async def test_an_sms_is_enqueued_once_with_its_number_in_e164_and_shares_the_keys_of_emails(
    api: Api, connection: psycopg.Connection
) -> None:
    first, again = await enqueued_sms(api), await enqueued_sms(api)
    email = await api.post("sms-1")

    assert (first.status, again.status) == (202, 202)
    assert first.json == again.json
    assert (email.status, email.code) == (422, "idempotency-key-reused")
    rows = connection.execute(
        "select channel, recipients, text_body from dispatcher.email_log join dispatcher.email_content using (email_id)"
    ).fetchall()
    assert rows == [("sms", {"to": [NUMBER]}, "Your code is 1234.")]


WRONG_SMS: Final[list[tuple[dict[str, Any], str, str, str]]] = [
    ({"to": "+18765551234"}, "email-not-allowed", "#/to", "is a number of JM, which DISPATCHER_SMS_COUNTRIES"),
    ({"to": "+499001234567"}, "invalid-email", "#/to", "is a premium-rate number"),
    ({"subject": "x"}, "invalid-email", "#/subject", ""),
    ({"text": "a" * 1600}, "email-not-allowed", "#/text", "11 segments (GSM-7); DISPATCHER_SMS_MAX_SEGMENTS allows 10"),
]


async def test_a_wrong_or_forbidden_sms_is_refused_by_its_field(settings: Settings) -> None:
    async with running(replace(settings, sms_countries=frozenset({"US", "DE"}))) as api:
        for changes, code, pointer, words in WRONG_SMS:
            one = await enqueued_sms(api, **changes)
            batch = {"emails": [{**SMS, "channel": "sms", "message_key": "a", **changes}]}
            many = await api.call("POST", "/v1/emails/batch", body=batch)

            assert (one.status, one.code, one.pointers) == (422, code, [pointer])
            assert words in one.json["errors"][0]["detail"]
            assert not any(number in one.body for number in (b"8765551234", b"9001234567"))
            assert many.json["results"][0]["problem"]["code"].endswith(code)
        warned = await enqueued_sms(api, text="it\u2019s " * 30)
        words = "text: U+2019 is not in GSM-7, so the text takes 3 segments instead of 1."
        assert (warned.status, warned.json["warnings"]) == (202, [words])


async def test_a_key_with_a_list_of_senders_sends_sms_only_with_the_default_sender(
    api: Api, connection: psycopg.Connection
) -> None:
    for limit in ({"sender_domains": ["example.com"]}, {"sender_addresses": ["shop@example.com"]}):
        token = make_key(connection, **limit)
        statuses = [
            (await api.call("POST", "/v1/sms", body={**SMS, **sender}, key=f"k-{sender}", token=token)).status
            for sender in ({}, {"from": NUMBER}, {"from": "Example"}, {"from": "12345"})
        ]
        assert statuses == [202, 403, 403, 403]


async def test_without_a_provider_of_sms_the_api_refuses_and_names_the_setting(settings: Settings) -> None:
    async with running(replace(settings, providers=("smtp",))) as api:
        answer = await enqueued_sms(api)

    assert (answer.status, answer.code) == (422, "no-capable-provider")
    assert "DISPATCHER_SMS_PROVIDERS" in answer.json["detail"]


async def test_a_status_callback_is_stored_once_and_settles_the_sms_and_a_late_one_changes_no_end(
    api: Api, connection: psycopg.Connection
) -> None:
    email_id = (await enqueued_sms(api)).json["id"]
    Books(connection).lose_attempt(UUID(email_id))
    for status in ("delivered", "delivered", "sent", "queued", "delivered"):
        form = {**SID, "MessageStatus": status, "To": NUMBER}
        assert (await called_back(api, STATUS_URL, form, query=f"email_id={email_id}")).status == 204

    delivered = "select provider from dispatcher.email_event where kind = 'delivered'"
    assert connection.execute(delivered).fetchall() == [("twilio",)]
    assert (await api.get(f"/v1/emails/{email_id}")).json["status"] == "sent"


async def test_stop_from_the_other_form_of_a_number_suppresses_it(api: Api, connection: psycopg.Connection) -> None:
    hashes = "select r.address_hash = substr(s.address_hash, 1, length(r.address_hash))"
    hashes += " from dispatcher.suppression as s, dispatcher.email_recipient as r where r.email_id = %s"
    for to, sender in (("+525512345678", "+5215512345678"), ("+541123456789", "+5491123456789")):
        email_id = (await enqueued_sms(api, key=to, to=to)).json["id"]

        await called_back(api, INBOUND_URL, {"MessageSid": f"SM{to[1:]:0>32}", "From": sender, "Body": "STOP please"})

        assert (True,) in connection.execute(hashes, [email_id]).fetchall()
        for form in (to, sender):
            found = await api.get(f"/v1/emails?recipient={quote(form)}")
            assert [email["id"] for email in found.json["emails"]] == [email_id]


async def test_a_copy_of_an_old_reply_changes_nothing(api: Api, connection: psycopg.Connection) -> None:
    await enqueued_sms(api)
    stop = {**SID, "From": NUMBER, "Body": "STOP"}
    start = {**OTHER_SID, "From": NUMBER, "Body": "START"}

    for form in (stop, start, stop):
        await called_back(api, INBOUND_URL, form)
    assert connection.execute(ENTRIES).fetchall() == []

    await called_back(api, INBOUND_URL, {**stop, "MessageSid": f"SM{'3' * 32}"})
    await called_back(api, INBOUND_URL, start)
    assert connection.execute(ENTRIES).fetchall() == [("default", "+49•••78", "unsubscribe")]


async def test_start_leaves_the_entry_of_an_operator(api: Api, connection: psycopg.Connection) -> None:
    body = {"recipients": [NUMBER], "reason": "a complaint by post"}
    assert (await api.call("POST", "/v1/suppressions", body=body)).status == 200

    await called_back(api, INBOUND_URL, {**SID, "From": NUMBER, "Body": "STOP"})
    await called_back(api, INBOUND_URL, {**OTHER_SID, "From": NUMBER, "Body": "START"})

    assert connection.execute(ENTRIES).fetchall() == [("default", "+49•••78", "manual")]


async def test_a_number_that_does_not_exist_is_suppressed_unless_the_sms_is_unknown(
    api: Api, connection: psycopg.Connection
) -> None:
    email_id = (await enqueued_sms(api)).json["id"]
    Books(connection).lose_attempt(UUID(email_id))
    form = {**SID, "MessageStatus": "undelivered", "ErrorCode": "30006", "To": NUMBER}

    for query in ("email_id=x", f"email_id={UUID(int=7)}"):
        assert (await called_back(api, STATUS_URL, form, query=query)).status == 204
        assert connection.execute(ENTRIES).fetchall() == []
    await called_back(api, STATUS_URL, form, query=f"email_id={email_id}")

    assert connection.execute(ENTRIES).fetchall() == [("default", "+49•••78", "hard_bounce")]
    domains = connection.execute("select dispatcher.recipient_domains(email_id) from dispatcher.email_log")
    assert domains.fetchall() == [([],)]


async def test_the_longest_sms_is_read_and_a_larger_callback_is_refused(api: Api) -> None:
    for body, status in (("x" * (64 << 10), 413), ("\U0001f600" * 1600, 200)):
        assert (await called_back(api, INBOUND_URL, {**SID, "From": NUMBER, "Body": body})).status == status


def test_the_command_reads_the_token_that_verifies_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "DATABASE_URL": "postgresql://localhost/mail",
        "AMQP_URL": "amqp://localhost",
        "SMS_PROVIDERS": "twilio",
        "TWILIO_ACCOUNT_SID": "AC" + "0" * 32,
        "TWILIO_AUTH_TOKEN": TOKEN,
        "TWILIO_CALLBACK_URL": STATUS_URL,
    }
    for name, value in environment.items():
        monkeypatch.setenv(f"DISPATCHER_{name}", value)

    assert getattr(api_settings().own["twilio"], "auth_token", None) == TOKEN


async def test_post_suppresses_the_recipient_once_and_get_none(api: Api, connection: psycopg.Connection) -> None:
    email_id = UUID((await api.post("a", EMAIL | {"to": ["Ann <ann@example.org>"]})).json["id"])
    path = f"/v1/unsubscribe/{hasher_of(connection).unsubscribe_token(email_id, 'ann@example.org')}"

    asked = await api.call("GET", path)
    assert (asked.status, connection.execute(ENTRIES).fetchall()) == (200, [])
    assert b'method="post"' in asked.body
    for _ in range(2):
        done = await api.call("POST", path, raw=b"List-Unsubscribe=One-Click", headers=ONE_CLICK)
        assert done.status == 200

    assert connection.execute(ENTRIES).fetchall() == [("default", "a•••@example.org", "unsubscribe")]


async def test_a_link_in_an_email_with_a_topic_names_the_topic_and_offers_to_leave_all(
    api: Api, connection: psycopg.Connection
) -> None:
    email = EMAIL | {"to": ["ann@example.org"], "topic": "weekly-news"}
    email_id = UUID((await api.post("a", email)).json["id"])
    path = f"/v1/unsubscribe/{hasher_of(connection).unsubscribe_token(email_id, 'ann@example.org')}"
    entries = "select topic, reason, source_email_id from suppression order by suppression_id"

    asked = (await api.call("GET", path)).body.decode()
    left = await api.call("POST", path, raw=b"List-Unsubscribe=One-Click", headers=ONE_CLICK)
    of_topic = connection.execute(entries).fetchall()
    whole = await api.call("POST", f"{path}?all", raw=b"", headers=ONE_CLICK)

    assert "Unsubscribe from “weekly-news”" in asked
    assert 'formaction="?all"' in asked
    assert (left.status, "no more emails of “weekly-news”" in left.body.decode()) == (200, True)
    assert (whole.status, "weekly-news" in whole.body.decode()) == (200, False)
    assert of_topic == [("weekly-news", "unsubscribe", email_id)]
    assert connection.execute(entries).fetchall() == [*of_topic, (None, "unsubscribe", email_id)]


async def test_tokens_that_are_not_genuine_and_unknown_emails_get_the_same_answer(
    api: Api, connection: psycopg.Connection
) -> None:
    genuine = hasher_of(connection).unsubscribe_token(uuid4(), "ann@example.org")
    tokens = (genuine, genuine[:-1] + ("A" if genuine[-1] != "A" else "B"), "%00" * 64, "é" * 32)

    answers = [await api.call("POST", f"/v1/unsubscribe/{token}", raw=b"", headers=ONE_CLICK) for token in tokens]

    assert [answer.status for answer in answers] == [404] * len(tokens)
    assert len({answer.body for answer in answers}) == 1
    assert connection.execute(ENTRIES).fetchall() == []


async def test_a_forged_token_needs_no_database_session(api: Api, connection: psycopg.Connection) -> None:
    genuine = hasher_of(connection).unsubscribe_token(uuid4(), "ann@example.org")
    assert (await api.call("GET", f"/v1/unsubscribe/{genuine}")).status == 200
    with unreachable(api.settings.database_url):
        forged = [
            await api.call(method, f"/v1/unsubscribe/{token}")
            for method in ("GET", "POST")
            for token in ("A" * 64, "A" * 63 + "=", "é" * 64)
        ]
        suppressing = await api.call("POST", f"/v1/unsubscribe/{genuine}")

    assert {answer.code for answer in forged} == {"not-found"}
    assert suppressing.code == "database-unavailable"

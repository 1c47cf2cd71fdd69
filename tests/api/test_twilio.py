"""SMS over the HTTP API, and what Twilio posts about them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode
from uuid import UUID

import psycopg
import pytest

from dispatcher.cli.api import api_settings
from dispatcher.config import Settings
from dispatcher.events.twilio import SIGNATURE_HEADER, sign
from dispatcher.providers.twilio import TwilioSettings
from tests.api.running_api import Answer, Api, make_key, running
from tests.store.books import Books

TOKEN = "the_token_of_the_account_0123456789"
STATUS_URL = "https://mail.example.org/v1/events/twilio"
INBOUND_URL = "https://mail.example.org/v1/inbound/twilio"
NUMBER = "+4915112345678"
SMS = {"to": "+49 151 12345678", "text": "Your code is 1234."}


@pytest.fixture
async def sms_api(settings: Settings) -> AsyncIterator[Api]:
    """A running API with twilio as its provider of SMS."""
    own = TwilioSettings(account_sid="AC" + "0" * 32, auth_token=TOKEN, callback_url=STATUS_URL)
    async with running(replace(settings, providers=("smtp", "twilio"), own={**settings.own, "twilio": own})) as api:
        yield api


async def enqueued(api: Api, key: str = "sms-1", **changes: Any) -> Answer:
    return await api.call("POST", "/v1/sms", body={**SMS, **changes}, headers={"Idempotency-Key": key})


async def post(api: Api, url: str, form: dict[str, str], *, query: str = "", token: str = TOKEN) -> Answer:
    public = f"{url}?{query}" if query else url
    headers = {
        "Content-Type": "application/x-www-form-urlencoded; charset=UTF-8",
        SIGNATURE_HEADER: sign(token, public, form),
    }
    path = public.removeprefix("https://mail.example.org")
    return await api.call("POST", path, raw=urlencode(form).encode(), headers=headers)


async def test_an_sms_is_enqueued_once_with_its_number_in_e164(sms_api: Api, connection: psycopg.Connection) -> None:
    first, again = await enqueued(sms_api), await enqueued(sms_api)

    assert (first.status, again.status) == (202, 202)
    assert first.json == again.json
    rows = connection.execute(
        "select channel, recipients, text_body from dispatcher.email_log join dispatcher.email_content using (email_id)"
    ).fetchall()
    assert rows == [("sms", {"to": [NUMBER]}, "Your code is 1234.")]


async def test_the_receipt_warns_about_an_expensive_character(sms_api: Api) -> None:
    answer = await enqueued(sms_api, text="it\u2019s " * 30)

    assert answer.status == 202
    assert answer.json["warnings"] == ["text: U+2019 is not in GSM-7, so the text takes 3 segments instead of 1."]


async def test_a_long_sms_is_refused_by_the_setting(sms_api: Api) -> None:
    answer = await enqueued(sms_api, text="a" * 1600)

    assert (answer.status, answer.code) == (422, "email-not-allowed")
    assert "takes 11 segments (GSM-7); DISPATCHER_SMS_MAX_SEGMENTS allows 10" in answer.json["errors"][0]["detail"]


@pytest.mark.parametrize(
    ("to", "code", "words"),
    [
        ("+18765551234", "email-not-allowed", "is a number of JM, which DISPATCHER_SMS_COUNTRIES"),
        ("+499001234567", "invalid-email", "is a premium-rate number"),
    ],
)
async def test_an_sms_to_a_number_that_is_not_allowed_is_refused(
    settings: Settings, to: str, code: str, words: str
) -> None:
    async with running(replace(settings, sms_countries=frozenset({"US"}))) as api:
        one = await enqueued(api, to=to)
        batch = {"emails": [{**SMS, "channel": "sms", "message_key": "a", "to": to}]}
        many = await api.call("POST", "/v1/emails/batch", body=batch)

    assert (one.status, one.code, one.pointers) == (422, code, ["#/to"])
    assert words in one.json["errors"][0]["detail"]
    assert to[1:].encode() not in one.body
    assert many.json["results"][0]["problem"]["code"].endswith(code)


@pytest.mark.parametrize("limit", [{"sender_domains": ["example.com"]}, {"sender_addresses": ["shop@example.com"]}])
async def test_a_key_with_a_list_of_senders_sends_sms_only_with_the_default_sender(
    sms_api: Api, connection: psycopg.Connection, limit: dict[str, list[str]]
) -> None:
    token = make_key(connection, **limit)

    async def status(key: str, **changes: str) -> int:
        headers = {"Idempotency-Key": key}
        return (await sms_api.call("POST", "/v1/sms", body={**SMS, **changes}, headers=headers, token=token)).status

    assert await status("default") == 202
    assert [await status("other", **{"from": sender}) for sender in (NUMBER, "Example", "12345")] == [403] * 3


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [({"to": "0151"}, "#/to"), ({"to": [NUMBER]}, "#/to"), ({"subject": "x"}, "#/subject"), ({"text": ""}, "#/text")],
)
async def test_a_wrong_sms_is_refused_by_its_field(sms_api: Api, changes: dict[str, Any], pointer: str) -> None:
    answer = await enqueued(sms_api, **changes)

    assert (answer.status, answer.code) == (422, "invalid-email")
    assert answer.json["errors"][0]["pointer"] == pointer


async def test_without_a_provider_of_sms_the_api_refuses_and_names_the_setting(settings: Settings) -> None:
    async with running(replace(settings, providers=("smtp",))) as api:
        answer = await enqueued(api)

    assert (answer.status, answer.code) == (422, "no-capable-provider")
    assert "DISPATCHER_SMS_PROVIDERS" in answer.json["detail"]


async def test_a_status_callback_is_stored_once_and_settles_the_sms(
    sms_api: Api, connection: psycopg.Connection
) -> None:
    email_id = (await enqueued(sms_api)).json["id"]
    Books(connection).lose_attempt(UUID(email_id))
    form = {"MessageSid": "SM" + "0" * 32, "MessageStatus": "delivered", "To": NUMBER}

    answers = [await post(sms_api, STATUS_URL, form, query=f"email_id={email_id}") for _ in range(3)]

    assert [answer.status for answer in answers] == [204] * 3
    assert connection.execute("select provider, kind from dispatcher.email_event").fetchall() == [
        ("twilio", "delivered")
    ]
    assert (await sms_api.get(f"/v1/emails/{email_id}")).json["status"] == "sent"


async def test_a_number_that_does_not_exist_is_suppressed_and_never_shown(
    sms_api: Api, connection: psycopg.Connection
) -> None:
    email_id = (await enqueued(sms_api)).json["id"]
    Books(connection).lose_attempt(UUID(email_id))
    form = {"MessageSid": "SM" + "0" * 32, "MessageStatus": "undelivered", "ErrorCode": "30006", "To": NUMBER}

    await post(sms_api, STATUS_URL, form, query=f"email_id={email_id}")

    assert connection.execute("select masked, reason from dispatcher.suppression").fetchall() == [
        ("+49•••78", "hard_bounce")
    ]
    domains = connection.execute("select dispatcher.recipient_domains(email_id) from dispatcher.email_log")
    assert domains.fetchall() == [([],)]


async def test_a_forged_request_changes_nothing(sms_api: Api, connection: psycopg.Connection) -> None:
    email_id = (await enqueued(sms_api)).json["id"]
    form = {"MessageSid": "SM" + "0" * 32, "MessageStatus": "delivered", "To": NUMBER}
    stop = {"MessageSid": "SM" + "0" * 32, "From": NUMBER, "Body": "STOP"}

    forged = await post(sms_api, STATUS_URL, form, query=f"email_id={email_id}", token="other")
    unsigned = await sms_api.call("POST", f"/v1/events/twilio?email_id={email_id}", raw=b"a=1")
    inbound = await post(sms_api, INBOUND_URL, stop, token="other")

    assert {(each.status, each.code) for each in (forged, unsigned, inbound)} == {(403, "signature-invalid")}
    assert (
        connection.execute("select from dispatcher.email_event union all select from dispatcher.suppression").fetchall()
        == []
    )


async def test_stop_suppresses_for_the_tenants_that_sent_to_the_number_and_start_ends_that(
    sms_api: Api, connection: psycopg.Connection
) -> None:
    await enqueued(sms_api)
    stop = {"MessageSid": "SM" + "1" * 32, "From": NUMBER, "Body": "Stop"}
    start = {"MessageSid": "SM" + "2" * 32, "From": NUMBER, "Body": "START"}
    entries = "select tenant_id, masked, reason from dispatcher.suppression"

    answer = await post(sms_api, INBOUND_URL, stop)
    assert (answer.status, answer.body) == (200, b"<Response/>")
    assert connection.execute(entries).fetchall() == [("default", "+49•••78", "unsubscribe")]

    await post(sms_api, INBOUND_URL, start)
    assert connection.execute(entries).fetchall() == []

    await post(sms_api, INBOUND_URL, stop)  # a copy of the old request
    assert connection.execute(entries).fetchall() == []


@pytest.mark.parametrize(
    ("to", "sender"),
    [
        ("+525512345678", "+5215512345678"),
        ("+5491123456789", "+541123456789"),
        ("+541123456789", "+5491123456789"),
    ],
)
async def test_stop_from_the_other_form_of_a_number_suppresses_the_number(
    sms_api: Api, connection: psycopg.Connection, to: str, sender: str
) -> None:
    await enqueued(sms_api, to=to)

    await post(sms_api, INBOUND_URL, {"MessageSid": "SM" + "1" * 32, "From": sender, "Body": "STOP please"})

    hashes = "select r.address_hash = substr(s.address_hash, 1, length(r.address_hash))"
    hashes += " from dispatcher.suppression as s, dispatcher.email_recipient as r"
    assert connection.execute(hashes).fetchall() == [(True,)]
    for form in (to, sender):
        found = await sms_api.get(f"/v1/emails?recipient={quote(form)}")
        assert len(found.json["emails"]) == 1


async def test_start_leaves_the_entry_of_an_operator(sms_api: Api, connection: psycopg.Connection) -> None:
    added = await sms_api.call(
        "POST", "/v1/suppressions", body={"recipients": [NUMBER], "reason": "a complaint by post"}
    )
    assert added.status < 300, added.body

    await post(sms_api, INBOUND_URL, {"MessageSid": "SM" + "1" * 32, "From": NUMBER, "Body": "STOP"})
    await post(sms_api, INBOUND_URL, {"MessageSid": "SM" + "2" * 32, "From": NUMBER, "Body": "START"})

    assert connection.execute("select masked, reason from dispatcher.suppression").fetchall() == [
        ("+49•••78", "manual")
    ]


async def test_an_earlier_status_that_arrives_late_changes_no_end(sms_api: Api, connection: psycopg.Connection) -> None:
    email_id = (await enqueued(sms_api)).json["id"]
    Books(connection).lose_attempt(UUID(email_id))
    for status in ("delivered", "sent", "queued", "delivered"):
        form = {"MessageSid": "SM" + "0" * 32, "MessageStatus": status, "To": NUMBER}
        assert (await post(sms_api, STATUS_URL, form, query=f"email_id={email_id}")).status == 204

    assert (await sms_api.get(f"/v1/emails/{email_id}")).json["status"] == "sent"


@pytest.mark.parametrize("query", ["", "email_id=x", f"email_id={'0' * 8}-0000-7000-8000-{'0' * 12}"])
async def test_a_status_of_an_unknown_sms_is_answered_alike_and_suppresses_nobody(
    sms_api: Api, connection: psycopg.Connection, query: str
) -> None:
    form = {"MessageSid": "SM" + "0" * 32, "MessageStatus": "undelivered", "ErrorCode": "30006", "To": NUMBER}

    assert (await post(sms_api, STATUS_URL, form, query=query)).status == 204

    assert connection.execute("select from dispatcher.suppression").fetchall() == []


async def test_a_callback_that_is_too_large_is_refused(sms_api: Api) -> None:
    form = {"MessageSid": "SM" + "0" * 32, "Body": "x" * (64 << 10)}

    assert (await post(sms_api, INBOUND_URL, form)).status == 413


async def test_the_longest_sms_is_read(sms_api: Api, connection: psycopg.Connection) -> None:
    form = {"MessageSid": "SM" + "0" * 32, "From": NUMBER, "OptOutType": "STOP", "Body": "\U0001f600" * 1600}

    assert (await post(sms_api, INBOUND_URL, form)).status == 200

    assert connection.execute("select reason from dispatcher.suppression").fetchall() == [("unsubscribe",)]


async def test_an_email_and_an_sms_share_the_keys_of_a_tenant(sms_api: Api) -> None:
    await enqueued(sms_api, "order-17")
    email = {"from": "shop@example.com", "to": ["ann@example.org"], "subject": "x", "text": "x"}

    answer = await sms_api.call("POST", "/v1/emails", body=email, headers={"Idempotency-Key": "order-17"})

    assert (answer.status, answer.code) == (422, "idempotency-key-reused")


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

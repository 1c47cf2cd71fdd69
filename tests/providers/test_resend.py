"""The resend adapter: its outcomes, its requests, its idempotency key, and its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dispatcher.dev.http_apis import resend_error
from dispatcher.dev.http_behaviour import Behaviour, Fault, Reply
from dispatcher.domain.outcome import Accepted, Uncertain
from dispatcher.domain.outgoing import OutgoingAttachment
from dispatcher.providers.resend import KEY_SECONDS, ResendProvider
from dispatcher.providers.resend.request import body_of
from tests.providers.emails import an_email, send
from tests.providers.http_outcomes import EMAIL_PARTS, FAULT, Case, HttpOutcomes
from tests.providers.http_places import RESEND_KEY, resend_place


def invalid(status: int, message: str) -> Reply:
    return resend_error(status, "validation_error", message)


NEITHER: Final = "200 without one, another 2xx, or a redirect (not followed)"
CONFLICT: Final = "409: another request with this key is in progress, or had other content"
SENDER: Final = "400, 403 or 422 that blames the sender"
CONTENT: Final = "another 400 or 422"
ACCOUNT: Final = '401, another 403, 404, 405, 451; 429 about a quota; "testing emails"'
SERVER: Final = "408, 500, 503 and other 5xx"
GATEWAY: Final = "502 or 504: a gateway got no response from Resend"

TABLE: Final = [
    Case("200 with an id", "accepted", accepted=1),
    Case(NEITHER, "uncertain", Fault.EMPTY, "200", "200 with an empty body", accepted=1),
    Case(NEITHER, "uncertain", Fault.HTML, "200", "octets of text/html", accepted=1),
    Case(NEITHER, "uncertain", Fault.REDIRECT, "307", accepted=1),
    Case(NEITHER, "uncertain", Reply(200, {"id": "a\nb"}), "200"),
    Case(CONFLICT, "uncertain", resend_error(409, "concurrent_idempotent_requests", "in progress"),
         "409 concurrent_idempotent_requests"),
    Case(CONFLICT, "uncertain", resend_error(409, "invalid_idempotent_request", "was modified"),
         "409 invalid_idempotent_request", "409 invalid_idempotent_request: was modified"),
    Case(SENDER, "rejected rejected_sender", invalid(403, "The example.org domain is not verified."),
         "403 validation_error", "is not verified"),
    Case(SENDER, "rejected rejected_sender", invalid(422, "Invalid `from` field."), "422 validation_error"),
    Case(SENDER, "rejected rejected_sender", resend_error(422, "invalid_from_address", "no"),
         "422 invalid_from_address"),
    Case("400 or 422 that blames the recipients", "rejected rejected_recipient",
         invalid(422, "Invalid `to` field: ann@example.com."), "422 validation_error", "Invalid `to` field: <address>"),
    Case(CONTENT, "rejected invalid_content", invalid(400, "no"), "400 validation_error"),
    Case(CONTENT, "rejected invalid_content", resend_error(422, "invalid_attachment", "no"), "422 invalid_attachment"),
    Case(CONTENT, "rejected invalid_content", Reply(422, b"<html>"), "422", "422 with 6 octets of no type"),
    Case(CONTENT, "rejected invalid_content", Reply(422, {"name": 1, "message": []}), "422"),
    Case("413", "rejected too_large", Reply(413), "413"),
    Case("another 4xx", "rejected refused", resend_error(418, "teapot", "no"), "418 teapot"),
    Case(ACCOUNT, FAULT, resend_error(401, "missing_api_key", "Missing API key"), detail="RESEND_API_KEY"),
    Case(ACCOUNT, FAULT, resend_error(403, "invalid_api_key", "API key is invalid"), detail="RESEND_API_KEY"),
    Case(ACCOUNT, FAULT, invalid(403, "You can only send testing emails to your own address"),
         detail="Verify a domain"),
    Case(ACCOUNT, FAULT, resend_error(404, "not_found", "no"), detail="DISPATCHER_RESEND_URL"),
    Case(ACCOUNT, FAULT, resend_error(405, "method_not_allowed", "no"), detail="DISPATCHER_RESEND_URL"),
    Case(ACCOUNT, FAULT, resend_error(451, "security_error", "no"), detail="support"),
    Case(ACCOUNT, FAULT, resend_error(429, "daily_quota_exceeded", "no"), detail="quota"),
    Case(ACCOUNT, FAULT, resend_error(429, "monthly_quota_exceeded", "no"), detail="quota"),
    Case("another 429", "deferred throttled", resend_error(429, "rate_limit_exceeded", "no"),
         "429 rate_limit_exceeded"),
    Case(SERVER, "deferred server_error", resend_error(500, "application_error", "no"), "500 application_error"),
    Case(SERVER, "deferred server_error", Reply(503), "503"),
    Case(SERVER, "deferred server_error", Reply(408), "408"),
    Case(GATEWAY, "uncertain", Reply(502), "502"),
    Case(GATEWAY, "uncertain", Reply(504, b"<html>"), "504"),
]  # fmt: skip


class TestOutcomes(HttpOutcomes):
    section, table, place = "Resend", TABLE, staticmethod(resend_place)
    secrets = (RESEND_KEY, *EMAIL_PARTS)
    message_id = r"[0-9a-f-]{36}"
    resets = True
    refused = (
        ({"to": (), "bcc": ("ann@example.com", "bob@example.com")}, "rejected_recipient", ""),
        ({"subject": ""}, "invalid_content", "subject"),
        ({"text": ""}, "invalid_content", ""),
        ({"attachments": (OutgoingAttachment("a.txt", "text/plain", b""),)}, "invalid_content", ""),
    )
    checks = (
        (Behaviour(key=RESEND_KEY), "Resend accepts the API key; emails are delivered."),
        (Behaviour(key="re_other"), "Check RESEND_API_KEY"),
    )


async def test_a_second_request_with_the_same_key_gets_the_first_answer_and_delivers_nothing(tmp_path: Path) -> None:
    email = an_email()
    async with resend_place(tmp_path, Behaviour(Fault.CLOSE, times=1)) as place:
        first, second = await send(place.provider, email), await send(place.provider, email)
        third = await send(place.provider, email)
        changed = await send(place.provider, an_email(email_id=email.email_id, subject="Another"))

        assert isinstance(first.outcome, Uncertain)
        assert isinstance(second.outcome, Accepted)
        assert second.outcome == third.outcome
        assert isinstance(changed.outcome, Uncertain)
        assert changed.outcome.code == "409 invalid_idempotent_request"
        assert place.times() == {str(email.email_id): 1}


def test_we_rely_on_a_key_for_an_hour_less_than_resend_remembers_it() -> None:
    assert ResendProvider.capabilities.idempotency_key_seconds == KEY_SECONDS == 23 * 3600


async def test_the_request_has_the_id_the_tags_and_the_template(tmp_path: Path) -> None:
    email = an_email(
        to=(), bcc=("Ann <ann@example.com>",), subject="", text=None, tags=("spring sale", "vip"),
        template_id="welcome", template_data={"name": "Ann"}, headers={"X-Campaign": "Grüße"},
    )  # fmt: skip
    async with resend_place(tmp_path) as place:
        await send(place.provider, email)

        (document,) = place.double.received

    assert document == {
        "from": "Shop <shop@example.org>",
        "to": ["Ann <ann@example.com>"],
        "template": {"id": "welcome", "variables": {"name": "Ann"}},
        "headers": {"X-Campaign": "=?utf-8?b?R3LDvMOfZQ==?="},
        "tags": [
            {"name": "email_id", "value": str(email.email_id)},
            {"name": "tag_1", "value": "spring_sale"},
            {"name": "tag_2", "value": "vip"},
        ],
    }


def test_the_body_depends_on_nothing_but_the_email() -> None:
    first = an_email(template_id="t", template_data={"b": 1, "a": 2}, headers={"X-B": "1", "X-A": "2"})
    second = an_email(
        email_id=first.email_id, template_id="t", template_data={"a": 2, "b": 1}, headers={"X-A": "2", "X-B": "1"}
    )

    assert body_of(first) == body_of(second)

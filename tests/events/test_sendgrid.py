"""SendGrid's signature is verified before anything is parsed, and each of its events gets its kind."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.config import load
from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.errors import ConfigurationError
from dispatcher.events.contract import EventsRefused, EventsUnreadable, Refusal, Skipped
from dispatcher.events.sendgrid import SIGNATURE_HEADER, TIMESTAMP_HEADER, SendGridVerifier, parse
from dispatcher.store.address_hashes import AddressHasher
from dispatcher.store.events import EventRow
from tests.events.requests import ANN, AT, SendGridKey, dumped, sendgrid_event

ID = UUID("01938a7e-0000-7000-8000-000000000001")

# The example in the tests of SendGrid's own libraries.
EXAMPLE_KEY = (
    "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE83T4O/n84iotIvIW4mdBgQ/7dAfSmpqIM8kF9mN1flpVKS3GRqe62gw+2fNNRaINXvVpiglSI8eNEc"
    "6wEA3F+g=="
)
EXAMPLE_HEADERS = {
    SIGNATURE_HEADER: "MEUCIGHQVtGj+Y3LkG9fLcxf3qfI10QysgDWmMOVmxG0u6ZUAiEAyBiXDWzM+uOe5W0JuG+luQAbPIqHh89M15TluL"
    "tEZtM=",
    TIMESTAMP_HEADER: "1600112502",
}
EXAMPLE_BODY = (
    b'[{"email":"hello@world.com","event":"dropped","reason":"Bounced Address",'
    b'"sg_event_id":"ZHJvcC0xMDk5NDkxOS1MUnpYbF9OSFN0T0doUTRrb2ZTbV9BLTA",'
    b'"sg_message_id":"LRzXl_NHStOGhQ4kofSm_A.filterdrecv-p3mdw1-756b745b58-kmzbl-18-5F5FC76C-9.0",'
    b'"smtp-id":"<LRzXl_NHStOGhQ4kofSm_A@ismtpd0039p1iad1.sendgrid.net>","timestamp":1600112492}]\r\n'
)


def verify(keys: list[str], headers: dict[str, str], body: bytes, *, seconds: float = 0, now: float = 0) -> None:
    """Verifies a request; `seconds` 0 allows any age."""
    verifier = SendGridVerifier(keys, max_age_seconds=seconds, clock=lambda: now)
    verifier.verify(verifier.check_headers(headers), body)


def refusal(*arguments: Any, **named: Any) -> Refusal:
    """Why a request is refused."""
    with pytest.raises(EventsRefused) as refused:
        verify(*arguments, **named)
    return refused.value.refusal


def only(event: dict[str, Any]) -> ProviderEvent:
    """The event in a body with one event."""
    (found,) = parse(dumped([event])).events
    return found


def test_sendgrids_own_example_verifies() -> None:
    verify([EXAMPLE_KEY], EXAMPLE_HEADERS, EXAMPLE_BODY)


@pytest.mark.parametrize("body", [EXAMPLE_BODY[:-2], EXAMPLE_BODY.replace(b"dropped", b"deliver"), b"", b"[]"])
def test_a_changed_body_is_refused(body: bytes) -> None:
    assert refusal([EXAMPLE_KEY], EXAMPLE_HEADERS, body) is Refusal.SIGNATURE


def test_a_changed_timestamp_is_refused() -> None:
    assert (
        refusal([EXAMPLE_KEY], {**EXAMPLE_HEADERS, TIMESTAMP_HEADER: "1600112503"}, EXAMPLE_BODY) is Refusal.SIGNATURE
    )


def test_each_of_two_keys_verifies_during_a_rotation_and_a_third_does_not() -> None:
    old, new, foreign = SendGridKey(), SendGridKey(), SendGridKey()
    keys = [old.public, new.public]

    verify(keys, old.headers(b"[]"), b"[]")
    verify(keys, new.headers(b"[]"), b"[]")
    assert refusal(keys, foreign.headers(b"[]"), b"[]") is Refusal.SIGNATURE


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {SIGNATURE_HEADER: ""},
        {SIGNATURE_HEADER: "!!!"},
        {SIGNATURE_HEADER: "é"},
        {SIGNATURE_HEADER: "AAAA" * 10_000},
        {SIGNATURE_HEADER: "AAAA"},
        {TIMESTAMP_HEADER: ""},
        {TIMESTAMP_HEADER: "now"},
        {TIMESTAMP_HEADER: "-1"},
        {TIMESTAMP_HEADER: "9" * 5000},
        {TIMESTAMP_HEADER: "١٦٠"},
    ],
)
def test_malformed_headers_are_refused(headers: dict[str, str]) -> None:
    given = {**EXAMPLE_HEADERS, **headers} if headers else {}

    assert refusal([EXAMPLE_KEY], given, EXAMPLE_BODY) is Refusal.SIGNATURE


@pytest.mark.parametrize(("age", "is_fresh"), [(0, True), (89_999, True), (90_001, False), (-599, True), (-601, False)])
def test_a_signature_is_valid_for_a_time_and_a_little_ahead_of_our_clock(age: float, is_fresh: bool) -> None:
    key = SendGridKey()
    headers = key.headers(b"[]", timestamp=1_000_000)

    if is_fresh:
        verify([key.public], headers, b"[]", seconds=90_000, now=1_000_000 + age)
    else:
        assert refusal([key.public], headers, b"[]", seconds=90_000, now=1_000_000 + age) is Refusal.STALE


@pytest.mark.parametrize("text", ["x", "AAAA", "-----BEGIN PUBLIC KEY-----", EXAMPLE_KEY[:-8], ","])
def test_a_setting_that_is_not_a_public_key_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="DISPATCHER_SENDGRID_EVENTS_KEYS"):
        load({"DISPATCHER_SENDGRID_EVENTS_KEYS": text})


def test_a_key_that_is_not_on_the_curve_is_refused() -> None:
    (key,) = load(
        {"DISPATCHER_SENDGRID_EVENTS_KEYS": EXAMPLE_KEY[:60] + "AAAA" + EXAMPLE_KEY[64:]}
    ).sendgrid_events_keys

    with pytest.raises(ConfigurationError, match="P-256"):
        SendGridVerifier([key], max_age_seconds=0)


def test_keys_come_from_a_file_with_one_key_per_line(tmp_path: Any) -> None:
    other = SendGridKey().public
    (tmp_path / "keys").write_text(f"{EXAMPLE_KEY}\n{other}\n")

    settings = load({"DISPATCHER_SENDGRID_EVENTS_KEYS_FILE": str(tmp_path / "keys")})

    assert settings.sendgrid_events_keys == (EXAMPLE_KEY, other)


@pytest.mark.parametrize(
    ("event", "kind", "bounce", "code"),
    [
        ({"event": "processed"}, EventKind.ACCEPTED, None, None),
        ({"event": "delivered", "response": "250 OK"}, EventKind.DELIVERED, None, "250"),
        ({"event": "deferred", "response": "400 try again", "attempt": "5"}, EventKind.DEFERRED, None, "400"),
        ({"event": "bounce", "type": "bounce", "status": "5.1.1"}, EventKind.BOUNCED, Bounce.HARD, "5.1.1"),
        ({"event": "bounce", "type": "bounce"}, EventKind.BOUNCED, Bounce.HARD, None),
        ({"event": "bounce", "type": "blocked", "status": "5.7.1"}, EventKind.BOUNCED, Bounce.BLOCKED, "5.7.1"),
        ({"event": "bounce", "type": "bounce", "status": "5.2.2"}, EventKind.BOUNCED, Bounce.SOFT, "5.2.2"),
        ({"event": "bounce", "type": "bounce", "status": "4.0.0"}, EventKind.BOUNCED, Bounce.SOFT, "4.0.0"),
        ({"event": "bounce", "status": "5.1.1"}, EventKind.BOUNCED, Bounce.SOFT, "5.1.1"),
        ({"event": "bounce", "type": ["bounce"], "status": 511}, EventKind.BOUNCED, Bounce.SOFT, None),
        ({"event": "dropped", "reason": "Bounced Address"}, EventKind.REJECTED, None, None),
        ({"event": "spamreport"}, EventKind.COMPLAINED, None, None),
        ({"event": "unsubscribe"}, EventKind.UNSUBSCRIBED, None, None),
        ({"event": "group_unsubscribe", "asm_group_id": 10}, EventKind.UNSUBSCRIBED, None, "group"),
        ({"event": "open"}, EventKind.OPENED, None, None),
        ({"event": "click", "url": "https://example.com/"}, EventKind.CLICKED, None, None),
    ],
)
def test_every_kind_of_event_is_known(
    event: dict[str, Any], kind: EventKind, bounce: Bounce | None, code: str | None
) -> None:
    found = only(sendgrid_event(ID, **event))

    assert (found.email_id, found.provider, found.happened_at, found.recipient) == (ID, "sendgrid", AT, ANN)
    assert (found.kind, found.bounce, found.code) == (kind, bounce, code)


def test_two_clicks_in_the_same_second_differ_by_their_url() -> None:
    one, two = (only(sendgrid_event(ID, "click", url=url)) for url in ("https://a.example/", "https://b.example/"))

    assert one.key(None) != two.key(None)


def test_a_retry_under_a_new_event_id_is_the_same_event() -> None:
    one, two = (only(sendgrid_event(ID, sg_event_id=name)) for name in ("a", "b"))

    assert one.key(None) == two.key(None)


def test_the_stored_explanation_has_no_address() -> None:
    found = only(sendgrid_event(ID, "bounce", type="bounce", reason=f"550 5.1.1 <{ANN}>: no such user\0\u202e"))

    assert EventRow.of(found, AddressHasher(bytes(32))).detail == "550 5.1.1 <address>: no such user"


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"email_id": None}, Skipped.FOREIGN),
        ({"email_id": "17"}, Skipped.FOREIGN),
        ({"email_id": [str(ID)]}, Skipped.FOREIGN),
        ({"event": "invented"}, Skipped.UNKNOWN_KIND),
        ({"event": "group_resubscribe"}, Skipped.IGNORED),
        ({"event": None}, Skipped.MALFORMED),
        ({"event": ["delivered"]}, Skipped.MALFORMED),
        ({"timestamp": None}, Skipped.MALFORMED),
        ({"timestamp": "1600112492"}, Skipped.MALFORMED),
        ({"timestamp": True}, Skipped.MALFORMED),
        ({"timestamp": -1}, Skipped.MALFORMED),
        ({"timestamp": 10**12}, Skipped.MALFORMED),
        ({"timestamp": 10**30}, Skipped.MALFORMED),
    ],
)
def test_an_event_that_is_not_ours_or_not_valid_is_counted_and_the_others_are_kept(
    event: dict[str, Any], why: Skipped
) -> None:
    body = json.dumps([sendgrid_event(ID), {**sendgrid_event(ID), **event}, sendgrid_event(ID, "open")]).encode()

    parsed = parse(body)

    assert [each.kind for each in parsed.events] == [EventKind.DELIVERED, EventKind.OPENED]
    assert parsed.skipped == {why: 1}


@pytest.mark.parametrize(
    "body", [b'{"event":"delivered"}', b"[[]]", b"[null]", b"[1]", b'"x"', b"null", b"17", b'[{"event":{}}]']
)
def test_json_of_another_form_is_counted(body: bytes) -> None:
    parsed = parse(body)

    assert (parsed.events, sum(parsed.skipped.values())) == ([], 1)


def test_an_empty_batch_has_no_events() -> None:
    parsed = parse(b"[]")

    assert (parsed.events, parsed.skipped) == ([], {})


@pytest.mark.parametrize("body", [b"", b"[", b"x", b"[" * 100_000 + b"]" * 100_000, b"\xff\xfe"])
def test_a_body_that_is_not_json_is_unreadable(body: bytes) -> None:
    with pytest.raises(EventsUnreadable):
        parse(body)


@pytest.mark.parametrize(
    "odd",
    [
        rb'"\ud800"',
        rb'"\u0000"',
        b'"\x01"',
        b'"\xff\xfe"',
        b"1" * 5000,
        b"1e999",
        b"-" + b"9" * 400,
        b"NaN",
        b'{"a":' * 900 + b"1" + b"}" * 900,
    ],
)
@pytest.mark.parametrize("name", [b"reason", b"url", b"email", b"response", b"status", b"type", b"other"])
def test_one_odd_value_costs_no_other_event(name: bytes, odd: bytes) -> None:
    event = dumped(sendgrid_event(ID, "bounce"))[:-1]
    body = b"[" + event + b',"' + name + b'":' + odd + b"}," + event + b"}]"

    parsed = parse(body)

    assert len(parsed.events) == 2
    hasher = AddressHasher(bytes(32))
    for each in parsed.events:
        row = EventRow.of(each, hasher)
        assert all("\0" not in text for text in (row.code, row.detail) if text)
        f"{row.code}{row.detail}".encode()


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_names = st.sampled_from(["event", "timestamp", "email_id", "email", "type", "status", "reason", "response", "url"])
_kinds = st.sampled_from(["bounce", "delivered", "click"])


@given(st.lists(st.dictionaries(_names, _json | _kinds | st.just(str(ID)) | st.just(1_600_000_000)), max_size=4))
def test_no_json_raises(events: list[dict[str, Any]]) -> None:
    parsed = parse(json.dumps(events).encode())

    assert len(parsed.events) + sum(parsed.skipped.values()) == len(events)
    for each in parsed.events:
        EventRow.of(each, AddressHasher(bytes(32)))

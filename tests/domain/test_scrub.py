"""A provider's text loses addresses, our own secrets and what it repeats of the email. The rest stays readable."""

from __future__ import annotations

import base64
import html
import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import quote, quote_plus
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.config import load
from dispatcher.config.setting import secrets_in
from dispatcher.domain.outcome import Accepted, Reason, Rejected
from dispatcher.domain.outgoing import OutgoingAttachment, OutgoingEmail
from dispatcher.domain.provider_text import without_echo, words_without_echo
from dispatcher.domain.scrub import MAX_CHARACTERS, Secrets, scrub
from tests.cpu import takes_cpu


@pytest.mark.parametrize(
    ("words", "safe"),
    [
        ("<ann@example.com>: Recipient address rejected", "<address>: Recipient address rejected"),
        ("no such user: ann.lee+x@mail.example.co.uk.", "no such user: <address>"),
        ("see https://example.com/?who=ann%40example.com&x=1", "see https:<address>"),
        ("SRS0=abc=xy=example.org=ann@relay.example", "<address>"),
        ("users ann@example.com,bob@example.com", "users <address>,<address>"),
        ('"ann lee"@example.com is unknown', "<address> is unknown"),
        ("юзер@пример.рф нет", "<address> нет"),
        ("ann\uff20example.com", "<address>"),
        ("ann@[192.0.2.1] no", "<address> no"),
        ("one\r\ntwo\tthree\x00four", "one two three four"),
        ("the key SG.abc-1_x.def2 is revoked", "the key <credential> is revoked"),
        ("bad header Authorization: Bearer abc.123", "bad header Authorization: <credential>"),
        ("Basic dXNlcjpwYXNzd29yZA== was refused", "<credential> was refused"),
        ("AKIAIOSFODNN7EXAMPLE is not active", "<credential> is not active"),
        ("basic authentication is needed", "basic authentication is needed"),
        ("Subject: =?utf-8?b?WW91ciBjb2Rl?= is spam", "Subject: <encoded> is spam"),
        ("  2.0.0   Ok ", "2.0.0 Ok"),
        ("", ""),
    ],
)
def test_addresses_credentials_and_control_characters_are_removed(words: str, safe: str) -> None:
    assert scrub(words) == safe


local = st.text("abcdefghijklmnopqrstuvwxyzäöü0123456789.!#$%&'*+/=?^_`{|}~-", min_size=1, max_size=20)
domain = st.from_regex(r"[a-z0-9]{1,10}(\.[a-z]{2,5}){1,2}", fullmatch=True)


@given(st.text(max_size=40), local, domain, st.text(max_size=40))
@settings(max_examples=40)
def test_no_part_of_an_address_survives(before: str, local: str, domain: str, after: str) -> None:
    secret = f"qq{local}qq"

    safe = scrub(f"{before} {secret}@{domain}qq {after}")

    assert secret not in safe
    assert f"{domain}qq" not in safe
    assert "@" not in safe


@given(st.text())
def test_any_text_becomes_one_bounded_printable_line(words: str) -> None:
    safe = scrub(words)

    assert len(safe) <= MAX_CHARACTERS
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", safe)
    assert scrub(safe) == safe


def test_a_megabyte_is_cut() -> None:
    assert {len(scrub(words)) for words in ("a@b " * 250_000, "x" * 1_000_000)} == {MAX_CHARACTERS}


SECRET = "p/w#d?x+é&\"1<2> %z'y"
USER = "shop-user"


def secrets(*texts: str, names: tuple[str, ...] = ()) -> Secrets:
    found = Secrets()
    found.register("test", texts, names)
    return found


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


FORMS = [
    SECRET,
    SECRET.upper(),
    quote(SECRET),
    quote(SECRET, safe=""),
    quote(SECRET, safe="").lower(),
    json.dumps(SECRET, ensure_ascii=False)[1:-1],
    json.dumps(SECRET)[1:-1],
    html.escape(SECRET),
    html.escape(SECRET).replace("&#x27;", "&#39;"),
    quote(SECRET, safe="").replace("%", "+"),
    quote_plus(SECRET),
    *(b64(f"{before}{SECRET}{after}") for before in ("", "a", "ab", f"\0{USER}\0", f"{USER}:") for after in ("", "z")),
    base64.urlsafe_b64encode(SECRET.encode()).decode(),
    quote(b64(SECRET), safe=""),
    b64(f"\0{USER}\0{SECRET}")[:24],
    b64(USER),
]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_secret_is_removed(form: str) -> None:
    words = secrets(SECRET, names=(USER,)).without(f"AUTH ({form}) refused")

    assert words == "AUTH (<credential>) refused"


@pytest.mark.parametrize(
    "words", ["2.0.0 Ok: queued as 4Gxq2N1lYRz9sKp", "the passage of shop-user", "a pass for mail", "", "Größe und Maß"]
)
def test_other_words_stay(words: str) -> None:
    assert secrets("pass!", "ok", "mai", names=("shop-user",)).without(words) == words


@given(st.text(min_size=4), st.text(max_size=3), st.text(max_size=3))
@settings(max_examples=50)
def test_no_base64_form_survives(secret: str, before: str, after: str) -> None:
    encoded = b64(f"{before}{secret}{after}") if (f"{before}{secret}{after}").isascii() else b64(secret)
    safe = secrets(secret).without(f"x {encoded} y")

    assert encoded not in safe


def test_a_source_replaces_its_earlier_secrets_and_keeps_those_of_other_sources() -> None:
    found = secrets("first-token")
    found.register("other", ["a-password"])
    found.register("test", ["second-token"])

    assert found.without("first-token second-token a-password") == "first-token <credential> <credential>"


@pytest.mark.parametrize(
    ("provider", "environ", "expected"),
    [
        ("smtp", {"DISPATCHER_SMTP_URL": "smtp://u:p%20w@mx"}, "p w"),
        ("smtp", {"DISPATCHER_SMTP_BOUNCE_KEYS": "k" * 32 + "," + "l" * 32}, "l" * 32),
        ("sendgrid", {"SENDGRID_API_KEY": "SG.a.b"}, "SG.a.b"),
        ("resend", {"RESEND_API_KEY": "re_abc"}, "re_abc"),
        ("twilio", {"DISPATCHER_TWILIO_AUTH_TOKEN": "0" * 32}, "0" * 32),
    ],
)
def test_the_secrets_of_a_provider_are_those_that_its_settings_declare(
    provider: str, environ: dict[str, str], expected: str
) -> None:
    found, _ = secrets_in(load(environ).own[provider])

    assert expected in found


@pytest.mark.parametrize("character", list(" +%&!'"))
def test_a_secret_of_many_equal_signs_takes_little_cpu(character: str) -> None:
    known = secrets(f"{character * 60}x")

    assert takes_cpu(lambda: known.without(f"x{character * 4000}"), at_most=0.3)


EMAIL = OutgoingEmail(
    email_id=UUID(int=1),
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
    sender="Shop <shop@example.com>",
    to=('"Lee, Annabel" <ann.lee@example.org>', "kim+news@example.org", '"eva w."@example.org'),
    bcc=("zoë@example.org",),
    subject="Your results of Tuesday",
    text="Dear Annabel,\nthe code is 48213 and it is\nvalid for ten minutes. Mail us.",
    html="<p>Your <b>balance is overdrawn</b> again</p>",
    headers={"X-Case": "divorce"},
    attachments=(OutgoingAttachment("x-ray of the left foot.png", "image/png", b"."),),
    template_data={"who": {"iban": "DE02120300000000202051"}},
)


@pytest.mark.parametrize(
    ("words", "safe"),
    [
        ("no such user ann.lee here", "no such user <private> here"),
        ("ANN.LEE: mailbox full", "<private>: mailbox full"),
        ("ann.lee=example.org does not exist", "<private>=example.org does not exist"),
        ("zoë is unknown", "<private> is unknown"),
        ("kim+news is unknown", "<private> is unknown"),
        ("mailbox kim is full", "mailbox <private> is full"),
        ("no mailbox eva w. here", "no mailbox <private> here"),
        ("Annabel has moved", "<private> has moved"),
        ("subject 'Your Results of  Tuesday' looks like spam", "subject '<private>' looks like spam"),
        ('"results of tuesday" is blocked', '"<private>" is blocked'),
        ("the code is 48213 and it is valid", "<private>"),
        ("48213 is in a blocked message", "<private> is in a blocked message"),
        ("balance is overdrawn: refused", "<private>: refused"),
        ("divorce mail is not wanted", "<private> mail is not wanted"),
        ("x-ray of the left foot.png has a virus", "<private> has a virus"),
        ("DE02120300000000202051 is an account", "<private> is an account"),
        ("a subject that was cut: Your resul…", "a subject that was cut: Your …"),
        ("550 5.7.1 Mail is not accepted, it is spam", "550 5.7.1 Mail is not accepted, it is spam"),
        ("5.2.2 mailbox of example.org is full", "5.2.2 mailbox of example.org is full"),
    ],
)
def test_text_that_repeats_the_email_is_removed(words: str, safe: str) -> None:
    assert words_without_echo(words, EMAIL) == safe


@pytest.mark.parametrize(
    ("outcome", "safe"),
    [
        (Accepted("4Xk2", "250 2.0.0 Ok: queued as 4Xk2"), Accepted("4Xk2", "250 2.0.0 Ok: queued as 4Xk2")),
        (Accepted(None, "250 kim may read it"), Accepted(None, "250 <private> may read it")),
        (Rejected(Reason.REFUSED, "ann.lee is gone", "550"), Rejected(Reason.REFUSED, "<private> is gone", "550")),
    ],
)
def test_only_the_words_of_an_outcome_are_changed(outcome: Accepted | Rejected, safe: Accepted | Rejected) -> None:
    assert without_echo(outcome, EMAIL) == safe


def test_our_list_of_refused_recipients_stays_even_if_a_name_matches_it() -> None:
    email = replace(EMAIL, to=("recipients@example.org", "refused@example.org"), subject="Refused")
    detail = "refused recipients: 2 (550 5.1.1); 250 ok, but refused is gone"

    cleaned = without_echo(Accepted(None, detail), email)

    assert cleaned == Accepted(None, "refused recipients: 2 (550 5.1.1); 250 ok, but <private> is gone")

"""Our own secrets are removed from a text in each form in which a server may repeat them. Other text stays."""

from __future__ import annotations

import base64
import html
import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.config import load
from dispatcher.config.setting import secrets_in
from dispatcher.domain.scrub import Secrets
from tests.cpu import takes_cpu

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
    "words",
    ["2.0.0 Ok: queued as 4Gxq2N1lYRz9sKp", "the passage of shop-user", "a pass for mail", "", "Größe und Maß"],
)
def test_other_words_stay(words: str) -> None:
    assert secrets("pass!", "ok", "mai", names=("shop-user",)).without(words) == words


@given(st.text(min_size=4), st.text(max_size=3), st.text(max_size=3))
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

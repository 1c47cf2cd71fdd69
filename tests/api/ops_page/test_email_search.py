"""What a visitor types into the search of the page Emails, and how it is understood."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dispatcher.api.ops_page.email_search import By, guess, instant_or_age, read_form

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("ann@example.org", (By.RECIPIENT, By.KEY, By.CORRELATION)),
        ("Ann Lee <Ann@Example.ORG>", (By.RECIPIENT, By.KEY, By.CORRELATION)),
        ("example.org", (By.KEY, By.DOMAIN, By.CORRELATION)),
        ("bücher.example", (By.KEY, By.DOMAIN, By.CORRELATION)),
        ("@example.org", (By.DOMAIN,)),
        ("order-17-receipt", (By.KEY, By.CORRELATION)),
        ("127.0.0.1", (By.KEY, By.CORRELATION)),
        ("0199c0de-0000-7000-8000-000000000000", (By.ID, By.KEY, By.CORRELATION)),
        ("<script>alert(1)</script>", (By.KEY, By.CORRELATION)),
        ("order/17@", (By.KEY, By.CORRELATION)),
    ],
)
def test_a_text_is_an_address_a_domain_an_id_a_key_or_a_correlation_id(text: str, kinds: tuple[By, ...]) -> None:
    assert guess(text) == kinds


def test_times_are_ages_or_instants_from_1970_on() -> None:
    assert instant_or_age("24h", NOW) == NOW - timedelta(days=1)
    assert instant_or_age("999999w", NOW) == datetime(1970, 1, 1, tzinfo=UTC)
    assert instant_or_age("2026-11-21 10:00", NOW) == datetime(2026, 11, 21, 10, tzinfo=UTC)
    assert instant_or_age("1066-10-14T09:00:00+00:00", NOW).year == 1970
    for wrong in ("soon", "\u0661h", "1y", "9999-99-99", "-1h"):
        with pytest.raises(ValueError, match="must be an age"):
            instant_or_age(wrong, NOW)


def test_each_field_that_is_wrong_gets_its_own_explanation() -> None:
    given = {
        "q": "nul\0byte",
        "status": "lost",
        "provider": "\x1b[31m",
        "error_type": "x",
        "sender": "not an address",
        "lane": "A lane",
        "tenant_id": "a b",
        "since": "soon",
        "until": "x" * 5000,
        "cursor": "first",
        "by": "smell",
        "unknown": "is ignored",
    }

    form = read_form(given, tenant_id=None, now=NOW)

    assert set(form.errors) == set(given) - {"unknown"}
    assert "longer than 998" in form.errors["until"]


@pytest.mark.parametrize(
    ("by", "text", "words"),
    [("id", "order-17", "email id"), ("recipient", "ann", "whole address"), ("domain", "localhost", "not a domain")],
)
def test_a_chosen_kind_must_fit_the_text(by: str, text: str, words: str) -> None:
    assert words in read_form({"q": text, "by": by}, tenant_id=None, now=NOW).errors["q"]


def test_the_end_must_be_later_than_the_start() -> None:
    assert "until" in read_form({"since": "1h", "until": "2h"}, tenant_id=None, now=NOW).errors


def test_a_tenants_visitor_cannot_choose_another_tenant() -> None:
    form = read_form({"tenant_id": "bank", "q": "a@example.org"}, tenant_id="shop", now=NOW)

    assert form.wanted(By.RECIPIENT).tenant_id == "shop"
    assert "tenant_id" not in form.parameters

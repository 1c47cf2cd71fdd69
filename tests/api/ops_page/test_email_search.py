"""What a visitor types into the search of the page Emails, and how it is understood."""

from __future__ import annotations

import pytest

from dispatcher.api.ops_page.email_search import By, guess, read_form


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


def test_each_field_that_is_wrong_gets_its_own_explanation() -> None:
    given = {
        "q": "nul\0byte",
        "status": "lost",
        "provider": "\x1b[31m",
        "error_type": "x",
        "sender": "not an address",
        "lane": "\x07",
        "tenant_id": "a b",
        "created_from": "soon",
        "created_before": "x" * 5000,
        "after": "first",
        "by": "smell",
        "unknown": "is ignored",
    }

    form = read_form(given, tenant_id=None)

    assert set(form.errors) == set(given) - {"unknown"}


@pytest.mark.parametrize(
    ("by", "text", "words"),
    [("id", "order-17", "email id"), ("recipient", "ann", "whole address"), ("domain", "localhost", "not a domain")],
)
def test_a_chosen_kind_must_fit_the_text(by: str, text: str, words: str) -> None:
    assert words in read_form({"q": text, "by": by}, tenant_id=None).errors["q"]


def test_the_end_must_be_later_than_the_start() -> None:
    assert "created_before" in read_form({"created_from": "1h", "created_before": "2h"}, tenant_id=None).errors


def test_a_tenants_visitor_cannot_choose_another_tenant() -> None:
    form = read_form({"tenant_id": "bank", "q": "a@example.org"}, tenant_id="shop")

    assert form.wanted(By.RECIPIENT).tenant_id == "shop"
    assert "tenant_id" not in form.parameters

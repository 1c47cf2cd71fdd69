"""Signing in to the operators' page with an API key."""

from __future__ import annotations

from tests.api.ops_page.browsing import Browser


async def test_a_visitor_signs_in_with_a_key_and_gets_to_the_page_that_was_asked_for(
    browser: Browser, operator_key: str
) -> None:
    asked = await browser.get("/ops/emails?status=held")
    form = await browser.follow()
    signed_in = await browser.submit("/sign-in", key=operator_key)
    page = await browser.follow()

    assert (asked.status, asked.headers["location"]) == (303, "/ops/sign-in?next=%2Femails%3Fstatus%3Dheld")
    assert form.status == 200
    assert (signed_in.status, signed_in.headers["location"]) == (303, "/ops/emails?status=held")
    assert page.status == 200
    assert b"<h1>Emails</h1>" in page.body

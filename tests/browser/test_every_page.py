"""What holds for every page: no barriers in light and dark, no sideways scrolling, and hostile text is text."""

from __future__ import annotations

import pytest
from playwright.sync_api import Dialog, Request, expect

from tests.browser.dataset import HOSTILE, Ids, fill
from tests.browser.pages import PAGES
from tests.browser.stage import Stage
from tests.browser.tab import NARROW, Tab, Tabs

pytestmark = pytest.mark.slow  # test_operating.py visits every page once; see there


@pytest.fixture(scope="module")
def ids(stage: Stage) -> Ids:
    return fill(stage)


BLOCKED = r"evil\.example|Blocked script|sandbox"
"""What the browser reports about the HTML of the hostile captured email."""


@pytest.mark.parametrize("path", PAGES)
def test_the_page_has_no_barriers_and_never_scrolls_sideways(path: str, tab: Tab, ids: Ids) -> None:
    if "{captured_hostile}" in path:
        tab.expect(BLOCKED)
    tab.go(path.format(**ids))

    barriers = tab.barriers()
    tab.show("dark")
    dark = tab.barriers("color-contrast")
    tab.show("light", NARROW)

    assert barriers == []
    assert dark == []
    assert tab.overflowing() == []
    assert tab.page.locator("h1").count() == 1
    assert tab.page.locator("main").count() == 1


def test_the_sign_in_page_has_no_barriers_and_never_scrolls_sideways(tabs: Tabs) -> None:
    tab = tabs.open()
    tab.go("/sign-in")

    barriers = tab.barriers()
    tab.show("dark", NARROW)

    assert barriers == []
    assert tab.barriers("color-contrast") == []
    assert tab.overflowing() == []


def test_hostile_texts_of_a_provider_and_of_an_email_are_shown_as_text(tab: Tab, ids: Ids) -> None:
    dialogs: list[str] = []
    tab.expect(BLOCKED)

    def on_dialog(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    tab.page.on("dialog", on_dialog)

    for path in ("/emails/{hostile}", "/emails?status=failed", "/captured", "/captured/{captured_hostile}"):
        tab.go(path.format(**ids))
        assert tab.page.locator("main :is(script, svg[onload], [onerror], [onfocus])").count() == 0
        assert tab.page.evaluate("document.body.innerText.length") < 100_000
    tab.go(f"/emails/{ids['hostile']}")

    assert "<script>alert(1)</script>" in tab.page.locator("main").inner_text()
    assert "\u202e" not in tab.page.locator("#story").inner_text()
    assert HOSTILE[:20] in tab.page.locator("#story").inner_text()
    assert dialogs == []


def test_the_html_of_a_captured_email_runs_nothing_and_loads_nothing(tab: Tab, ids: Ids) -> None:
    reached: list[str] = []

    def check(request: Request) -> None:
        if not request.url.startswith((tab.url.removesuffix("/ops"), "data:")) and request.failure != "csp":
            reached.append(request.url)

    tab.page.on("requestfinished", check)
    tab.page.on("requestfailed", check)

    tab.expect(BLOCKED)
    tab.go(f"/captured/{ids['captured_hostile']}")
    frame = tab.page.frame_locator("iframe")
    expect(frame.locator("#shown")).to_have_text("shown")
    frame.get_by_role("button", name="Win").click()
    tab.page.wait_for_load_state("networkidle")

    assert reached == []
    assert tab.page.url.endswith(ids["captured_hostile"])


def test_a_captured_email_shows_its_image_its_text_and_its_attachment(tab: Tab, ids: Ids) -> None:
    tab.go("/captured")
    tab.page.get_by_role("link", name="Your receipt for order 17").click()

    image = tab.page.frame_locator("iframe").locator("img")
    expect(image).to_be_visible()
    assert image.evaluate("image => image.naturalWidth") == 1
    with tab.page.expect_download() as download:
        tab.page.get_by_role("link", name="receipt-17.pdf").click()
    assert download.value.suggested_filename == "receipt-17.pdf"
    tab.page.get_by_role("link", name="Text", exact=True).click()
    expect(tab.page.locator("pre")).to_contain_text("We have received your payment")


def test_a_refresh_keeps_focus_scroll_selection_and_typed_text(tab: Tab, ids: Ids) -> None:
    page = tab.go("/")
    tab.show(width=800)
    page.locator("#sent-minutes summary, figure.chart summary").first.click()
    page.get_by_role("searchbox", name="Find an email").fill("order-10")
    page.evaluate("scrollTo(0, 300)")
    page.evaluate("document.getElementById('find').setSelectionRange(2, 5)")
    look = """() => [scrollY, document.activeElement.id, document.getElementById('find').value,
        document.getElementById('find').selectionStart, document.querySelectorAll('details[open]').length]"""
    before = page.evaluate(look)

    tab.refresh()
    tab.refresh()

    assert page.evaluate(look) == before
    assert before[1:] == ["find", "order-10", 2, 1]


def test_back_leads_to_the_search_that_was_left(tab: Tab, ids: Ids) -> None:
    page = tab.go("/emails?status=failed")
    first = page.locator("table.emails tbody a").first.inner_text()
    page.locator("table.emails tbody a").first.click()
    expect(page.locator("h1")).to_contain_text(first)

    page.go_back()

    assert page.url.endswith("/emails?status=failed")
    expect(page.locator("table.emails tbody a").first).to_have_text(first)


def test_pages_are_readable_without_scripts(tabs: Tabs, signed_in: object, ids: Ids) -> None:
    tab = tabs.open(signed_in, java_script_enabled=False)

    tab.go("/")
    expect(tab.page.locator("#dead-letters dd").first).not_to_have_text("0")
    tab.go("/emails?status=held")
    tab.page.locator("table.emails tbody a").first.click()

    expect(tab.page.locator(".badge.held").first).to_be_visible()

"""Operators at work in a real browser: every page, with realistic and hostile data."""

from __future__ import annotations

import pytest
from playwright.sync_api import Dialog, Request, expect

from tests.api.ops_page.rows import dead_email
from tests.api.running_api import make_key
from tests.browser.dataset import HOSTILE, Ids, fill
from tests.browser.stage import Stage
from tests.browser.tab import NARROW, Tab, Tabs

BLOCKED = r"evil\.example|Blocked script|sandbox"
"""What the browser reports about the HTML of the captured emails."""


PAGES = (
    *("/", "/suppressions", "/events", "/webhooks", "/lanes", "/tenants", "/pauses", "/senders", "/keys", "/audit"),
    *("/emails", "/emails?status=failed", "/emails?status=failed&since=1h&limit=25", "/emails/{hostile}"),
    *("/emails/{failed}", "/emails/{failed}/replay", "/emails/{held}", "/emails/{held}/confirm"),
    *("/emails/{sent}", "/emails/{sent}/reveal", "/dead-letters", "/dead-letters?status=failed&unknown=1"),
    *("/held", "/held/release", "/dlq/discard?status=failed", "/reschedule?status=pending", "/replays", "/replays/new"),
    *(
        "/stats?per=tenant",
        "/poison",
        "/audit?since=7d",
        "/captured",
        "/captured/{captured}",
        "/captured/{captured}?view=source",
    ),
    *("/captured/{captured_hostile}?view=html", "/captured/{captured_hostile}?view=checks"),
)
"""Every page, as a path below the operators' page. A name in braces is a key of the ids of `tests.browser.dataset`."""


def test_a_dead_letter_turns_red_by_itself_and_a_replay_by_keyboard_turns_it_green(stage: Stage, tab: Tab) -> None:
    page = tab.go("/")
    expect(page.locator("#dead-letters.good")).to_contain_text("0")
    email_id = dead_email(stage.books)
    expect(page.locator("#dead-letters.bad")).to_contain_text("1")

    tab.go(f"/emails/{email_id}")
    tab.press_until("Tab", "a[href$='/replay']")
    page.keyboard.press("Enter")
    page.wait_for_url("**/replay")
    tab.press_until("Tab", "#reason")
    page.keyboard.type("by keyboard")
    tab.press_until("Tab", "button[type=submit].primary, button[type=submit].danger")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    page.keyboard.press("Enter")

    expect(page.get_by_role("status").filter(has_text="will be sent again")).to_be_visible()
    assert (stage.books.status(email_id), outline != "none") == ("pending", True)
    tab.go("/")
    expect(page.locator("#dead-letters.good")).to_contain_text("0")


def test_a_session_that_ends_in_the_middle_of_a_form_loses_nothing(stage: Stage, tabs: Tabs) -> None:
    email_id, reason = dead_email(stage.books), 'a long & careful "reason" that nobody wants to type again'
    key = make_key(stage.books.connection, scopes=["operate"], tenant_id=None, name="carol")
    tab = tabs.open()
    tab.sign_in(key)
    page = tab.go(f"/emails/{email_id}/replay")
    page.get_by_label("Reason").fill(reason)
    stage.books.connection.execute("delete from ops_session where key_id = %s", [key.split("_")[1]])

    tab.expect("401")
    page.get_by_role("button", name="Replay").click()
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_label("Reason")).to_have_value(reason)
    assert stage.books.status(email_id) == "failed"
    page.get_by_role("button", name="Send it now").click()

    expect(page.get_by_role("status").filter(has_text="will be sent again")).to_be_visible()
    assert stage.books.status(email_id) == "pending"


def test_the_page_of_a_replay_shows_its_progress_by_itself(stage: Stage, tab: Tab) -> None:
    failed = [dead_email(stage.books, error_type="invalid_content") for _ in range(3)]
    page = tab.go("/replays/new?error_type=invalid_content")
    page.get_by_label("Reason").fill("mended")
    page.get_by_role("button", name="Replay", exact=True).click()

    expect(page.get_by_label("Progress of the replay")).to_have_attribute("value", "3")
    assert {stage.books.status(each) for each in failed} == {"pending"}


@pytest.fixture(scope="module")
def ids(stage: Stage) -> Ids:
    return fill(stage)


def test_no_page_has_barriers_in_light_or_dark_or_scrolls_sideways_when_narrow(tab: Tab, tabs: Tabs, ids: Ids) -> None:
    tab.expect(BLOCKED)
    found: dict[str, list[str]] = {}
    for each, path in ((tabs.open(), "/sign-in"), *((tab, path) for path in PAGES)):
        each.show("light")
        each.go(path.format(**ids))
        found[path] = each.barriers()
        each.show("dark", NARROW)
        found[path] += [*each.barriers("color-contrast"), *each.overflowing()]
        assert each.page.locator("h1").count() == each.page.locator("main").count() == 1

    assert {path: problems for path, problems in found.items() if problems} == {}


def test_hostile_texts_are_shown_as_text_and_hostile_html_runs_nothing_and_loads_nothing(tab: Tab, ids: Ids) -> None:
    page, dialogs, reached = tab.page, list[str](), list[str]()
    tab.expect(BLOCKED)

    def on_dialog(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    def check(request: Request) -> None:
        if not request.url.startswith((tab.url.removesuffix("/ops"), "data:")) and request.failure != "csp":
            reached.append(request.url)

    page.on("dialog", on_dialog)
    page.on("requestfinished", check)
    page.on("requestfailed", check)
    for path in ("/emails?status=held", "/captured", "/emails/{hostile}", "/captured/{captured_hostile}"):
        tab.go(path.format(**ids))
        assert page.locator("main :is(script, svg[onload], [onerror], [onfocus])").count() == 0
        assert page.evaluate("document.body.innerText.length") < 100_000
        if "{hostile}" in path:
            story = page.locator("#story").inner_text()
            assert HOSTILE[:20] in story
            assert "\u202e" not in story
    frame = page.frame_locator("iframe")
    expect(frame.locator("#shown")).to_have_text("shown")
    frame.get_by_role("button", name="Win").click()
    page.wait_for_load_state("networkidle")

    assert (dialogs, reached) == ([], [])
    assert page.url.endswith(ids["captured_hostile"])


def test_a_refresh_keeps_focus_scroll_selection_and_typed_text(tab: Tab, ids: Ids) -> None:
    page = tab.go("/")
    tab.show(width=800)
    for shown in (
        ".paused-band",
        "#dead-letters.bad",
        "#held.bad",
    ):  # the first reading may be too old
        expect(page.locator(shown)).to_be_visible()
    page.locator("figure.chart summary").first.click()
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


def test_shortcuts_lead_to_lists_through_their_rows_and_to_the_search(tab: Tab, ids: Ids) -> None:
    page = tab.go("/")
    page.keyboard.type("ge")
    page.wait_for_url("**/emails")
    for key in "jjk":
        page.keyboard.press(key)
    row = page.locator("tbody tr", has=page.locator("a.key:focus"))
    assert row.evaluate("(row) => row.rowIndex") == 1
    page.keyboard.press("Enter")
    page.wait_for_url("**/emails/*")
    page.keyboard.type("/jo")
    assert page.evaluate("document.activeElement.id + document.activeElement.value") == "findjo"
    page.locator("h1").click()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Shortcuts")).to_be_visible()
    assert tab.barriers() == []
    page.keyboard.press("Escape")
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.id") == "find"
    page.locator("h1").click()
    page.keyboard.type("gd")
    page.wait_for_url("**/dead-letters?status=failed")


def test_times_are_in_the_browsers_zone_or_in_utc_as_the_visitor_chooses(tab: Tab, ids: Ids) -> None:
    page = tab.go("/emails/{failed}".format(**ids))
    first, zone = page.locator(".timeline time").first, page.locator("#zone")
    own = first.inner_text()
    expect(zone).to_have_text("Europe/Berlin")
    page.get_by_role("button", name="Use UTC").click()
    expect(zone).to_have_text("UTC")
    assert first.inner_text() != own
    tab.go("/emails")
    expect(zone).to_have_text("UTC")
    page.get_by_role("button", name="Use Europe/Berlin").click()
    expect(zone).to_have_text("Europe/Berlin")

"""Operators at work: a running dispatcher, a provider that refuses and accepts, and a browser.

One dispatcher, one API and one browser serve all these tests. `./run test -m slow tests/browser` runs more of them.
"""

from __future__ import annotations

from uuid import UUID

import pytest
from playwright.sync_api import Dialog, expect

from dispatcher import Email
from tests.acceptance.harness import Sink, emails
from tests.browser.dataset import HOSTILE, LONG, Ids, capture, capture_hostile
from tests.browser.pages import PAGES
from tests.browser.stage import Stage
from tests.browser.tab import NARROW, Tab, Tabs
from tests.supervisor.program import eventually


@pytest.fixture(scope="module")
def sink(stage: Stage) -> Sink:
    """A running dispatcher; the SMTP server to which it sends."""
    run = stage.host.run(WORKERS=1, RECONCILE_SECONDS=1)
    run.pid_of("worker 0")
    assert isinstance(stage.host.recipient, Sink)
    return stage.host.recipient


def fail(stage: Stage, sink: Sink, name: str, count: int = 1) -> list[UUID]:
    """Enqueues emails that the provider refuses. Afterwards, it accepts emails."""
    sink.behave(script={"end": "554 5.6.0 Refused by policy"})
    ids = stage.host.enqueue(emails(count, name=name))
    stage.host.await_finished(ids)
    sink.behave(script={})
    return sorted(ids)


def hold(stage: Stage, sink: Sink, name: str) -> UUID:
    """Enqueues an email whose outcome is unknown."""
    sink.behave(script={"answer": "close"})
    (email_id,) = stage.host.enqueue(emails(1, name=name))
    stage.host.await_finished([email_id])
    sink.behave(script={})
    return email_id


def status(stage: Stage, email_id: UUID) -> str:
    return stage.host.rows()[email_id].status


def test_three_dead_letters_turn_red_by_themselves_and_a_replay_turns_them_green(
    stage: Stage, sink: Sink, tab: Tab
) -> None:
    page = tab.go("/")
    expect(page.locator("#dead-letters.good")).to_contain_text("0")

    ids = fail(stage, sink, "red", 3)
    expect(page.locator("#dead-letters.bad")).to_contain_text("3")
    for email_id in ids:
        tab.go(f"/emails/{email_id}/replay")
        page.get_by_label("Reason").fill("the provider's policy was changed")
        page.get_by_role("button", name="Replay").click()
        expect(page.get_by_role("status").filter(has_text="will be sent again")).to_be_visible()
    tab.go("/")

    expect(page.locator("#dead-letters.good")).to_contain_text("0")
    eventually(lambda: {status(stage, each) for each in ids} == {"sent"}, "the emails")


def test_a_replay_by_keyboard_alone(stage: Stage, sink: Sink, tab: Tab) -> None:
    (email_id,) = fail(stage, sink, "keyboard")
    page = tab.go(f"/emails/{email_id}")

    tab.press_until("Tab", "a[href$='/replay']")
    page.keyboard.press("Enter")
    page.wait_for_url("**/replay")
    tab.press_until("Tab", "#reason")
    page.keyboard.type("by keyboard")
    tab.press_until("Tab", "button[type=submit].primary, button[type=submit].danger")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    page.keyboard.press("Enter")

    expect(page.get_by_role("status").filter(has_text="will be sent again")).to_be_visible()
    eventually(lambda: status(stage, email_id) == "sent", "the email")
    assert outline != "none"


def test_a_held_email_is_confirmed(stage: Stage, sink: Sink, tab: Tab) -> None:
    email_id = hold(stage, sink, "held")
    page = tab.go("/")
    expect(page.locator("#held.bad")).to_contain_text("1")

    tab.go(f"/emails/{email_id}")
    page.get_by_role("link", name="Confirm").click()
    page.get_by_label("Reason").fill("Ann has it")
    page.get_by_role("button", name="Confirm").click()

    expect(page.locator(".badge.sent").first).to_be_visible()
    expect(page.locator(".timeline")).to_contain_text("Ann has it")
    assert status(stage, email_id) == "sent"


def test_a_session_that_ends_in_the_middle_of_a_form_loses_nothing(stage: Stage, sink: Sink, tabs: Tabs) -> None:
    (email_id,) = fail(stage, sink, "expiry")
    key = stage.key(scopes=["operate"], tenant_id=None, name="carol")
    tab = tabs.open()
    tab.sign_in(key)
    page = tab.go(f"/emails/{email_id}/replay")
    page.get_by_label("Reason").fill('a long & careful "reason" that nobody wants to type again')
    stage.execute("delete from ops_session where key_id = %s", key.split("_")[1])

    tab.expect("401")
    page.get_by_role("button", name="Replay").click()
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_label("Reason")).to_have_value('a long & careful "reason" that nobody wants to type again')
    assert status(stage, email_id) == "failed"
    page.get_by_role("button", name="Send it now").click()

    expect(page.get_by_role("status").filter(has_text="will be sent again")).to_be_visible()
    eventually(lambda: status(stage, email_id) == "sent", "the email")


def test_two_operators_decide_about_the_same_email_and_only_one_decision_counts(
    stage: Stage, sink: Sink, tabs: Tabs, signed_in: object
) -> None:
    (email_id,) = fail(stage, sink, "both")
    ann, bob = tabs.open(signed_in), tabs.open()
    bob.sign_in(stage.key(scopes=["operate"], tenant_id=None, name="bob"))
    for each in (ann, bob):
        each.go(f"/emails/{email_id}/replay").get_by_label("Reason").fill(f"the reason of {id(each)}")

    ann.page.get_by_role("button", name="Replay").click()
    expect(ann.page.get_by_role("status").filter(has_text="will be sent again")).to_be_visible()
    bob.expect("409")
    bob.page.get_by_role("button", name="Replay").click()
    expect(bob.page.locator("main")).to_contain_text("ann")

    eventually(lambda: status(stage, email_id) == "sent", "the email")
    assert stage.host.recipient.delivered()[email_id] == 1
    ((replays,),) = stage.execute("select count(*) from email_replay_item where email_id = %s", email_id)
    assert replays == 1


def test_a_paused_provider_is_seen_on_the_overview(stage: Stage, sink: Sink, tab: Tab) -> None:
    page = tab.go("/")
    stage.execute(
        "insert into pause (scope, name, reason, actor) values ('provider', 'smtp', 'maintenance', 'ann@ops')"
    )

    expect(page.locator("#provider-smtp")).to_contain_text("paused by ann")
    stage.execute("delete from pause")
    tab.refresh()
    expect(page.locator("#provider-smtp")).to_contain_text("usable")


@pytest.fixture(scope="module")
def ids(stage: Stage, sink: Sink) -> Ids:
    """Emails for every page, among them one with hostile texts."""
    (sent,) = stage.host.enqueue(emails(1, name="accepted"))
    stage.host.await_finished([sent])
    (failed,) = fail(stage, sink, "refused")
    sink.behave(script={"end": "554 5.6.0 Refused by policy"})
    (hostile,) = stage.host.enqueue(
        [
            Email(
                message_key="hostile",
                sender="shop@example.com",
                to="ann@example.org",
                subject=HOSTILE[:900],
                text=LONG,
            )
        ]
    )
    stage.host.await_finished([hostile])
    sink.behave(script={})
    stage.execute("update email_log set last_error = %s where email_id = %s", LONG, hostile)
    stage.execute("update email_attempt set error = %s, provider_code = %s where email_id = %s", LONG, HOSTILE, hostile)
    named = {"sent": sent, "failed": failed, "hostile": hostile, "held": hold(stage, sink, "uncertain")}
    captured = {"captured": capture(stage), "captured_hostile": capture_hostile(stage)}
    return {name: str(value) for name, value in named.items()} | captured


BLOCKED = r"evil\.example|Blocked script|sandbox"
"""What the browser reports about the HTML of the hostile captured email."""


def test_hostile_texts_of_a_provider_and_of_an_email_are_shown_as_text(tab: Tab, ids: Ids) -> None:
    dialogs: list[str] = []

    def on_dialog(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.dismiss()

    tab.page.on("dialog", on_dialog)
    for path in ("/emails?status=failed", "/captured", "/emails/{hostile}"):
        tab.go(path.format(**ids))
        assert tab.page.locator("main :is(script, svg[onload], [onerror], [onfocus])").count() == 0
        assert tab.page.evaluate("document.body.innerText.length") < 100_000

    story = tab.page.locator("#story").inner_text()
    assert "<script>alert(1)</script>" in story
    assert HOSTILE[:20] in story
    assert "\u202e" not in story
    assert dialogs == []


def test_no_page_has_barriers_in_light_or_dark_or_scrolls_sideways_when_narrow(tab: Tab, ids: Ids) -> None:
    tab.expect(BLOCKED)
    found: dict[str, list[str]] = {}
    for path in PAGES:
        tab.show("light")
        tab.go(path.format(**ids))
        found[path] = tab.barriers()
        tab.show("dark", NARROW)
        found[path] += [*tab.barriers("color-contrast"), *tab.overflowing()]
        assert tab.page.locator("h1").count() == tab.page.locator("main").count() == 1

    assert {path: problems for path, problems in found.items() if problems} == {}

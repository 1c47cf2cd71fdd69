"""What operators do most often, each in a few clicks from the Overview. Typing, and Enter in a field, are no clicks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.api.ops_page.rows import dead_email
from tests.browser.dataset import Ids, fill
from tests.browser.stage import Stage
from tests.browser.tab import Tab
from tests.store.books import Books


class Operator:
    """Clicks on a page, and counts the clicks."""

    def __init__(self, page: Page, books: Books) -> None:
        self.page = page
        self.books = books
        self.clicks = 0

    def click(self, *links: str) -> None:
        for name in links:
            self.page.get_by_role("link", name=name, exact=True).first.click()
            self.clicks += 1

    def click_on(self, selector: str) -> None:
        self.page.locator(selector).first.click()
        self.clicks += 1

    def open(self, name: str) -> None:
        self.page.get_by_text(name, exact=True).first.click()
        self.clicks += 1

    def find(self, text: str) -> None:
        field = self.page.get_by_role("searchbox", name="Find an email")
        field.fill(text)
        field.press("Enter")

    def type(self, label: str, text: str, *, within: Locator | None = None, then: str = "") -> None:
        field = (within or self.page).get_by_label(label, exact=True).first
        field.fill(text)
        if then:
            field.press(then)

    def say_why(self) -> None:
        self.type("Reason", "ticket 4711", then="Enter")

    def sees(self, words: str) -> None:
        expect(self.page.locator("main")).to_contain_text(words)


def find_by_recipient(op: Operator) -> None:
    op.books.enqueue_one(to="zoe@example.org")
    op.find("zoe@example.org")
    op.click_on("a.key")
    op.sees("z•••@example.org")


def find_by_order(op: Operator) -> None:
    op.books.enqueue_one(correlation_id="order-4711")
    op.find("order-4711")
    op.click_on("a.key")
    op.sees("order-4711")


def find_by_error(op: Operator) -> None:
    dead_email(op.books, last_error="554 blocked by Spamhaus")
    op.find("spamhaus")
    op.sees("blocked by Spamhaus")


def see_why_it_waits(op: Operator) -> None:
    op.click_on("#pending a")
    op.click_on("a.key")
    expect(op.page.locator(".waits")).to_be_visible()


def retry_one(op: Operator) -> None:
    email_id = dead_email(op.books)
    op.find(f"{email_id}")
    op.click("Replay…")
    op.say_why()
    op.sees("will be sent again")
    assert op.books.status(email_id) == "pending"


def retry_a_class(op: Operator) -> None:
    failed = [dead_email(op.books, error_type="too_large", last_error="552 too big") for _ in range(3)]
    other = dead_email(op.books)
    op.click_on("#dead-letters a")
    op.click_on("table a:has-text('too_large')")
    op.click("Replay these: dry run")
    op.say_why()
    op.sees("3")
    expect(op.page.get_by_label("Progress of the replay")).to_have_attribute("value", "3")
    assert {op.books.status(each) for each in failed} == {"pending"}
    assert op.books.status(other) == "failed"


def cancel_one(op: Operator) -> None:
    email_id = op.books.enqueue_one()
    op.find(f"{email_id}")
    op.click("Cancel…")
    op.say_why()
    op.sees("cancelled")
    assert op.books.status(email_id) == "cancelled"


def cancel_many(op: Operator) -> None:
    op.click_on("#pending a")
    op.click("Cancel these: dry run")
    op.say_why()
    op.sees("cancelled")
    assert op.books.select("select from email_log where status = 'pending'") == []


def pause_a_provider(op: Operator) -> None:
    op.click("Settings")
    form = op.page.locator("form", has=op.page.get_by_role("button", name="Pause the provider"))
    op.type("Provider", "smtp", within=form)
    form.get_by_label("Reason").fill("ticket 4711")
    form.get_by_label("Reason").press("Enter")
    expect(op.page.locator("#paused-band")).to_contain_text("provider smtp")


def see_figures_of_now(op: Operator) -> None:
    for name in ("sent-now", "delivered", "bounced", "latency", "sent-chart"):
        expect(op.page.locator(f"#{name}")).to_be_in_viewport()


def see_hosts_and_depths(op: Operator) -> None:
    op.sees("Hosts and workers")
    expect(op.page.locator("#dlq-chart, #latency-chart")).to_have_count(2)


def see_what_a_tenant_sent(op: Operator) -> None:
    op.click("Settings", "Tenants", "shop")
    op.sees("shop")


def suppress(op: Operator) -> None:
    op.click("Suppressions")
    op.open("Suppress recipients…")
    form = op.page.locator("form", has=op.page.get_by_role("button", name="Suppress", exact=True))
    form.locator("textarea").fill("gone@example.org")
    form.get_by_label("Reason").fill("ticket 4711")
    form.get_by_label("Reason").press("Enter")
    op.sees("g•••@example.org")


def unsuppress(op: Operator) -> None:
    op.click("Suppressions")
    op.open("Remove…")
    op.type("Reason", "ticket 4711", within=op.page.locator("td details[open]"), then="Enter")
    expect(op.page.get_by_role("cell", name="g•••@example.org")).to_have_count(0)


def add_a_webhook(op: Operator) -> None:
    op.click("Settings", "Webhooks")
    form = op.page.locator("form", has=op.page.get_by_role("button", name="Add", exact=True))
    form.locator("[name=url]").fill("https://shop.example.com/hooks")
    form.locator("[name=tenant_id]").fill("shop")
    form.get_by_label("Reason").fill("ticket 4711")
    form.get_by_label("Reason").press("Enter")
    op.sees("whsec_")


def export(op: Operator) -> None:
    op.click("Emails")
    with op.page.expect_download() as download:
        op.page.get_by_role("link", name="CSV").click()
    op.clicks += 1
    assert download.value.suggested_filename.endswith(".csv")


def see_the_content(op: Operator) -> None:
    op.find(f"{op.books.enqueue_one(text='Thank you.')}")
    op.click("Reveal…")
    op.say_why()
    op.sees("Thank you.")


def list_bounced(op: Operator) -> None:
    op.click_on("#bounced a")
    expect(op.page).to_have_url(re.compile("delivery=bounced"))


def confirm_many(op: Operator) -> None:
    op.click_on("#held a")
    op.click("Confirm all: dry run")
    op.say_why()
    op.sees("confirmed")
    assert op.books.select("select from email_log where status = 'held'") == []


def discard_many(op: Operator) -> None:
    op.click_on("#dead-letters a")
    op.click("Discard these: dry run")
    op.say_why()
    op.sees("discarded")


def audit(op: Operator) -> None:
    op.page.keyboard.type("ga")
    op.page.wait_for_url("**/audit")
    op.sees("sign in")


TASKS: Final[dict[Callable[[Operator], None], int]] = {
    find_by_recipient: 2,
    find_by_order: 2,
    find_by_error: 3,
    see_why_it_waits: 2,
    retry_one: 3,
    retry_a_class: 4,
    cancel_one: 3,
    pause_a_provider: 4,
    see_figures_of_now: 0,
    see_hosts_and_depths: 0,
    see_what_a_tenant_sent: 3,
    suppress: 2,
    unsuppress: 3,
    add_a_webhook: 4,
    export: 2,
    see_the_content: 3,
    list_bounced: 2,
    confirm_many: 4,
    discard_many: 4,
    audit: 1,
    cancel_many: 4,
}
"""Each task, and the most clicks that it may take. The last ones change what others need."""


@pytest.fixture(scope="module")
def ids(stage: Stage) -> Ids:
    return fill(stage)


@pytest.mark.slow  # minutes in a browser; each act and page has a test of its own
@pytest.mark.parametrize("task", TASKS, ids=lambda each: each.__name__)
def test_a_task_takes_few_clicks(stage: Stage, tab: Tab, ids: Ids, task: Callable[[Operator], None]) -> None:
    page = tab.go("/")
    page.set_viewport_size({"width": 1440, "height": 900})
    operator = Operator(page, stage.books)

    task(operator)

    assert operator.clicks <= TASKS[task]

"""Incidents of docs/runbook.md, from the alert until all is calm, on the operators' page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from uuid import UUID

import pytest
from playwright.sync_api import expect

from tests.acceptance.harness import Sink, emails
from tests.browser.stage import Stage
from tests.browser.tab import Tab
from tests.cli.commandline import CommandLine
from tests.supervisor.program import eventually

WHY = "ticket 4711"
POISON = b"\x1b[2Jno message of ours"


class Day:
    """A running dispatcher, what goes wrong in it, and an operator's terminal."""

    def __init__(self, stage: Stage) -> None:
        self.host = stage.host
        assert isinstance(self.host.recipient, Sink)
        self.sink = self.host.recipient
        self.run = self.host.run(WORKERS=1, RECONCILE_SECONDS=1, MAX_ATTEMPTS=1)
        self.run.pid_of("worker 0")
        self._commands = CommandLine(self.host.folder, self.host.environment())

    def say(self, *words: str) -> None:
        result = self._commands(*words)
        assert result.code == 0, (words, result)

    def enqueue(self, name: str, count: int = 1) -> list[UUID]:
        return sorted(self.host.enqueue(emails(count, name=name, to=lambda number: f"{name}-{number}@example.org")))

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Waits until the worker has applied the change of pauses that the block makes."""
        changes = len(self.run.events("controls.changed"))
        yield
        eventually(lambda: len(self.run.events("controls.changed")) > changes, "the worker's pause")

    def finish(self, name: str, count: int = 1, **behaviour: str) -> list[UUID]:
        """Enqueues emails, to which the provider answers like this."""
        self.sink.behave(script=behaviour)
        ids = self.enqueue(name, count)
        self.host.await_finished(ids)
        self.sink.behave(script={})
        return ids

    def stop_by_suppression(self, address: str) -> list[UUID]:
        """Suppresses an address; returns the email that the dispatcher then stopped."""
        self.say("suppressions", "add", address, "--kind", "hard_bounce", "--reason", "the mailbox did not exist")
        numbers = count()

        def stopped() -> list[UUID]:
            ids = self.host.enqueue(emails(1, name=f"{address}-{next(numbers)}", to=lambda _: address))
            return [*ids] if self.host.await_finished(ids).counts == {"failed": 1} else []

        return eventually(stopped, "the suppression of the address")

    def await_dlq(self, depth: int) -> None:
        eventually(lambda: self.host.rabbit.waiting(self.host.topology.dlq) == depth, f"{depth} messages in the DLQ")

    def await_sent(self, ids: list[UUID]) -> None:
        eventually(
            lambda: {self.host.rows()[each].status for each in ids} == {"sent"},
            lambda: f"sent emails; now {[self.host.rows()[each] for each in ids]}",
        )


def press(tab: Tab, button: str) -> None:
    """Types a reason into the form with this button, and presses the button."""
    form = tab.page.locator("form").filter(has=tab.page.get_by_role("button", name=button, exact=True)).first
    form.get_by_label("Reason").fill(WHY)
    form.get_by_role("button", name=button, exact=True).click()


@pytest.mark.slow  # minutes of work on the page, beside a dispatcher
def test_a_day_on_the_page(stage: Stage, tab: Tab) -> None:
    day = Day(stage)
    refused = day.finish("policy-page", 20, end="554 5.6.0 Refused by policy")
    page = tab.go("/")
    expect(page.locator("#dead-letters.bad")).to_contain_text("20")
    page.get_by_role("navigation", name="Main").get_by_role("link", name="Failures").click()
    page.get_by_label("Error type").select_option("invalid_content")
    page.get_by_role("button", name="Filter").click()
    page.get_by_role("link", name="Replay these: dry run").click()
    expect(page.locator("#would-replay")).to_contain_text("20")
    press(tab, "Replay")
    expect(page.get_by_label("Progress of the replay")).to_have_attribute("value", "20")
    day.await_sent(refused)
    expect(tab.go("/").locator("#dead-letters.good")).to_contain_text("0")

    page.get_by_role("searchbox", name="Find an email").fill("policy-page-0@example.org")
    page.get_by_role("button", name="Find").click()
    page.get_by_role("link", name="policy-page-0").click()
    expect(page.locator(".timeline")).to_contain_text("sent")

    with day.followed():
        day.say("pause", "lane", "normal", "--reason", "the sale waits for legal")
    waiting = day.enqueue("waits-page")
    tab.go(f"/emails/{waiting[0]}")
    expect(page.locator("main")).to_contain_text("the sale waits for legal")
    page.get_by_role("link", name="See all and resume").click()
    press(tab, "Resume lane normal")
    expect(page.get_by_text("Nothing is paused.")).to_be_visible()
    day.await_sent(waiting)

    for provider, begin, end in (
        ("smtp", "Pause the provider", "Resume provider smtp"),
        ("", "Pause everything", "Resume everything"),
    ):
        tab.go("/pauses")
        if provider:
            page.get_by_label("Provider", exact=True).fill(provider)
        with day.followed():
            press(tab, begin)
            expect(page.locator(".badge.bad", has_text="paused")).to_be_visible()
        paused = day.enqueue(f"paused-{provider}-page", 5)
        assert day.host.recipient.delivered().keys().isdisjoint(paused)
        press(tab, end)
        expect(page.get_by_text("Nothing is paused.")).to_be_visible()
        day.await_sent(paused)

    arrived, lost = day.finish("held-page", 2, answer="close")
    tab.go("/")
    expect(page.locator("#held.bad")).to_contain_text("2")
    tab.go("/held")
    page.locator(f"#held-{arrived}").get_by_role("link", name="Confirm: it arrived").click()
    press(tab, "Confirm")
    tab.go("/held").locator(f"#held-{lost}").get_by_role("link", name="Release: send it again").click()
    press(tab, "Release")
    day.await_sent([arrived, lost])
    expect(tab.go("/").locator("#held.good")).to_contain_text("0")

    stopped = day.stop_by_suppression("bounced-page@example.org")
    tab.go("/suppressions")
    page.get_by_text("Look up a recipient…").click()
    page.get_by_label("Address or domain", exact=True).fill("bounced-page@example.org")
    page.get_by_role("button", name="Look up").click()
    page.get_by_role("region", name="b•••").get_by_text("Remove…").click()
    press(tab, "Remove the entry")
    page.get_by_role("link", name="replay them").click()
    page.get_by_role("link", name="Replay these: dry run").click()
    press(tab, "Replay")
    day.await_sent(stopped)

    day.host.rabbit.publish(day.host.topology.queue, POISON)
    day.await_dlq(1)
    tab.go("/poison")
    page.get_by_role("cell").get_by_role("link").click()
    expect(page.get_by_label("Body")).to_contain_text("no message of ours")
    press(tab, "Discard")
    expect(page.get_by_role("status")).to_contain_text("Discarded 1 message.")
    day.await_dlq(0)

    assert {row.status for row in day.host.rows().values()} == {"sent"}
    assert {email_id for email_id, times in day.sink.delivered().items() if times > 1} == {lost}

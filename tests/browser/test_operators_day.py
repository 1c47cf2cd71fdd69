"""Eight incidents of docs/runbook.md, from the alert until all is calm: on the operators' page, and by commands.

    ./run test -m slow tests/browser/test_operators_day.py -s

also prints how many seconds each incident took. People need longer: most of their time is reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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

pytestmark = pytest.mark.slow

WHY = "ticket 4711"
POISON = b"\x1b[2Jno message of ours"


class Day:
    """A running dispatcher, what goes wrong in it, and an operator with a browser and a terminal."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.host = stage.host
        assert isinstance(self.host.recipient, Sink)
        self.sink = self.host.recipient
        self.run = self.host.run(WORKERS=1, RECONCILE_SECONDS=1, MAX_ATTEMPTS=1)
        self.run.pid_of("worker 0")
        self.seconds: dict[str, dict[str, float]] = {}
        self.released: set[UUID] = set()
        self._commands = CommandLine(
            self.host.folder,
            {
                "DISPATCHER_DATABASE_URL": self.host.database_url,
                "DISPATCHER_AMQP_URL": self.host.servers.amqp_url,
                "DISPATCHER_EXCHANGE": self.host.topology.exchange,
                "DISPATCHER_QUEUE": self.host.topology.queue,
                "DISPATCHER_DLQ": self.host.topology.dlq,
                "DISPATCHER_RUN_DIR": str(self.host.run_dir),
                "DISPATCHER_PROVIDERS": "smtp",
                "DISPATCHER_SMTP_URL": self.sink.settings["SMTP_URL"],
            },
        )

    def say(self, *words: str) -> str:
        """Runs a command, which must succeed, and returns its output."""
        result = self._commands(*words)
        assert result.code == 0, (words, result)
        return result.stdout

    def enqueue(self, name: str, count: int = 1) -> list[UUID]:
        """Enqueues emails."""
        return sorted(self.host.enqueue(emails(count, name=name, to=lambda number: f"{name}-{number}@example.org")))

    def pause(self, *subject: str, reason: str = WHY) -> None:
        """Pauses by a command, and waits until the worker follows."""
        with self.followed():
            self.say("pause", *subject, "--reason", reason)

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

    def await_status(self, ids: list[UUID], status: str) -> None:
        """Waits until all of these emails have this status."""
        eventually(
            lambda: {self.host.rows()[each].status for each in ids} == {status},
            lambda: f"{status} emails; now {[self.host.rows()[each] for each in ids]}",
        )

    @contextmanager
    def timed(self, incident: str, way: str) -> Iterator[None]:
        """Records how many seconds an incident took."""
        began = time.monotonic()
        yield
        self.seconds.setdefault(incident, {})[way] = time.monotonic() - began


@pytest.fixture(scope="module")
def day(stage: Stage) -> Iterator[Day]:
    found = Day(stage)
    yield found
    print("\n\nseconds from the alert until all is calm\n")
    print(f"{'incident':<34}{'page':>8}{'commands':>10}")
    for incident, by_way in found.seconds.items():
        print(f"{incident:<34}{by_way.get('page', 0):>8.1f}{by_way.get('commands', 0):>10.1f}")


@pytest.fixture
def press(tab: Tab) -> Callable[[str], None]:
    """Types a reason into the form with this button, and presses the button."""

    def act(button: str) -> None:
        form = tab.page.locator("form").filter(has=tab.page.get_by_role("button", name=button, exact=True)).first
        form.get_by_label("Reason").fill(WHY)
        form.get_by_role("button", name=button, exact=True).click()

    return act


@pytest.fixture(params=["page", "commands"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_dlq_grows(day: Day, tab: Tab, press: Callable[[str], None], way: str) -> None:
    ids = day.finish(f"policy-{way}", 20, end="554 5.6.0 Refused by policy")
    with day.timed("The DLQ grows", way):
        if way == "page":
            page = tab.go("/")
            expect(page.locator("#dead-letters.bad")).to_contain_text("20")
            page.get_by_role("link", name="Dead letters").first.click()
            page.get_by_label("Error type").select_option("invalid_content")
            page.get_by_role("button", name="Filter").click()
            page.get_by_role("link", name="Replay these: dry run").click()
            expect(page.locator("#would-replay")).to_contain_text("20")
            press("Replay")
            expect(page.get_by_label("Progress of the replay")).to_have_attribute("value", "20")
        else:
            assert "invalid_content" in day.say("dlq", "list", "--by", "error_type")
            day.say("dlq", "replay", "--error-type", "invalid_content", "--reason", WHY, "--yes")
        day.await_status(ids, "sent")
        if way == "page":
            expect(tab.go("/").locator("#dead-letters.good")).to_contain_text("0")


def test_where_is_an_email(day: Day, tab: Tab, way: str) -> None:
    (email_id,) = day.finish(f"ann-{way}")
    with day.timed("Where is email X?", way):
        if way == "page":
            page = tab.go("/")
            page.get_by_role("searchbox", name="Find an email").fill(f"ann-{way}-0@example.org")
            page.get_by_role("button", name="Find").click()
            page.get_by_role("link", name=f"ann-{way}-0").click()
            expect(page.locator(".timeline")).to_contain_text("sent")
        else:
            found = day.say("find", "--to", f"ann-{way}-0@example.org")
            assert f"ann-{way}-0" in found
            assert "sent" in day.say("show", str(email_id))


def test_why_does_it_wait(day: Day, tab: Tab, press: Callable[[str], None], way: str) -> None:
    day.pause("lane", "normal", reason="the sale waits for legal")
    ids = day.enqueue(f"waits-{way}")
    with day.timed("Why does it wait?", way):
        if way == "page":
            page = tab.go(f"/emails/{ids[0]}")
            expect(page.locator("main")).to_contain_text("the sale waits for legal")
            page.get_by_role("link", name="See all and resume").click()
            press("Resume lane normal")
            expect(page.get_by_text("Nothing is paused.")).to_be_visible()
        else:
            assert "the sale waits for legal" in day.say("show", str(ids[0]))
            day.say("resume", "lane", "normal", "--reason", WHY)
        day.await_status(ids, "sent")


@pytest.mark.parametrize(
    ("incident", "subject", "button"),
    [
        ("A provider is down", "provider smtp", "Pause the provider"),
        ("Planned maintenance", "all", "Pause everything"),
    ],
)
def test_sending_is_paused_and_resumed(
    day: Day, tab: Tab, press: Callable[[str], None], way: str, incident: str, subject: str, button: str
) -> None:
    scope, _, name = subject.partition(" ")
    with day.timed(incident, way):
        page = tab.page
        if way == "page":
            tab.go("/pauses")
            if name:
                page.get_by_label("Provider", exact=True).fill(name)
            with day.followed():
                press(button)
                expect(page.locator(".badge.bad", has_text="paused")).to_be_visible()
        else:
            day.pause(*subject.split())
        ids = day.enqueue(f"{scope}-{way}", 5)
        assert day.host.recipient.delivered().keys().isdisjoint(ids)
        if way == "page":
            press("Resume everything" if scope == "all" else f"Resume {subject}")
            expect(page.get_by_text("Nothing is paused.")).to_be_visible()
        else:
            day.say("resume", *subject.split(), "--reason", WHY)
        day.await_status(ids, "sent")


def test_held_emails(day: Day, tab: Tab, press: Callable[[str], None], way: str) -> None:
    arrived, lost = day.finish(f"held-{way}", 2, answer="close")
    with day.timed("Held emails", way):
        if way == "page":
            page = tab.go("/")
            expect(page.locator("#held.bad")).to_contain_text("2")
            page.get_by_role("link", name="Held").first.click()
            page.locator(f"#held-{arrived}").get_by_role("link", name="Confirm: it arrived").click()
            press("Confirm")
            tab.go("/held").locator(f"#held-{lost}").get_by_role("link", name="Release: send it again").click()
            press("Release")
        else:
            day.say("held", "list")
            day.say("held", "confirm", str(arrived), "--reason", WHY)
            day.say("held", "release", str(lost), "--reason", WHY)
        day.await_status([arrived, lost], "sent")
        day.released.add(lost)
        if way == "page":
            expect(tab.go("/").locator("#held.good")).to_contain_text("0")


def test_a_recipient_was_suppressed(day: Day, tab: Tab, press: Callable[[str], None], way: str) -> None:
    address = f"bounced-{way}@example.org"
    day.say("suppressions", "add", address, "--kind", "hard_bounce", "--reason", "the mailbox did not exist")
    numbers = count()

    def stopped() -> list[UUID]:
        ids = day.host.enqueue(emails(1, name=f"bounced-{way}-{next(numbers)}", to=lambda _: address))
        return [*ids] if day.host.await_finished(ids).counts == {"failed": 1} else []

    ids = eventually(stopped, "the suppression of the address")
    with day.timed("Bounces and complaints", way):
        if way == "page":
            page = tab.go("/suppressions")
            page.get_by_label("Address or domain", exact=True).fill(address)
            page.get_by_role("button", name="Look up").click()
            press("Remove the entry")
            page.get_by_role("link", name="replay them").click()
            page.get_by_role("link", name="Replay these: dry run").click()
            press("Replay")
        else:
            day.say("suppressions", "remove", address, "--reason", WHY, "--replay", "--yes")
        day.await_status(ids, "sent")


def test_a_poison_message(day: Day, tab: Tab, press: Callable[[str], None], way: str) -> None:
    day.host.rabbit.publish(day.host.topology.queue, POISON)
    eventually(lambda: day.host.rabbit.waiting(day.host.topology.dlq) == 1, "the poison message")
    with day.timed("A poison message", way):
        if way == "page":
            page = tab.go("/poison")
            page.get_by_role("cell").get_by_role("link").click()
            expect(page.get_by_label("Body")).to_contain_text("no message of ours")
            press("Discard")
            expect(page.get_by_role("status")).to_contain_text("Discarded 1 message.")
        else:
            listed = day.say("dlq", "list", "--poison")
            (poison_id,) = {word for word in listed.split() if word.startswith("p-")}
            day.say("dlq", "discard", poison_id, "--reason", WHY, "--yes")
        eventually(lambda: day.host.rabbit.waiting(day.host.topology.dlq) == 0, "the empty DLQ")


def test_only_released_emails_were_sent_twice_and_none_is_left(day: Day) -> None:
    assert {row.status for row in day.host.rows().values()} == {"sent"}
    assert {email_id for email_id, times in day.sink.delivered().items() if times > 1} == day.released

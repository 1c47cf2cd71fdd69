"""An operator's day: hundreds of failures of four kinds, and poison messages. The operator examines, replays, confirms
and repairs them.

After every step the depth of the DLQ agrees with the emails' statuses. In the end no recipient got an email twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from uuid import UUID

import orjson
import psycopg
import pytest

from tests.acceptance.books import Books, announced_in
from tests.acceptance.harness import Host, Sink, emails, stop
from tests.acceptance.rabbit import QueueMessage
from tests.cli.commandline import CommandLine, CommandResult
from tests.supervisor.program import Program, eventually

POISON: Final = (b"\x1b[2Jno message of ours", b'{"v": 1, "email_id": "?"}')
WHY: Final = ("--reason", "the provider has mended it")


class Day:
    """The failures that the operator finds, and the operator's commands."""

    def __init__(self, host: Host, sizes: tuple[int, int, int, int]) -> None:
        self.host = host
        self.sink: Sink = host.sink()
        self.sizes = sizes
        self.commands = CommandLine(
            host.folder,
            {
                "DISPATCHER_DATABASE_URL": host.database_url,
                "DISPATCHER_AMQP_URL": host.servers.amqp_url,
                "DISPATCHER_EXCHANGE": host.topology.exchange,
                "DISPATCHER_QUEUE": host.topology.queue,
                "DISPATCHER_DLQ": host.topology.dlq,
                "DISPATCHER_RUN_DIR": str(host.run_dir),
            },
        ).without_process
        self.failed: dict[str, set[UUID]] = {}

    def __call__(self, *words: str) -> CommandResult:
        return self.commands(*words)

    @property
    def depth(self) -> int:
        return self.host.rabbit.waiting(self.host.topology.dlq)

    def await_depth(self, depth: int) -> None:
        """Wait until the DLQ has this depth, because the relay and RabbitMQ need a moment."""
        eventually(lambda: self.depth == depth, lambda: f"a DLQ of {depth}, now {self.depth}\n")

    def go_wrong(self, run: Program) -> None:
        """Cause each kind of failure in turn."""
        blocked, unknown, full, silent = self.sizes
        self._fail("invalid_content", "--reply", "end=554 5.6.0 blocked for its content", count=blocked)
        self._fail("rejected_recipient", "--reply", "rcpt=550 5.1.1 User unknown", count=unknown)
        self._fail("recipient_deferred", "--reply", "rcpt=452 4.2.2 mailbox full", count=full)
        self._fail("outcome_unknown", "--reply", "answer=close", count=silent)
        self.host.rabbit.publish(self.host.topology.queue, *POISON)
        run.await_events("message.rejected", len(POISON))

    def _fail(self, kind: str, *options: str, count: int) -> None:
        self.sink.become(*options)
        self.failed[kind] = self.host.enqueue(emails(count, name=kind))
        self.host.await_finished(self.all)

    @property
    def all(self) -> set[UUID]:
        """Every email of the day."""
        return set().union(*self.failed.values())

    @contextmanager
    def replaying(self, *words: str) -> Iterator[Any]:
        """Runs a replay in the background during the block."""
        with self.commands.started("dlq", "replay", *words, *WHY, "--yes", "--json") as process:
            yield process

    def replay(self, replay_id: int) -> dict[str, Any]:
        """The state of a replay."""
        found = self("dlq", "replays", "--json").json["replays"]
        return next(dict(each) for each in found if each["id"] == replay_id)

    def replayed(self) -> int:
        """The number of finished replay items in the database."""
        with psycopg.connect(self.host.database_url, autocommit=True) as connection:
            row = connection.execute("select count(*) from email_replay_item where outcome = 'replayed'").fetchone()
        assert row is not None
        return int(row[0])


@pytest.mark.parametrize(
    ("sizes", "rate"),
    [
        pytest.param((300, 100, 60, 40), 20, id="500 failures"),
        pytest.param((3000, 1000, 600, 400), 50, id="5,000 failures", marks=pytest.mark.slow),
    ],
)
def test_an_operators_day(host: Host, sizes: tuple[int, int, int, int], rate: int) -> None:
    day = Day(host, sizes)
    blocked, unknown, full, silent = sizes
    # More connections could mean more consecutive timeouts. Then the dispatcher would stop using the provider.
    run = host.run(MAX_ATTEMPTS=1, SMTP_CONNECTIONS=256, DLQ_PROBE_SECONDS=0.5)
    day.go_wrong(run)
    total = sum(sizes) + len(POISON)
    day.await_depth(total)

    # Find out what happened. Reading changes nothing.
    groups = day("dlq", "list", "--by", "error_type", "--json").json["groups"]
    page = day("dlq", "list", "--text", "BLOCKED for its content", "--limit", "5", "--json").json
    history = day("dlq", "show", page["emails"][0]["email_id"], "--json").json
    poison = day("dlq", "list", "--poison", "--json").json["poison"]
    dry = day("dlq", "replay", "--error-type", "invalid_content", "--dry-run", "--json").json
    assert {group["value"]: group["emails"] for group in groups} == {k: len(ids) for k, ids in day.failed.items()}
    assert (len(page["emails"]), dry["emails"]) == (5, {"replayed": blocked})
    assert (history["attempts"][0]["provider_code"], len(history["dlq"])) == ("554 5.6.0", 1)
    assert [each["x_death"][0]["reason"] for each in poison] == ["rejected", "rejected"]
    day.await_depth(total)

    # Replay one kind at a limited rate, and stop the replay before its end.
    day.sink.become()
    with day.replaying("--error-type", "invalid_content", "--rate", str(rate)) as process:
        eventually(lambda: day.replayed() >= rate // 2, "the first half second of a replay")
        stopped = day("dlq", "stop", "1", "--reason", "the provider asked for it")
        words, _ = process.communicate(timeout=60)
    first = orjson.loads(words)
    assert (stopped.code, process.returncode, first["state"]) == (0, 3, "stopped")
    assert rate // 2 <= first["replayed"] < blocked
    assert first["replayed"] + first["waiting"] == blocked
    day.await_depth(total - first["replayed"])

    # Resume the replay, while a second operator replays the same emails.
    with ExitStack() as stack:
        resumed = stack.enter_context(day.commands.started("dlq", "replay", "--resume", "1", "--rate", "400", "--json"))
        second = stack.enter_context(day.replaying("--error-type", "invalid_content", "--rate", "400"))
        ends = [orjson.loads(process.communicate(timeout=300)[0] or b"{}") for process in (resumed, second)]
    assert ends[0]["state"] == "done"
    assert ends[0]["replayed"] + ends[1].get("replayed", 0) == blocked
    eventually(lambda: host.recipient.delivered().keys() >= day.failed["invalid_content"], "every email of that kind")
    assert all(host.recipient.delivered()[email_id] == 1 for email_id in day.failed["invalid_content"])
    total -= blocked
    day.await_depth(total)

    # Repair one poison message, so that it points to an email, and discard the other one.
    (host.folder / "repaired.json").write_bytes(
        orjson.dumps({"v": 1, "email_id": min(day.failed["invalid_content"]), "message_key": "invalid_content-0"})
    )
    assert day("dlq", "replay", poison[1]["poison_id"], "--body", "repaired.json", *WHY).code == 0
    assert day("dlq", "discard", poison[0]["poison_id"], *WHY, "--yes").code == 0
    total -= 2
    day.await_depth(total)

    # The held emails did arrive, as the provider's own list shows.
    held = [email["email_id"] for email in day("held", "list", "--limit", "1000", "--json").json["emails"]]
    assert {UUID(email_id) for email_id in held} == day.failed["outcome_unknown"]
    assert day("held", "confirm", *held, *WHY).code == 0
    total -= silent
    day.await_depth(total)

    # A dead letter that is moved to a send queue goes back to the DLQ. A replay sends its email.
    def deferred() -> QueueMessage | None:  # none while a sweep reads the DLQ
        return next(
            (each for each in host.rabbit.read_all(host.topology.dlq) if b"recipient_deferred" in each.body), None
        )

    dead_letter = eventually(deferred, "the dead letter of a full mailbox")
    host.rabbit.publish(host.topology.queue, dead_letter.body, exchange=host.topology.exchange)
    run.await_events("message.returned", 1)
    (by_hand,) = announced_in([dead_letter])
    assert day("dlq", "replay", str(by_hand), *WHY, "--yes").code == 0
    eventually(lambda: host.recipient.delivered()[by_hand] == 1, "the delivery of the moved email")
    eventually(lambda: host.rows()[by_hand].status == "sent", "the status sent in its row")
    day.await_depth(total - 1)

    # Replay the remaining emails in the queue's order. Emails to unknown recipients fail again, each with a new dead
    # letter.
    day.sink.become("--reply", "rcpt=550 5.1.1 User unknown")
    again = day("dlq", "replay", "--from-queue", "--error-type", "rejected_recipient", *WHY, "--rate", "0", "--yes")
    assert again.code == 0
    day.await_depth(total - 1)

    def balanced() -> Books | None:  # none while a sweep reads the DLQ
        books = host.books(day.all)
        return books if books.is_announced else None

    eventually(balanced, "the right dead letters on the DLQ")
    assert day("dlq", "reconcile").code == 0
    books = eventually(balanced, "the right dead letters on the DLQ")
    books.assert_balanced()
    assert books.counts == {"sent": blocked + silent + 1, "failed": unknown + full - 1}
    stop(run)

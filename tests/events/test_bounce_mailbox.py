"""The monitor stores what the messages in its Maildir report, and deletes each message after the commit."""

from __future__ import annotations

import os
import re
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from dispatcher.domain.email_id import new_email_id
from dispatcher.domain.status import Status
from dispatcher.domain.suppression import SuppressionRules
from dispatcher.errors import StoreUnavailable
from dispatcher.events.bounce_mailbox import MAX_MESSAGES, BounceMailbox
from dispatcher.events.intake import EventIntake
from dispatcher.events.maildir import ASIDE, MAX_OCTETS, Maildir
from dispatcher.store.connections import Pool, make_pool
from tests.events.corpus import ADDRESS, EMAIL_ID, OCTETS
from tests.events.requests import ANN
from tests.events.scene import Scene

UNKNOWN_USER = "postfix-user-unknown"
BOTH: dict[str, Any] = {"to": f"Ann <{ANN}>", "bcc": ["bob@example.org"]}


class Mailbox:
    """A Maildir, and the service that reads it."""

    def __init__(self, folder: Path, pool: Pool) -> None:
        for each in ("new", "cur", "tmp"):
            (folder / each).mkdir()
        self.folder, self.new = folder, folder / "new"
        self.use(pool)

    def use(self, pool: Pool, *, keeps: bool = False) -> None:
        """Makes a service that uses a pool. `keeps`: it keeps what it has stored, instead of deleting it."""
        self._service = BounceMailbox(
            Maildir(self.folder, keeps=keeps), ADDRESS, pool, EventIntake(pool, SuppressionRules())
        )

    def deliver(self, corpus_name: str, email_id: UUID, name: str = "1.bounce.host") -> Path:
        octets = OCTETS[corpus_name].replace(ADDRESS.of(EMAIL_ID).encode(), ADDRESS.of(email_id).encode())
        (self.new / name).write_bytes(octets)
        return self.new / name

    async def read(self) -> list[tuple[int, int, int, int]]:
        """Runs one round; returns the counts that it logs: stored, waiting, forged and unreadable messages."""
        with capture_logs() as logs:
            self.waits = await self._service.run_once()
        counts = ("stored", "waiting", "forged", "unreadable")
        self.unavailable = [log["reason"] for log in logs if log["event"] == "bounces.unavailable"]
        return [(*(log[each] for each in counts),) for log in logs if log["event"] == "bounces.read"]

    def files(self) -> dict[str, str]:
        found = (path for path in self.folder.rglob("*") if path.parent.name in ("new", "cur"))
        return {path.name: str(path.parent.relative_to(self.folder)) for path in found}


@pytest.fixture
def mailbox(tmp_path: Path, pool: Pool) -> Mailbox:
    return Mailbox(tmp_path, pool)


async def test_a_bounce_is_stored_settles_its_email_and_is_deleted(mailbox: Mailbox, scene: Scene) -> None:
    email_id = await scene.make(Status.HELD, "smtp")
    mailbox.deliver(UNKNOWN_USER, email_id)

    assert await mailbox.read() == [(1, 0, 0, 0)]

    assert mailbox.waits is None
    assert scene.seen("email_id, provider, kind, bounce, code") == [(email_id, "smtp", "bounced", "hard", "5.1.1")]
    assert (scene.books.status(email_id), mailbox.files()) == ("sent", {})
    assert await mailbox.read() == []


async def test_a_stored_bounce_can_be_kept_as_seen(mailbox: Mailbox, scene: Scene) -> None:
    mailbox.use(scene.pool, keeps=True)
    mailbox.deliver("qmail-no-mailbox", scene.books.enqueue_tried()[0])

    await mailbox.read()

    assert mailbox.files() == {"1.bounce.host:2,S": "cur"}


@pytest.mark.parametrize("token", ["bounces", f"bounces+{EMAIL_ID.hex}{'0' * 16}", f"bounces+{EMAIL_ID}"])
async def test_a_bounce_without_a_valid_token_changes_nothing_and_is_set_aside(
    mailbox: Mailbox, scene: Scene, token: str
) -> None:
    email_id = await scene.make(Status.HELD, "smtp")
    forged = f"{token.replace(EMAIL_ID.hex, email_id.hex)}@example.com"
    path = mailbox.deliver(UNKNOWN_USER, EMAIL_ID)
    path.write_bytes(path.read_bytes().replace(ADDRESS.of(EMAIL_ID).encode(), forged.encode()))

    assert [forged for _, _, forged, _ in await mailbox.read()] == [1]

    assert (scene.books.count("email_event"), scene.books.status(email_id)) == (0, "held")
    assert mailbox.files() == {"1.bounce.host": f"{ASIDE}/new"}


@pytest.mark.parametrize(
    ("corpus_name", "email", "has_content", "bounces"),
    [
        ("postfix-two-recipients", BOTH, True, ["hard ann", "soft bob"]),
        (UNKNOWN_USER, {"to": "bob@example.org"}, True, ["soft -"]),  # who knows the token accuses another address
        (UNKNOWN_USER, {}, False, ["soft -"]),
    ],
)
async def test_an_event_names_only_a_recipient_to_whom_the_email_was_sent(
    mailbox: Mailbox, scene: Scene, corpus_name: str, email: dict[str, Any], has_content: bool, bounces: list[str]
) -> None:
    (email_id,) = scene.books.enqueue_tried(**email)
    if not has_content:
        scene.books.connection.execute("delete from email_content")
    mailbox.deliver(corpus_name, email_id)

    await mailbox.read()

    names = {scene.hash(f"{name}@example.org"): name for name in ("ann", "bob")} | {None: "-"}
    assert [f"{bounce} {names[address]}" for bounce, address in scene.seen("bounce, address_hash")] == bounces


@pytest.mark.parametrize("corpus_name", [UNKNOWN_USER, "arf-abuse"])
async def test_messages_with_many_dates_are_one_event_per_day(mailbox: Mailbox, scene: Scene, corpus_name: str) -> None:
    (email_id,) = scene.books.enqueue_tried()
    now = time.time() // 86_400 * 86_400 + 1
    for number in range(MAX_MESSAGES + 20):
        path = mailbox.deliver(corpus_name, email_id, f"{number}.bounce.host")
        date = f"Date: {format_datetime(datetime.fromtimestamp(now - 3600 * number, UTC))}".encode()
        path.write_bytes(re.sub(rb"^Date: .*", date, path.read_bytes(), count=1, flags=re.MULTILINE))
        os.utime(path, (now, now + number % 2 * 86_400))

    await mailbox.read()
    assert (mailbox.waits, len(mailbox.files())) == (0.0, 20)  # after a full round, the next begins at once
    await mailbox.read()

    assert (mailbox.waits, mailbox.files()) == (None, {})
    assert (scene.books.count("email_event"), scene.books.count("suppression")) == (2, 1)


async def test_while_postgresql_is_unreachable_the_bounces_stay(tmp_path: Path, closed_port: int) -> None:
    pool = make_pool(f"postgresql://nobody@127.0.0.1:{closed_port}/none", name="away", size=1)
    await pool.open()
    await pool.close()
    mailbox = Mailbox(tmp_path, pool)
    mailbox.deliver(UNKNOWN_USER, new_email_id())

    with pytest.raises(StoreUnavailable):
        await mailbox.read()

    assert mailbox.files() == {"1.bounce.host": "new"}


async def test_a_locked_email_delays_only_its_own_bounces(mailbox: Mailbox, scene: Scene) -> None:
    locked, free = scene.books.enqueue_tried(2)
    mailbox.deliver(UNKNOWN_USER, locked, "1.locked.host")
    mailbox.deliver("postfix-mailbox-full", free, "2.free.host")
    pool = make_pool(scene.url, name="monitor", size=1, lock_seconds=0.2)
    await pool.open()
    mailbox.use(pool)
    with scene.books.connection.transaction():
        scene.books.lock(locked)
        await mailbox.read()
        assert mailbox.files() == {"1.locked.host": "new"}
    await mailbox.read()
    await pool.close()

    assert set(scene.seen("email_id")) == {locked, free}
    assert mailbox.files() == {}


async def test_links_pipes_and_folders_are_set_aside_unread(mailbox: Mailbox, scene: Scene) -> None:
    outside = mailbox.folder / "secret"
    outside.write_bytes(OCTETS[UNKNOWN_USER])
    (mailbox.new / "1.link.host").symlink_to(outside)
    os.mkfifo(mailbox.new / "2.pipe.host")
    (mailbox.new / "3.folder.host").mkdir()
    mailbox.deliver(UNKNOWN_USER, scene.books.enqueue_tried()[0], "4.bounce.host")

    assert await mailbox.read() == [(1, 0, 0, 3)]

    assert mailbox.files() == dict.fromkeys(("1.link.host", "2.pipe.host", "3.folder.host"), f"{ASIDE}/new")
    assert outside.exists()


@pytest.mark.parametrize("depth", [100, 3000])
async def test_a_message_of_deeply_nested_parts_is_set_aside_soon(mailbox: Mailbox, scene: Scene, depth: int) -> None:
    nested = b"".join(b"Content-Type: multipart/mixed; boundary=%d\n\n--%d\n" % (at, at) for at in range(depth))
    nested += b"\n" * MAX_OCTETS  # the parser compares each line with each boundary
    one, other = scene.books.enqueue_tried(2)
    (mailbox.new / "1.nested.host").write_bytes(b"To: " + ADDRESS.of(one).encode() + b"\n" + nested)
    mailbox.deliver(UNKNOWN_USER, other, "2.bounce.host")

    await mailbox.read()

    assert mailbox.files() == {"1.nested.host": f"{ASIDE}/new"}
    assert scene.books.count("email_event") == 1


async def test_a_missing_maildir_is_logged_once(mailbox: Mailbox) -> None:
    mailbox.new.rmdir()
    reasons = []
    for _ in range(3):
        await mailbox.read()
        reasons += mailbox.unavailable
        assert mailbox.waits == 60.0

    assert reasons == ["No such file or directory"]

"""The monitor stores what the messages in its Maildir report, and deletes each message after the commit."""

from __future__ import annotations

import os
import re
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
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
from dispatcher.store.leases import LeaseStore
from tests.events.test_bounce_corpus import ADDRESS, EMAIL_ID, octets_of
from tests.events.test_intake import make
from tests.store.books import Books, Row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty Maildir."""
    for each in ("new", "cur", "tmp"):
        (tmp_path / each).mkdir()
    return tmp_path


@pytest.fixture
def mailbox(folder: Path, pool: Pool, intake: EventIntake) -> BounceMailbox:
    """The service, which deletes what it has stored."""
    return BounceMailbox(Maildir(folder, keeps=False), ADDRESS, pool, intake)


def deliver(folder: Path, corpus_name: str, email_id: UUID, name: str = "1.bounce.host") -> Path:
    """Delivers a bounce from the corpus as the bounce of an email."""
    path = folder / "new" / name
    path.write_bytes(octets_of(corpus_name).replace(ADDRESS.of(EMAIL_ID).encode(), ADDRESS.of(email_id).encode()))
    return path


def files(folder: Path) -> dict[str, str]:
    """The messages of the Maildir: the folder of each by its name."""
    found = (path for path in folder.rglob("*") if path.parent.name in ("new", "cur"))
    return {path.name: str(path.parent.relative_to(folder)) for path in found}


def events(books: Books) -> list[Row]:
    return books.select("select * from email_event order by email_id, event_key")


async def test_a_bounce_is_stored_settles_its_email_and_is_deleted(
    mailbox: BounceMailbox, folder: Path, books: Books, store: LeaseStore
) -> None:
    email_id = await make(books, store, Status.HELD, provider="smtp")
    deliver(folder, "postfix-user-unknown", email_id)

    with capture_logs() as logs:
        assert await mailbox.run_once() is None

    (event,) = events(books)
    assert (event["email_id"], event["provider"]) == (email_id, "smtp")
    assert (event["kind"], event["bounce"], event["code"]) == ("bounced", "hard", "5.1.1")
    assert books.status(email_id) == "sent"
    assert files(folder) == {}
    read = [log for log in logs if log["event"] == "bounces.read"]
    assert [(log["stored"], log["waiting"], log["forged"], log["unreadable"]) for log in read] == [(1, 0, 0, 0)]


async def test_a_stored_bounce_can_be_kept_as_seen(folder: Path, pool: Pool, intake: EventIntake, books: Books) -> None:
    deliver(folder, "qmail-no-mailbox", books.enqueue_tried()[0], "1.bounce.host")

    await BounceMailbox(Maildir(folder, keeps=True), ADDRESS, pool, intake).run_once()

    assert files(folder) == {"1.bounce.host:2,S": "cur"}


@pytest.mark.parametrize("token", ["bounces", f"bounces+{EMAIL_ID.hex}{'0' * 16}", f"bounces+{EMAIL_ID}"])
async def test_a_bounce_without_a_valid_token_changes_nothing_and_is_set_aside(
    mailbox: BounceMailbox, folder: Path, books: Books, store: LeaseStore, token: str
) -> None:
    email_id = await make(books, store, Status.HELD, provider="smtp")
    forged = token.replace(EMAIL_ID.hex, email_id.hex)
    path = folder / "new" / "1.forged.host"
    path.write_bytes(
        octets_of("postfix-user-unknown").replace(ADDRESS.of(EMAIL_ID).encode(), f"{forged}@example.com".encode())
    )

    with capture_logs() as logs:
        await mailbox.run_once()

    assert events(books) == []
    assert books.status(email_id) == "held"
    assert files(folder) == {"1.forged.host": f"{ASIDE}/new"}
    assert [log["forged"] for log in logs if log["event"] == "bounces.read"] == [1]


async def test_a_recipient_who_knows_the_token_cannot_make_another_address_bounce(
    mailbox: BounceMailbox, folder: Path, books: Books
) -> None:
    (email_id,) = books.enqueue_tried(to="bob@example.org")
    deliver(folder, "postfix-user-unknown", email_id)  # it says that ann@example.org does not exist

    await mailbox.run_once()

    (event,) = events(books)
    assert (event["bounce"], event["address_hash"]) == ("soft", None)


async def test_without_the_content_of_the_email_no_address_is_named(
    mailbox: BounceMailbox, folder: Path, books: Books
) -> None:
    (email_id,) = books.enqueue_tried()
    books.connection.execute("delete from email_content where email_id = %s", [email_id])
    deliver(folder, "postfix-user-unknown", email_id)

    await mailbox.run_once()

    (event,) = events(books)
    assert (event["kind"], event["bounce"], event["address_hash"]) == ("bounced", "soft", None)


async def test_each_recipient_of_an_email_has_an_event_of_its_own(
    mailbox: BounceMailbox, folder: Path, books: Books
) -> None:
    (email_id,) = books.enqueue_tried(to="Ann <ann@example.org>", bcc=["bob@example.org"])
    deliver(folder, "postfix-two-recipients", email_id)

    await mailbox.run_once()

    found = events(books)
    assert sorted(each["bounce"] for each in found) == ["hard", "soft"]
    assert len({each["address_hash"] for each in found} - {None}) == 2


async def test_a_recipient_cannot_make_another_recipient_suppressed(
    mailbox: BounceMailbox, folder: Path, books: Books
) -> None:
    (email_id,) = books.enqueue_tried(to="ann@example.org", bcc=["bob@example.org"])
    for corpus_name in ("postfix-user-unknown", "postfix-two-recipients", "arf-abuse", "arf-opt-out"):
        deliver(folder, corpus_name, email_id, f"{corpus_name}.host")

    await mailbox.run_once()

    assert {each["bounce"] for each in events(books)} == {"hard", "soft", None}
    assert books.count("suppression") == 0


@pytest.mark.parametrize("corpus_name", ["postfix-user-unknown", "arf-abuse"])
async def test_messages_with_many_dates_are_one_event_per_day(
    mailbox: BounceMailbox, folder: Path, books: Books, corpus_name: str
) -> None:
    (email_id,) = books.enqueue_tried()
    now = time.time() // 86_400 * 86_400 + 1
    for number in range(2 * MAX_MESSAGES):
        path = deliver(folder, corpus_name, email_id, f"{number}.bounce.host")
        date = format_datetime(datetime.fromtimestamp(now - 3600 * number, UTC))
        path.write_bytes(
            re.sub(rb"^Date: .*", f"Date: {date}".encode(), path.read_bytes(), count=1, flags=re.MULTILINE)
        )
        os.utime(path, (now, now + number % 2 * 86_400))

    while await mailbox.run_once() == 0.0:
        pass

    assert len(events(books)) == 2
    assert books.count("suppression") == 1


async def test_a_bounce_that_is_read_again_after_a_crash_is_stored_once(
    mailbox: BounceMailbox, folder: Path, books: Books
) -> None:
    (email_id,) = books.enqueue_tried()
    path = deliver(folder, "gmail-no-such-user", email_id)
    before, octets = path.stat(), path.read_bytes()
    await mailbox.run_once()
    path.write_bytes(octets)  # as if the process had exited between the commit and the deletion
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    await mailbox.run_once()

    assert len(events(books)) == 1
    assert files(folder) == {}


async def test_while_postgresql_is_unreachable_the_bounces_stay(folder: Path, closed_port: int) -> None:
    deliver(folder, "postfix-user-unknown", new_email_id())
    pool = make_pool(f"postgresql://nobody@127.0.0.1:{closed_port}/none", name="away", size=1)
    await pool.open()
    await pool.close()

    with pytest.raises(StoreUnavailable):
        await BounceMailbox(
            Maildir(folder, keeps=False), ADDRESS, pool, EventIntake(pool, SuppressionRules())
        ).run_once()

    assert files(folder) == {"1.bounce.host": "new"}


async def test_a_locked_email_delays_only_its_own_bounces(folder: Path, books: Books, tables_url: str) -> None:
    locked, free = books.enqueue_tried(2)
    deliver(folder, "postfix-user-unknown", locked, "1.locked.host")
    deliver(folder, "postfix-mailbox-full", free, "2.free.host")
    pool = make_pool(tables_url, name="monitor", size=1, lock_seconds=0.2)
    await pool.open()
    mailbox = BounceMailbox(Maildir(folder, keeps=False), ADDRESS, pool, EventIntake(pool, SuppressionRules()))
    try:
        with books.connection.transaction():
            books.lock(locked)
            await mailbox.run_once()
            assert files(folder) == {"1.locked.host": "new"}
        await mailbox.run_once()
    finally:
        await pool.close()

    assert {each["email_id"] for each in events(books)} == {locked, free}
    assert files(folder) == {}


async def test_links_pipes_and_folders_are_set_aside_unread(
    mailbox: BounceMailbox, folder: Path, books: Books, tmp_path: Path
) -> None:
    outside = folder / "secret"
    outside.write_bytes(octets_of("postfix-user-unknown"))
    (folder / "new" / "1.link.host").symlink_to(outside)
    os.mkfifo(folder / "new" / "2.pipe.host")
    (folder / "new" / "3.folder.host").mkdir()
    deliver(folder, "postfix-user-unknown", books.enqueue_tried()[0], "4.bounce.host")

    with capture_logs() as logs:
        await mailbox.run_once()

    aside = f"{ASIDE}/new"
    assert files(folder) == dict.fromkeys(("1.link.host", "2.pipe.host", "3.folder.host"), aside)
    assert [(log["stored"], log["unreadable"]) for log in logs if log["event"] == "bounces.read"] == [(1, 3)]
    assert outside.exists()


@pytest.mark.parametrize("depth", [100, 3000])
async def test_a_message_of_deeply_nested_parts_is_set_aside_soon(
    mailbox: BounceMailbox, folder: Path, books: Books, depth: int
) -> None:
    nested = b"".join(b"Content-Type: multipart/mixed; boundary=%d\n\n--%d\n" % (at, at) for at in range(depth))
    nested += b"\n" * MAX_OCTETS  # the parser compares each line with each boundary
    token = ADDRESS.of(books.enqueue_tried()[0]).encode()
    (folder / "new" / "1.nested.host").write_bytes(b"To: " + token + b"\n" + nested)
    deliver(folder, "postfix-user-unknown", books.enqueue_tried()[0], "2.bounce.host")

    await mailbox.run_once()

    assert files(folder) == {"1.nested.host": f"{ASIDE}/new"}
    assert len(events(books)) == 1


async def test_only_the_beginning_of_a_large_bounce_is_read(mailbox: BounceMailbox, folder: Path, books: Books) -> None:
    path = deliver(folder, "postfix-user-unknown", books.enqueue_tried()[0])
    with path.open("ab") as opened:
        opened.truncate(40 * MAX_OCTETS)  # the returned email has a large attachment

    await mailbox.run_once()

    assert [each["bounce"] for each in events(books)] == ["hard"]
    assert files(folder) == {}


async def test_a_full_round_is_followed_by_the_next_at_once(mailbox: BounceMailbox, folder: Path, books: Books) -> None:
    (email_id,) = books.enqueue_tried()
    for number in range(MAX_MESSAGES + 1):
        deliver(folder, "vacation-gmail", email_id, f"{number}.bounce.host")

    assert await mailbox.run_once() == 0.0
    assert len(files(folder)) == 1
    assert await mailbox.run_once() is None
    assert files(folder) == {}


@pytest.fixture
def missing(folder: Path) -> Path:
    """A Maildir without `new`."""
    (folder / "new").rmdir()
    return folder


async def test_a_missing_maildir_is_logged_once(mailbox: BounceMailbox, missing: Path) -> None:
    with capture_logs() as logs:
        waits = [await mailbox.run_once() for _ in range(3)]

    assert waits == [60.0] * 3
    assert [(log["event"], log["reason"]) for log in logs] == [("bounces.unavailable", "No such file or directory")]

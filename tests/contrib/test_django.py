"""Django's email backend: which email a message becomes, in whose transaction, and under which key."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from email.message import MIMEPart
from email.mime.image import MIMEImage
from pathlib import Path
from typing import Any
from uuid import UUID

import django
import psycopg
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import EmailAttachment, EmailMessage, EmailMultiAlternatives
from django.db import Error, transaction
from django.test.utils import override_settings

from dispatcher import InvalidEmail, MessageKeyConflict, SchemaError
from dispatcher.contrib.django import EmailBackend
from tests.store.books import Books

ROOT = Path(__file__).parents[2]
IS_MODERN = django.VERSION >= (6, 0)
INVITATION = """BEGIN:VCALENDAR
VERSION:2.0
PRODID:-//Shop//EN
METHOD:REQUEST
BEGIN:VEVENT
UID:1@example.com
DTSTAMP:20261201T120000Z
DTSTART:20261224T180000Z
ORGANIZER:mailto:shop@example.com
ATTENDEE:mailto:ann@example.org
SUMMARY:Dinner
END:VEVENT
END:VCALENDAR
"""
pytestmark = pytest.mark.usefixtures("django_connection")


def message(body: str = "Thank you.\n", *, key: str | None = None, **given: Any) -> EmailMultiAlternatives:
    headers = {**given.pop("headers", {}), **({"Idempotency-Key": key} if key else {})}
    content = {"subject": "Receipt", "from_email": "Shop <shop@example.com>", "to": ["ann@example.org"], **given}
    return EmailMultiAlternatives(body=body, headers=headers, **content)


def image(kind: Callable[[], Any]) -> Any:
    part = kind()
    if isinstance(part, MIMEPart):
        part.set_content(b"\x89PNG", "image", "png", cid="<logo>", disposition="inline", filename="logo.png")
        return part
    part.add_header("Content-ID", "<logo>")
    part.add_header("Content-Disposition", "inline", filename="logo.png")
    return part


@pytest.mark.filterwarnings("ignore:MIMEBase attachments are deprecated")
@pytest.mark.parametrize("kind", [lambda: MIMEImage(b"\x89PNG", "png"), *([MIMEPart] if IS_MODERN else [])])
def test_everything_in_a_message_becomes_a_field_of_the_email(kind: Callable[[], Any]) -> None:
    given = message(
        to=["Ann Ö <ann@bücher.example>"],
        cc=["cc@example.org"],
        bcc=["Ben <ben@bücher.example>", ""],
        reply_to=["help@example.com"],
        headers={"X-Order": "17", "List-Unsubscribe": f"<https://example.com/?{'a,b;' * 60}>", "Message-ID": "<1@own>"},
        alternatives=[('<img src="cid:logo">\n', "text/html"), (INVITATION, "text/calendar; method=REQUEST")],
        attachments=[
            ("a.txt", "ä\n", "text/plain"),
            EmailAttachment("b.pdf", b"%PDF", "application/pdf"),
            image(kind),
        ],
    )
    if not IS_MODERN:  # Django 5.2 puts the parameter into quotes only if the content type is complete
        given.alternatives[1] = given.alternatives[1]._replace(mimetype="text/calendar")
    given.dispatcher = {"tags": ["receipt"], "metadata": {"order": "17"}, "lane": "urgent"}

    email = EmailBackend(tenant_id="acme", lane="bulk").email_of(given)

    assert (email.sender, email.to) == ('"Shop" <shop@example.com>', ('"Ann Ö" <ann@xn--bcher-kva.example>',))
    assert (email.cc, email.bcc) == (("cc@example.org",), ("ben@xn--bcher-kva.example",))
    assert (email.reply_to, email.subject, email.text) == (("help@example.com",), "Receipt", "Thank you.\n")
    assert email.html == '<img src="cid:logo">\n'
    assert email.calendar is not None
    assert email.calendar.method == "REQUEST"
    assert email.headers == {name: given.extra_headers[name] for name in ("X-Order", "List-Unsubscribe")}
    assert [(file.filename, file.content_type, file.content, file.content_id) for file in email.attachments] == [
        ("a.txt", "text/plain", "ä\r\n".encode(), None),
        ("b.pdf", "application/pdf", b"%PDF", None),
        ("logo.png", "image/png", b"\x89PNG", "logo"),
    ]
    assert (email.tags, email.metadata) == (("receipt",), {"order": "17"})
    assert (email.tenant_id, email.lane) == ("acme", "urgent")


def attached_email() -> EmailMessage:
    forwarded = message()
    given = message(key="key")
    given.attach("forwarded.eml", forwarded.message(), "message/rfc822")
    return given


RAW: dict[str, Callable[[], EmailMessage]] = {
    "an attached email": attached_email,
    "a header To that differs from the recipients": lambda: message(key="key", headers={"To": "All <all@example.com>"}),
    "an alternative that Email has no field for": lambda: message(
        key="key", alternatives=[("{}", "application/json")], attachments=[("a.bin", b"a", "application/x-a")]
    ),
}


@pytest.mark.parametrize("make", RAW.values(), ids=RAW.keys())
def test_what_fields_cannot_say_is_kept_raw_and_equal_at_each_repetition(make: Callable[[], EmailMessage]) -> None:
    email = EmailBackend().email_of(given := make())

    assert email.raw is not None
    assert email.raw == EmailBackend().email_of(given).raw
    assert email.to + email.bcc == ("ann@example.org",)
    assert b"Idempotency-Key" not in email.raw


def test_a_send_joins_the_open_transaction_and_puts_the_ids_on_the_messages(books: Books) -> None:
    first, second, nobody = message(), message(), message(to=[], bcc=[""])
    with transaction.atomic():
        assert EmailBackend().send_messages(iter([first, nobody, second])) == 2
        assert books.rows() == []
    with transaction.atomic():
        assert EmailBackend().send_messages([message()]) == 1
        transaction.set_rollback(True)

    assert {row["email_id"] for row in books.rows()} == {first.email_id, second.email_id}
    assert not hasattr(nobody, "email_id")
    assert EmailBackend().send_messages([]) == 0
    assert EmailBackend().email_of(message("")).text == "\n"


def test_a_message_is_a_new_email_at_each_send_unless_it_has_a_key(books: Books) -> None:
    backend = EmailBackend()
    keyless, keyed = message(), message(key="order-17")
    assert [backend.send_messages([each]) for each in (keyless, keyless, keyed, keyed)] == [1] * 4
    known: UUID = keyed.email_id

    assert backend.send_messages([repeated := message(key="order-17")]) == 1
    assert repeated.email_id == known
    keys = [row["message_key"] for row in books.rows()]
    assert (len(keys), keys.count("order-17")) == (3, 1)


@pytest.mark.parametrize("is_atomic", [True, False])
def test_a_refused_message_of_several_leaves_none_and_an_open_transaction_usable(books: Books, is_atomic: bool) -> None:
    EmailBackend().send_messages([message(key="known")])
    with transaction.atomic() if is_atomic else nullcontext():
        with pytest.raises(MessageKeyConflict):
            EmailBackend().send_messages([message(key="new"), message("Another text", key="known")])
        with pytest.raises(InvalidEmail, match="recipients"):
            EmailBackend().send_messages([message(key="new"), message(bcc=["nobody"])])
        EmailBackend().send_messages([message(key="later")])

    assert [row["message_key"] for row in books.rows()] == ["known", "later"]


def test_a_silent_failure_costs_only_the_messages_that_cannot_be_enqueued_and_is_logged(
    books: Books, caplog: pytest.LogCaptureFixture
) -> None:
    EmailBackend().send_messages([message(key="known")])
    given = [message(key="new"), message("Another text", key="known"), message(bcc=["nobody@"])]
    with transaction.atomic(), caplog.at_level(logging.WARNING):
        assert EmailBackend(fail_silently=True).send_messages(given) == 1

    assert [row["message_key"] for row in books.rows()] == ["known", "new"]
    assert [each.partition(":")[0] for each in caplog.messages] == ["An email was not enqueued"] * 2
    assert "nobody" not in caplog.text


def test_errors_of_the_database_are_djangos_and_ours(
    django_connection: Any,
    tables_session: psycopg.Connection,
    empty_database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    django_connection.ensure_connection()
    tables_session.execute("select pg_terminate_backend(%s, 5000)", [django_connection.connection.info.backend_pid])
    with pytest.raises(Error):
        EmailBackend().send_messages([message()])
    django_connection.close()
    monkeypatch.setitem(django_connection.settings_dict, "NAME", empty_database_url.rpartition("/")[2])
    with pytest.raises(SchemaError, match="dispatcher init"):
        EmailBackend().send_messages([message()])
    assert EmailBackend(fail_silently=True).send_messages([message()]) == 0
    with pytest.raises(ValueError, match=r"(?i)newlines|carriage|linefeed"):
        EmailBackend(fail_silently=True).send_messages([message(subject="a\nb")])


def test_options_are_the_setting_or_those_of_the_mailer() -> None:
    with override_settings(DISPATCHER_EMAIL={"database": "other", "lane": "bulk"}):
        assert (EmailBackend().database, EmailBackend(lane="urgent").defaults) == ("other", {"lane": "urgent"})
        assert (EmailBackend(alias="news").database, EmailBackend(alias="news").alias) == ("default", "news")
    with override_settings(DISPATCHER_EMAIL={"lanes": "bulk"}), pytest.raises(ImproperlyConfigured, match="lanes"):
        EmailBackend()
    allowing = EmailBackend(allowed_headers=["X-SES-Configuration-Set"])
    controlling = message(headers={"X-SES-Configuration-Set": "news"})
    assert allowing.email_of(controlling).headers == {"X-SES-Configuration-Set": "news"}
    with pytest.raises(InvalidEmail, match="DISPATCHER_ALLOWED_PROVIDER_HEADERS"):
        EmailBackend().email_of(controlling)


def run(url: str, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "tests.contrib.django_project", url, *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code, ended.stderr
    return ended.stdout.strip()


def test_the_system_checks_name_what_is_missing(tables_url: str, empty_database_url: str) -> None:
    assert run(tables_url, "check", "postgresql", "shop@example.com") == ""
    assert run(tables_url, "check", "sqlite3", "nobody") == "dispatcher.E003 dispatcher.E004"
    assert run(empty_database_url, "check", "postgresql", "webmaster@localhost") == "dispatcher.W005 dispatcher.W006"


def test_the_password_reset_of_django_works_unchanged(own_database_url: str) -> None:
    run(own_database_url, "reset")


def test_a_view_that_fails_sends_nothing_and_one_killed_before_its_answer_sends_once(own_database_url: str) -> None:
    with psycopg.connect(own_database_url, autocommit=True) as connection:
        connection.execute("create table orders (number integer primary key)")
        assert run(own_database_url, "order", "17", "dies", code=-signal.SIGKILL) == ""
        ((email_id,),) = connection.execute("select email_id from dispatcher.email_log").fetchall()

        assert run(own_database_url, "order", "17") == f"200 {email_id}"
        assert run(own_database_url, "order", "0") == "500"
        assert connection.execute("select number from orders").fetchall() == [(17,)]
        assert connection.execute("select message_key from dispatcher.email_log").fetchall() == [("order-17-receipt",)]

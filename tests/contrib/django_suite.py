"""Runs Django's own tests of mail against the backend: `python -m tests.contrib.django_suite URL SOURCE`.

URL is a database with our tables, SOURCE the folder `tests` of Django's source distribution. Prints JSON.

Django has shared tests for its backends. The class of each backend has a mailbox; that of ours is the outbox. It
derives from the class of Django's SMTP backend, so the tests of that backend run, too. The tests that render messages
run as they are. Each message that they render also goes through the outbox, and what the dispatcher would send is
compared with what Django renders.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import unittest
import warnings
from collections import Counter
from email import message_from_bytes, policy
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

from django.core.mail import EmailMessage
from django.db import connection
from django.test.utils import setup_test_environment

from dispatcher.contrib.django import EmailBackend
from dispatcher.errors import InvalidEmail
from dispatcher.store.connections import connect_async
from dispatcher.store.leases import read_content
from dispatcher.transport.mime import RenderedEmail, render
from tests.contrib.django_project import BACKEND, IS_OLD, configure

RENDERING = r"MailTests|(EmailMessage|SendMail|SendMassMail|MailAdminsAndManagers)TestsWithMailers"
"""The classes whose tests render messages. Those of Django 6.1 exist for the old settings, too."""


class Outbox:
    """The emails in the outbox, as the dispatcher would transmit them by SMTP."""

    def __init__(self, url: str) -> None:
        self._url = url

    def empty(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("delete from dispatcher.email_log")

    def rendered(self) -> list[RenderedEmail]:
        with connection.cursor() as cursor:
            cursor.execute("select email_id from dispatcher.email_log order by email_id")
            return asyncio.run(self._rendered([row[0] for row in cursor.fetchall()]))

    async def _rendered(self, email_ids: list[Any]) -> list[RenderedEmail]:
        async with await connect_async(self._url, name="suite") as session:
            found = [await read_content(session, email_id) for email_id in email_ids]
        return [render(each) for each in found if each is not None]


class ValueErrorBackend(EmailBackend):
    """With the error that Django's SMTP backend raises for an invalid address; ours is InvalidEmail."""

    __module__, __qualname__ = EmailBackend.__module__, EmailBackend.__qualname__  # which the tests look for

    def send_messages(self, email_messages: Any) -> int:
        try:
            return super().send_messages(email_messages)
        except InvalidEmail as error:
            raise ValueError("Invalid address") from error


def backend_tests(module: Any, outbox: Outbox) -> type[unittest.TestCase]:
    shared = module.SMTPBackendTests.__mro__[1]

    class DispatcherBackendTests(module.SMTPBackendTests):  # type: ignore[misc]
        test_create_from_mailers = getattr(shared, "test_create_from_mailers", None)
        databases = ("default",)  # which Django otherwise forbids to its SimpleTestCase
        email_backend = BACKEND
        backend_class = EmailBackend

        def setUp(self) -> None:
            super().setUp()
            self.enterContext(mock.patch.object(module, "smtp", SimpleNamespace(EmailBackend=ValueErrorBackend)))
            outbox.empty()

        def create_backend(self, *, alias: str | None = "test_alias", **options: Any) -> EmailBackend:
            return ValueErrorBackend(alias=alias, **options)

        def flush_mailbox(self) -> None:
            outbox.empty()

        def get_mailbox_content(self) -> list[Any]:
            # Without CR and, in Django 5.2, the last line end: so Django's tests read their SMTP server's mailbox.
            octets = [each.content.replace(b"\r\n", b"\n") for each in outbox.rendered()]
            return [message_from_bytes(each.rstrip() if IS_OLD else each, policy=policy.default) for each in octets]

        def get_smtp_envelopes(self) -> list[dict[str, Any]]:
            return [{"mail_from": each.sender, "rcpt_tos": list(each.recipients)} for each in outbox.rendered()]

    return DispatcherBackendTests


def essence(octets: bytes) -> list[Any]:
    """What a recipient sees of a message: the subject, the addresses, and each part's type, name and content."""
    mime: Any = message_from_bytes(octets, policy=policy.default)
    fields = [value for name in ("from", "to", "cc", "reply-to") for value in mime.get_all(name, [])]
    seen = [str(mime["subject"] or ""), *(_joined(str(each)) for value in fields for each in value.addresses)]
    for part in mime.walk():
        if not part.is_multipart():
            text = part.get_payload(decode=True).decode(part.get_content_charset("latin-1"), "replace")
            seen += [part.get_content_type(), part.get_filename(), text.replace("\r\n", "\n").rstrip("\n")]
    return seen


def _joined(text: str) -> str:
    """The text without spaces, because Python's parser may keep the one at which a name in encoded words is folded; and
    with the octets of UTF-8 as characters."""
    return "".join(text.split()).encode(errors="surrogateescape").decode()


class Comparison:
    def __init__(self, outbox: Outbox) -> None:
        self.counts: Counter[str] = Counter()
        self.differences: list[Any] = []
        self._outbox = outbox
        self._render = EmailMessage.message
        self._is_inside = False

    def message(self, given: EmailMessage, **options: Any) -> Any:
        """What Django renders. The first time, also sends the message, and compares."""
        if not self._is_inside and given.recipients():
            self._is_inside = True
            try:
                self._compare(given)
            finally:
                self._is_inside = False
        return self._render(given, **options)

    def _compare(self, given: EmailMessage) -> None:
        try:
            self.counts["raw" if EmailBackend().email_of(given).raw else "fields"] += 1
        except (InvalidEmail, ValueError):
            self.counts["refused"] += 1
            return
        self._outbox.empty()
        EmailBackend().send_messages([given])
        (arrived,) = self._outbox.rendered()
        mime = self._render(given)
        wanted = mime.as_bytes(linesep="\r\n") if IS_OLD else mime.as_bytes(policy=policy.SMTP)
        if (pair := (essence(wanted), essence(arrived.content)))[0] != pair[1]:
            self.differences.append(pair)


def main(url: str, source: str) -> None:
    configure(url)
    warnings.simplefilter("ignore")
    setup_test_environment(debug=False)
    sys.path.insert(0, source)
    tests: Any = import_module("mail.tests")
    outbox = Outbox(url)
    comparison = Comparison(outbox)
    result = unittest.TestResult()
    load = unittest.TestLoader().loadTestsFromTestCase
    load(backend_tests(tests if IS_OLD else import_module("mail.test_backends"), outbox)).run(result)
    instead = lambda *given, **options: comparison.message(*given, **options)  # noqa: E731, PLW0108 - gets the message
    with mock.patch.object(EmailMessage, "message", instead):
        for kind in [kind for name, kind in vars(tests).items() if re.fullmatch(RENDERING, name)]:
            load(type(kind.__name__, (kind,), {"databases": ("default",)})).run(result)
    failed = {
        getattr(test, "test_case", test).id().rpartition(".")[2]: trace.strip().rpartition("\n")[2]
        for test, trace in (*result.failures, *result.errors, *result.skipped)
    }
    counts = {"run": result.testsRun, **comparison.counts}
    print(json.dumps({"counts": counts, "failed": failed, "differences": comparison.differences}))


if __name__ == "__main__":
    main(*sys.argv[1:])

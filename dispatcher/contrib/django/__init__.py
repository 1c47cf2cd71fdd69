"""Django's mail, sent through the outbox: an email backend for Django 5.2 and later (docs/django.md).

    EMAIL_BACKEND = "dispatcher.contrib.django.EmailBackend"

`send_messages` enqueues in the current transaction of Django's connection: the emails commit with the view's rows, or
not at all. Django itself renders each message, and `Email.from_mime` reads it. So the emails are those that Django's
SMTP backend would send.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from email.message import Message as MimeMessage
from hashlib import sha256
from typing import Any, ClassVar, Final
from uuid import uuid4

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import EmailMessage
from django.core.mail.backends.base import BaseEmailBackend
from django.db import DEFAULT_DB_ALIAS, Error, connections, transaction
from django.utils.encoding import punycode

from dispatcher.domain.address import parse_address
from dispatcher.domain.email import Email, EmailOptions
from dispatcher.errors import DispatcherError, InvalidEmail
from dispatcher.producers import Acceptance, enqueue_many

SETTING: Final = "DISPATCHER_EMAIL"
KEY_HEADER: Final = "Idempotency-Key"

_LOG: Final = logging.getLogger("dispatcher.contrib.django")
_WRITTEN_BY_DJANGO: Final = ("Date", "Message-ID")


class EmailBackend(BaseEmailBackend):  # type: ignore[misc]  # Django has no types
    """Enqueues Django's messages. Its options are the setting `DISPATCHER_EMAIL`, or OPTIONS in `MAILERS`.

    Attributes:
        database: The alias of the connection, in whose transaction the emails are enqueued.
        allowed_headers: See `Email`.
        defaults: The arguments of `Email` that all messages have, such as `tenant_id`. The attribute `dispatcher` of a
            message, a dict, has further ones.
    """

    own_options: ClassVar[tuple[str, ...]] = ("database", "allowed_headers")

    def __init__(self, *, alias: str | None = None, fail_silently: bool = False, **options: Any) -> None:
        if alias is None:
            options = {**_options_of_setting(), **options}
        self.database: str = options.pop("database", DEFAULT_DB_ALIAS)
        self.allowed_headers: Collection[str] = options.pop("allowed_headers", ())
        self.defaults = {name: options.pop(name) for name in EmailOptions.__annotations__ if name in options}
        super().__init__(alias=alias, **options)
        self.alias = alias  # which Django 5.2 does not know
        self.fail_silently = fail_silently

    def send_messages(self, email_messages: Iterable[EmailMessage]) -> int:
        """Enqueues the messages that have recipients, in one statement, and returns their number.

        Sets the attribute `email_id` of each. A message whose key was enqueued before, with the same content, counts,
        and gets the id of the first. Without `fail_silently`, all messages are enqueued or none; with it, those that
        can be, and a warning is logged about the others. Outside `atomic()`, the call is its own transaction.

        Raises:
            InvalidEmail, MessageKeyConflict, UnusableConnection, SchemaError: see `dispatcher.enqueue_many`.
            django.db.Error: PostgreSQL or the connection failed.
        """
        emails: list[tuple[EmailMessage, Email]] = []
        for message in email_messages:
            if message.recipients():
                try:
                    emails.append((message, self.email_of(message)))
                except InvalidEmail as error:
                    self._fail(error)
        try:
            return self._enqueue(emails) if emails else 0
        except (DispatcherError, Error) as error:
            self._fail(error)
            return 0

    def email_of(self, message: EmailMessage) -> Email:
        """The email that a message becomes. Raises InvalidEmail; and ValueError, if Django cannot render it."""
        mime: MimeMessage = message.message()
        given = mime.get(KEY_HEADER)
        key = str(uuid4()) if given is None else str(given)
        del mime[KEY_HEADER]
        if mime.get_payload() == "":
            mime.set_payload("\n")  # as Django 6 does: an email needs a text
        _remove_differences(mime, key, {name.lower() for name in message.extra_headers})
        return Email.from_mime(
            mime,
            message_key=key,
            recipients=[_bare(f"recipients[{at}]", str(each)) for at, each in enumerate(message.recipients())],
            allowed_headers=self.allowed_headers,
            **{**self.defaults, **getattr(message, "dispatcher", {})},
        )

    def _enqueue(self, emails: list[tuple[EmailMessage, Email]]) -> int:
        connection = connections[self.database]
        # A savepoint, so that a failure leaves nothing of several emails, and the caller's transaction usable.
        is_partial = len(emails) > 1 or self.fail_silently
        with transaction.atomic(self.database) if is_partial else nullcontext(), connection.wrap_database_errors:
            answers = enqueue_many(connection, [email for _, email in emails], report_conflicts=self.fail_silently)
        for (message, _), answer in zip(emails, answers, strict=True):
            message.email_id = answer.email_id
        refused = [each for each in answers if each.acceptance not in (Acceptance.ACCEPTED, Acceptance.KNOWN)]
        for each in refused:
            _LOG.warning("An email was not enqueued: %s", each.acceptance)
        return len(answers) - len(refused)

    def _fail(self, error: Exception) -> None:
        if not self.fail_silently:
            raise error
        # Our errors quote nothing private. Those of a database may.
        _LOG.warning("An email was not enqueued: %s", error if isinstance(error, DispatcherError) else type(error))


def _options_of_setting() -> Mapping[str, Any]:
    options: Mapping[str, Any] = getattr(settings, SETTING, {})
    known = (*EmailBackend.own_options, *EmailOptions.__annotations__)
    if unknown := [name for name in options if name not in known]:
        raise ImproperlyConfigured(f"{SETTING} has the unknown option {unknown[0]!r}. Options: {', '.join(known)}.")
    return options


def _bare(field: str, recipient: str) -> str:
    """The address without a name, and with the domain as in the headers that Django writes."""
    try:
        found = parse_address(recipient)
        return f"{found.local}@{punycode(found.domain)}"
    except ValueError as error:
        raise InvalidEmail(
            field, str(error) if type(error) is ValueError else "has a domain that is not valid"
        ) from None


def _remove_differences(mime: MimeMessage, key: str, own_headers: Collection[str]) -> None:
    """Removes what Django makes anew for each send. Otherwise a repetition that is kept raw would differ from the email
    with the same key, and be a conflict."""
    for name in _WRITTEN_BY_DJANGO:
        if name.lower() not in own_headers:
            del mime[name]
    for number, part in enumerate(mime.walk()):
        if part.is_multipart() and part.get_content_maintype() == "multipart" and part.get_boundary() is None:
            part.set_boundary(f"=_{sha256(f'{number} {key}'.encode()).hexdigest()[:32]}")

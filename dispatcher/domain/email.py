"""The email that an application enqueues. Its constructor validates everything, so an `Email` is always valid."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import ClassVar, Final, Literal

from dispatcher.domain import email_rules as rules
from dispatcher.domain.email_json import REQUIRED_FIELDS, arguments_of, attachment_document, instant_text
from dispatcher.domain.outgoing import EMAIL_CHANNEL, ERASE_TAG, Attachment, stored_tags
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.template_data import canonical_data, checked_data
from dispatcher.errors import InvalidEmail


@dataclass(frozen=True, slots=True, init=False)
class Email:
    """An email to send. Immutable, and validated when it is created.

    Attributes:
        message_key: The application's unique name for this email. Enqueueing the same key again never sends a second
            email.
        sender: The sender's address: `local@domain` or `Name <local@domain>`. All addresses of an email have one of
            these forms, and are stored unchanged.
        to: May be empty if cc or bcc has a recipient.
        text: Plain-text body; None if the email has only HTML.
        html: HTML body; None if the email has only text.
        template_id: The id of a provider's template that writes subject and body; None if the email uses no template.
        template_data: The values for the template.
        headers: Additional headers, read-only.
        tags: Labels for the provider's statistics. The tag `one_time_code` sets `erase_after_sending`, and no provider
            receives it.
        erase_after_sending: Whether the content, including attachments, is deleted about a minute after the email is
            sent.
        ignore_suppression: Whether suppressed recipients get the email, too. True for an email such as a legal notice.
        tenant_id: The tenant that owns the email. Message keys are unique within a tenant.
        correlation_id: The application's id for the request or event that caused the email. Logs and dead letters
            include it.
        on_uncertain: What to do if the outcome of an attempt is unknown; None applies the host's policy.
        send_at: The earliest time to send the email, in UTC; None: as soon as possible.
        expires_at: A time in UTC. From this time on, no attempt begins, and an email that is not sent yet is cancelled.
            None: the email never expires.
        lane: The lane that the application chooses. None: the lane of the API key; without one, the lane that an
            operator set for the sender; without one, `normal`.
    """

    channel: ClassVar[str] = EMAIL_CHANNEL
    warnings: ClassVar[tuple[str, ...]] = ()

    message_key: str
    sender: str = field(repr=False)
    to: tuple[str, ...] = field(repr=False)
    subject: str = field(repr=False)
    text: str | None = field(repr=False)
    html: str | None = field(repr=False)
    template_id: str | None
    template_data: Mapping[str, object] = field(repr=False, hash=False)
    cc: tuple[str, ...] = field(repr=False)
    bcc: tuple[str, ...] = field(repr=False)
    reply_to: tuple[str, ...] = field(repr=False)
    headers: Mapping[str, str] = field(repr=False, hash=False)
    attachments: tuple[Attachment, ...] = field(repr=False)
    tags: tuple[str, ...]
    tenant_id: str
    correlation_id: str | None
    on_uncertain: OnUncertain | None
    erase_after_sending: bool
    ignore_suppression: bool
    send_at: datetime | None
    expires_at: datetime | None
    lane: str | None

    def __init__(
        self,
        *,
        message_key: str,
        sender: str,
        to: str | Sequence[str],
        subject: str = "",
        text: str | None = None,
        html: str | None = None,
        template_id: str | None = None,
        template_data: Mapping[str, object] = MappingProxyType({}),
        cc: str | Sequence[str] = (),
        bcc: str | Sequence[str] = (),
        reply_to: str | Sequence[str] = (),
        headers: Mapping[str, str] = MappingProxyType({}),
        attachments: Sequence[Attachment] = (),
        tags: Sequence[str] = (),
        tenant_id: str = "default",
        correlation_id: str | None = None,
        on_uncertain: OnUncertain | Literal["hold", "resend"] | None = None,
        erase_after_sending: bool = False,
        ignore_suppression: bool = False,
        send_at: datetime | None = None,
        expires_at: datetime | None = None,
        lane: str | None = None,
        allowed_headers: Collection[str] = (),
    ) -> None:
        """Validates and creates an email.

        Args:
            allowed_headers: Names of headers that `headers` may contain although they control a provider. Workers send
                the email only if DISPATCHER_ALLOWED_PROVIDER_HEADERS also contains these names.

        Raises:
            InvalidEmail: An argument is invalid. The error contains the first such argument's name.
        """
        keep = partial(object.__setattr__, self)
        keep("message_key", rules.key("message_key", message_key))
        keep("tenant_id", rules.tenant(tenant_id))
        keep("sender", rules.sender(sender))
        keep("to", rules.addresses("to", to))
        keep("cc", rules.addresses("cc", cc))
        keep("bcc", rules.addresses("bcc", bcc))
        if (recipients := len(self.to) + len(self.cc) + len(self.bcc)) == 0:
            raise InvalidEmail("to", "has no recipient; give at least one in to, cc or bcc")
        if recipients > rules.MAX_RECIPIENTS:
            most = f"to, cc and bcc together may have {rules.MAX_RECIPIENTS}"
            raise InvalidEmail("to", f"has too many recipients; {most}")
        keep("reply_to", rules.addresses("reply_to", reply_to))
        keep("subject", rules.line("subject", subject, rules.MAX_LINE_CHARACTERS))
        keep("template_id", None if template_id is None else rules.template(template_id))
        keep("template_data", checked_data(template_data))
        if self.template_id is None and self.template_data:
            raise InvalidEmail("template_data", "needs template_id; set template_id, or remove template_data")
        if self.template_id is not None and (text or html):
            reason = "cannot be combined with text or html, because the template writes the body; set one or the other"
            raise InvalidEmail("template_id", reason)
        kept_text, kept_html = rules.bodies(text, html, required=template_id is None)
        keep("text", kept_text)
        keep("html", kept_html)
        keep("headers", rules.headers(headers, allowed_headers))
        keep("attachments", rules.attachments(attachments))
        keep("tags", rules.tags(tags))
        keep("correlation_id", None if correlation_id is None else rules.key("correlation_id", correlation_id))
        keep("on_uncertain", rules.policy(on_uncertain))
        is_erased = rules.flag("erase_after_sending", erase_after_sending)
        keep("erase_after_sending", is_erased or ERASE_TAG in self.tags)
        keep("ignore_suppression", rules.flag("ignore_suppression", ignore_suppression))
        keep("send_at", None if send_at is None else rules.instant("send_at", send_at))
        keep("expires_at", None if expires_at is None else rules.instant("expires_at", expires_at))
        rules.period(self.send_at, self.expires_at)
        keep("lane", None if lane is None else rules.lane(lane))

    @classmethod
    def from_json(cls, document: object, *, allowed_headers: Collection[str] = ()) -> Email:
        """Creates an email from a decoded JSON object. A null field counts as absent.

        Args:
            allowed_headers: As for `Email`.

        Raises:
            InvalidEmail: A field is unknown, missing, of the wrong type or otherwise invalid. The error contains the
                JSON name of the first such field.
        """
        arguments = arguments_of(document)
        try:
            return cls(**arguments, allowed_headers=allowed_headers)
        except InvalidEmail as error:
            if error.field != "sender":
                raise
            raise InvalidEmail("from", error.reason) from None

    def to_json(self) -> dict[str, object]:
        """The JSON object of this email, without empty fields. `from_json` creates an equal email from it."""
        document: dict[str, object] = {
            "message_key": self.message_key,
            "tenant_id": self.tenant_id,
            "from": self.sender,
            "to": list(self.to),
            "cc": list(self.cc),
            "bcc": list(self.bcc),
            "reply_to": list(self.reply_to),
            "subject": self.subject,
            "text": self.text,
            "html": self.html,
            "template_id": self.template_id,
            "template_data": dict(self.template_data),
            "headers": dict(self.headers),
            "attachments": [attachment_document(attachment) for attachment in self.attachments],
            "tags": list(self.tags),
            "correlation_id": self.correlation_id,
            "on_uncertain": self.on_uncertain and self.on_uncertain.value,
            "erase_after_sending": self.erase_after_sending,
            "ignore_suppression": self.ignore_suppression,
            "send_at": self.send_at and instant_text(self.send_at),
            "expires_at": self.expires_at and instant_text(self.expires_at),
            "lane": self.lane,
        }
        needed = REQUIRED_FIELDS if self.template_id else (*REQUIRED_FIELDS, "subject")
        return {name: value for name, value in document.items() if value or name in needed}

    @property
    def stored_tags(self) -> tuple[str, ...]:
        """The tags as PostgreSQL stores them; see `outgoing.stored_tags`."""
        return stored_tags(self.tags, is_erased=self.erase_after_sending)

    def payload_hash(self) -> bytes:
        """A digest that shows whether a repeated message key has the same payload or a conflicting one.

        Covers everything that reaches the recipient or the provider, `on_uncertain`, times and lane. Excludes the key
        itself (`tenant_id`, `message_key`). Also excludes `correlation_id`, because a repeated request has a new
        correlation id. The order of list entries matters. In headers, neither the order nor the case of names matters.

        Never change how this digest is computed: otherwise a repeated enqueue of a stored email would be a conflict. A
        new field may change the digest only of emails that use the field.
        """
        parts = ["email 1", self.sender, self.subject, self.text or "", self.html or "", self.on_uncertain or ""]
        text = _with_lengths([*parts, str(len(self.to)), *self.to])
        tags = self.stored_tags
        if self.cc or self.bcc or self.reply_to or self.headers or self.attachments or tags:
            headers = sorted([(name.lower(), value) for name, value in self.headers.items()])
            files = [(file.filename, file.content_type, sha256(file.content).hexdigest()) for file in self.attachments]
            parts = [
                *(str(len(self.cc)), *self.cc, str(len(self.bcc)), *self.bcc, str(len(self.reply_to)), *self.reply_to),
                *(str(len(headers)), *[text for header in headers for text in header]),
                *(str(len(files)), *[text for file in files for text in file]),
                *(str(len(tags)), *tags),
            ]
        else:
            text, parts = text + _SIX_EMPTY_LISTS, []
        if self.template_id is not None:
            parts += ["template", self.template_id, canonical_data(self.template_data)]
        if self.ignore_suppression:
            parts.append("ignore_suppression")
        if self.send_at is not None:
            parts += ["send_at", instant_text(self.send_at)]
        if self.expires_at is not None:
            parts += ["expires_at", instant_text(self.expires_at)]
        if self.lane is not None:
            parts += ["lane", self.lane]
        return sha256((text + _with_lengths(parts)).encode()).digest()


def _with_lengths(parts: Iterable[str]) -> str:
    """Prefixes each part with its length. Otherwise two different emails could give the same text."""
    return "".join([f"{len(part)}:{part}" for part in parts])


_SIX_EMPTY_LISTS: Final = _with_lengths("000000")

"""The email that an application enqueues. Its constructor validates everything, so an `Email` is always valid."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, TypedDict, Unpack

from dispatcher.domain import email_rules as rules
from dispatcher.domain.address import parse_address
from dispatcher.domain.calendar import Calendar
from dispatcher.domain.email_json import instant_text
from dispatcher.domain.json_data import NO_DATA, canonical_data
from dispatcher.domain.message import Message
from dispatcher.domain.outgoing import EMAIL_CHANNEL, Attachment
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.text import DEFAULT_TENANT, shown, unknown_fault
from dispatcher.errors import InvalidEmail

if TYPE_CHECKING:
    from email.message import Message as MimeMessage


class EmailOptions(TypedDict, total=False):
    """The arguments of `Email` that say nothing about its content."""

    tags: Sequence[str]
    metadata: Mapping[str, str]
    topic: str | None
    tenant_id: str
    correlation_id: str | None
    on_uncertain: OnUncertain | Literal["hold", "resend"] | None
    erase_after_sending: bool
    ignore_suppression: bool
    send_at: datetime | None
    expires_at: datetime | None
    lane: str | None


_BESIDE_RAW: Final = ("message_key", *EmailOptions.__annotations__)
_NOT_WITH_RAW: Final = ("text", "html", "template_id", "reply_to", "headers", "attachments", "calendar")


class Email(Message):
    """An email to send. `Message` describes its fields.

    An email needs at least one recipient in `to`, `cc` or `bcc`, and `text`, `html` or `template_id`. Its content is
    deleted about a minute after it is sent, if `erase_after_sending` is true. From `expires_at` on, no attempt begins.
    """

    __slots__ = ()
    channel: ClassVar[str] = EMAIL_CHANNEL
    already_read: ClassVar[tuple[str, ...]] = ("headers",)

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
        template_data: Mapping[str, object] = NO_DATA,
        cc: str | Sequence[str] = (),
        bcc: str | Sequence[str] = (),
        reply_to: str | Sequence[str] = (),
        headers: Mapping[str, str] = rules.NO_HEADERS,
        attachments: Sequence[Attachment] = (),
        calendar: Calendar | None = None,
        raw: bytes | None = None,
        tags: Sequence[str] = (),
        metadata: Mapping[str, str] = rules.NO_METADATA,
        topic: str | None = None,
        tenant_id: str = DEFAULT_TENANT,
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
        given = locals()
        given["headers"] = rules.headers(headers, allowed_headers)
        self._keep(given)
        if (recipients := len(self.to) + len(self.cc) + len(self.bcc)) == 0:
            raise InvalidEmail("to", "has no recipient; give at least one in to, cc or bcc")
        if recipients > rules.MAX_RECIPIENTS:
            most = f"to, cc and bcc together may have {rules.MAX_RECIPIENTS}"
            raise InvalidEmail("to", f"has too many recipients; {most}")
        if self.raw is not None:
            self._check_raw(allowed_headers)
            return
        if self.calendar is not None and self.template_id is not None:
            raise InvalidEmail("calendar", "cannot be combined with template_id; set text or html")
        if self.attachments:
            rules.check_content_ids(self.attachments, self.html, self.template_id)
        if self.template_id is None:
            if self.template_data:
                raise InvalidEmail("template_data", "needs template_id; set template_id, or remove template_data")
            rules.check_bodies(self.text, self.html)
        elif self.text or self.html:
            reason = "cannot be combined with text or html, because the template writes the body; set one or the other"
            raise InvalidEmail("template_id", reason)

    @property
    def senders(self) -> tuple[str, ...]:
        if self.raw is None:
            return (self.sender,)
        from dispatcher.domain.mime_in import senders_in

        return (self.sender, *senders_in(self.raw))

    def _check_raw(self, allowed_headers: Collection[str]) -> None:
        from dispatcher.domain.raw_mime import raw_fault, raw_octets

        assert self.raw is not None
        if given := [name for name in _NOT_WITH_RAW if getattr(self, name)]:
            raise InvalidEmail(given[0], "cannot be combined with raw, which is the whole message; remove one of both")
        if raw_octets(self.raw) != self.raw:
            raise InvalidEmail("raw", "needs CRLF line ends, and no header Bcc or Return-Path; use Email.from_mime")
        if fault := raw_fault(self.raw, allowed_headers):
            raise InvalidEmail("raw", fault)
        if parse_address(self.sender).spec not in self.senders[1:]:
            raise InvalidEmail("sender", "must be the address in the header From of raw")

    @classmethod
    def from_mime(
        cls,
        message: bytes | MimeMessage,
        *,
        message_key: str,
        recipients: str | Sequence[str] | None = None,
        allowed_headers: Collection[str] = (),
        **options: Unpack[EmailOptions],
    ) -> Self:
        """Creates an email from a MIME message (RFC 5322).

        If the fields of an email can say everything that the message says, the email has these fields, and any provider
        can send it. Date, Message-ID and the headers Received are then written anew. Otherwise, for example if the
        message is signed or encrypted, the email has the message as `raw`, and is sent as it is, by the providers that
        accept MIME (ses, smtp). Bcc is never sent.

        Args:
            message: A message object, or its octets.
            recipients: Who gets the email (the envelope). Those who are not in To or Cc get a blind copy. Addresses in
                To, Cc and Bcc that are missing here get nothing. None: everyone in To, Cc and Bcc.
            allowed_headers: See `Email`.
            options: As of `Email`.

        Raises:
            InvalidEmail: The message or an option is invalid.
        """
        from dispatcher.domain.mime_body import Lost
        from dispatcher.domain.mime_in import MimeIn, octets_of_message

        read = MimeIn(octets_of_message(message), recipients, allowed_headers)
        others: dict[str, Any] = {"message_key": message_key, "allowed_headers": allowed_headers, **options}
        if unknown := [name for name in options if name not in _BESIDE_RAW]:
            raise TypeError(
                f"from_mime() takes no argument {unknown[0]}: the message says all but {', '.join(_BESIDE_RAW)}"
            )
        try:
            return cls(**read.fields(), **others)
        except Lost:
            return cls(**read.raw(), **others)
        except InvalidEmail:
            # If the message cannot be sent as it is, either, this error is about what is wrong with it.
            return cls(**read.raw(), **others)

    @classmethod
    def from_json(cls, document: object, *, allowed_headers: Collection[str] = ()) -> Self:
        """Creates an email from a decoded JSON object. A null field counts as absent. Raises InvalidEmail with the JSON
        name of the first field that is unknown, missing or invalid.

        An object with `raw` is read as by `from_mime`, with `recipients`."""
        if isinstance(document, dict) and document.get("raw") is not None:
            return cls._from_raw_json(document, allowed_headers)
        email = cls._from_json(document, {"to": ()}, allowed_headers=allowed_headers)
        assert isinstance(document, dict)
        if email.template_id is None and document.get("subject") is None:
            raise InvalidEmail("subject", "is required unless template_id is set")
        return email

    @classmethod
    def _from_raw_json(cls, document: dict[str, Any], allowed_headers: Collection[str]) -> Self:
        given: dict[str, Any] = {}
        for name, value in document.items():
            if name == "recipients":
                given[name] = value
            elif name == "channel" and value in (None, cls.channel):
                continue
            elif (each := cls.by_json_name.get(name)) is None:
                raise InvalidEmail(shown(name), unknown_fault(name, (*_BESIDE_RAW, "raw", "recipients")))
            elif name not in (*_BESIDE_RAW, "raw"):
                if value:
                    raise InvalidEmail(
                        name, "cannot be combined with raw, which is the whole message; remove one of both"
                    )
            elif value is not None:
                given[name] = value if each.kind.decode is None else each.kind.decode(name, value)
        if "message_key" not in given:
            raise InvalidEmail("message_key", "is required")
        return cls.from_mime(given.pop("raw"), allowed_headers=allowed_headers, **given)

    def to_json(self) -> dict[str, object]:
        if self.raw is not None:
            document = super().to_json()
            envelope = {"recipients": [*self.to, *self.cc, *self.bcc]}
            return {name: document[name] for name in (*_BESIDE_RAW, "raw") if name in document} | envelope
        return super().to_json() if self.template_id else {"subject": "", **super().to_json()}

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
        if self.metadata:
            parts += self.metadata_parts()
        if self.topic is not None:
            parts += ["topic", self.topic]
        if self.attachments or self.calendar or self.raw:
            parts += self._file_parts()
        return sha256((text + _with_lengths(parts)).encode()).digest()

    def _file_parts(self) -> list[str]:
        """What `payload_hash` covers of the content ids, the calendar and the raw message; empty without them."""
        ids = [file.content_id or "" for file in self.attachments]
        return [
            *(["content_ids", *ids] if any(ids) else ()),
            *(["calendar", self.calendar.content] if self.calendar is not None else ()),
            *(["raw", sha256(self.raw).hexdigest()] if self.raw is not None else ()),
        ]


def _with_lengths(parts: Iterable[str]) -> str:
    """Prefixes each part with its length. Otherwise two different emails could give the same text."""
    return "".join([f"{len(part)}:{part}" for part in parts])


_SIX_EMPTY_LISTS: Final = _with_lengths("000000")

"""The email that an application enqueues. Its constructor validates everything, so an `Email` is always valid."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import ClassVar, Final, Literal, Self

from dispatcher.domain import email_rules as rules
from dispatcher.domain.email_json import instant_text
from dispatcher.domain.json_data import NO_DATA, canonical_data
from dispatcher.domain.message import Message
from dispatcher.domain.outgoing import EMAIL_CHANNEL, Attachment
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.text import DEFAULT_TENANT
from dispatcher.errors import InvalidEmail


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
        if self.template_id is None:
            if self.template_data:
                raise InvalidEmail("template_data", "needs template_id; set template_id, or remove template_data")
            rules.check_bodies(self.text, self.html)
        elif self.text or self.html:
            reason = "cannot be combined with text or html, because the template writes the body; set one or the other"
            raise InvalidEmail("template_id", reason)

    @classmethod
    def from_json(cls, document: object, *, allowed_headers: Collection[str] = ()) -> Self:
        """Creates an email from a decoded JSON object. A null field counts as absent. Raises InvalidEmail with the JSON
        name of the first field that is unknown, missing or invalid."""
        email = cls._from_json(document, {"to": ()}, allowed_headers=allowed_headers)
        assert isinstance(document, dict)
        if email.template_id is None and document.get("subject") is None:
            raise InvalidEmail("subject", "is required unless template_id is set")
        return email

    def to_json(self) -> dict[str, object]:
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
        return sha256((text + _with_lengths(parts)).encode()).digest()


def _with_lengths(parts: Iterable[str]) -> str:
    """Prefixes each part with its length. Otherwise two different emails could give the same text."""
    return "".join([f"{len(part)}:{part}" for part in parts])


_SIX_EMPTY_LISTS: Final = _with_lengths("000000")

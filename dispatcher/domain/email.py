"""The email that an application enqueues: a value that is valid or does not exist."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import Literal

from dispatcher.domain import email_rules as rules
from dispatcher.domain.email_json import REQUIRED_FIELDS, arguments_of, attachment_document
from dispatcher.domain.outgoing import ERASE_TAG, Attachment
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.template_data import canonical_data, checked_data
from dispatcher.errors import InvalidEmail


@dataclass(frozen=True, slots=True, init=False)
class Email:
    """What an application asks to have sent; validated whole when it is made.

    Attributes:
        message_key: The application's own name for this email: the same key never makes a second one.
        sender: `local@domain` or `Name <local@domain>`, like every address here, kept as given.
        to: May be empty if there is a cc or bcc.
        text: Plain body; None if there is only HTML.
        html: HTML body; None if there is only text.
        template_id: The provider's template that writes subject and body instead; None if they stand here.
        template_data: What the template is filled with.
        headers: Additional headers, read-only.
        tags: For the provider's statistics. The tag `one_time_code` sets `erase_after_sending`; no provider gets it.
        erase_after_sending: Whether the content, attachments included, is deleted about a minute after it is sent.
        tenant_id: Whose email it is; message keys are unique within a tenant.
        correlation_id: The application's name for what caused the email; stands in logs and dead letters.
        on_uncertain: This email's policy where nobody can know whether it was accepted; None for the host's.
    """

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
        allowed_headers: Collection[str] = (),
    ) -> None:
        """An email.

        Args:
            allowed_headers: Names of headers that command a provider and that `headers` may have nevertheless. Workers
                send the email only if DISPATCHER_ALLOWED_PROVIDER_HEADERS has these names, too.

        Raises:
            InvalidEmail: names the first argument that breaks a rule.
        """
        keep = partial(object.__setattr__, self)
        keep("message_key", rules.key("message_key", message_key))
        keep("tenant_id", rules.tenant(tenant_id))
        keep("sender", rules.sender(sender))
        keep("to", rules.addresses("to", to))
        keep("cc", rules.addresses("cc", cc))
        keep("bcc", rules.addresses("bcc", bcc))
        if (recipients := len(self.to) + len(self.cc) + len(self.bcc)) == 0:
            raise InvalidEmail("to", "needs at least one recipient in to, cc or bcc")
        if recipients > rules.MAX_RECIPIENTS:
            raise InvalidEmail("to", f"and cc and bcc have more than {rules.MAX_RECIPIENTS} recipients together")
        keep("reply_to", rules.addresses("reply_to", reply_to))
        keep("subject", rules.line("subject", subject, rules.MAX_LINE_CHARACTERS))
        keep("template_id", None if template_id is None else rules.template(template_id))
        keep("template_data", checked_data(template_data))
        if self.template_id is None and self.template_data:
            raise InvalidEmail("template_data", "stands without template_id")
        if self.template_id is not None and (text or html):
            raise InvalidEmail("template_id", "stands beside text or html; a template writes the body itself")
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

    @classmethod
    def from_json(cls, document: object, *, allowed_headers: Collection[str] = ()) -> Email:
        """The email that a decoded JSON object describes; null stands for an absent optional field.

        Args:
            allowed_headers: As for `Email`.

        Raises:
            InvalidEmail: names, as in JSON, the first field that is unknown, missing, of the wrong type or breaks a
                rule.
        """
        arguments = arguments_of(document)
        try:
            return cls(**arguments, allowed_headers=allowed_headers)
        except InvalidEmail as error:
            if error.field != "sender":
                raise
            raise InvalidEmail("from", error.reason) from None

    def to_json(self) -> dict[str, object]:
        """The JSON object that `from_json` makes an equal email of; absent fields are left out."""
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
        }
        needed = REQUIRED_FIELDS if self.template_id else (*REQUIRED_FIELDS, "subject")
        return {name: value for name, value in document.items() if value or name in needed}

    @property
    def stored_tags(self) -> tuple[str, ...]:
        """The tags as stored: with `ERASE_TAG` if the content is erased after sending."""
        if self.erase_after_sending and ERASE_TAG not in self.tags:
            return (*self.tags, ERASE_TAG)
        return self.tags

    def payload_hash(self) -> bytes:
        """The digest by which a repeat of a message key is told from a conflict.

        Covers everything that reaches the recipient or provider, and the promise (`on_uncertain`). Leaves out the key
        itself (`tenant_id`, `message_key`) and `correlation_id`, which names the request: a repeated request comes with
        another one. Order counts in lists; in headers neither order nor the names' case does.

        The form is for ever: whatever changes it turns repeats of emails that are stored already into conflicts. A new
        field may only add to it where that field is used.
        """
        headers = sorted((name.lower(), value) for name, value in self.headers.items())
        files = [(file.filename, file.content_type, sha256(file.content).hexdigest()) for file in self.attachments]
        parts = [
            *("email 1", self.sender, self.subject, self.text or "", self.html or "", self.on_uncertain or ""),
            *(str(len(self.to)), *self.to),
            *(str(len(self.cc)), *self.cc),
            *(str(len(self.bcc)), *self.bcc),
            *(str(len(self.reply_to)), *self.reply_to),
            *(str(len(headers)), *[text for header in headers for text in header]),
            *(str(len(files)), *[text for file in files for text in file]),
            *(str(len(self.stored_tags)), *self.stored_tags),
        ]
        if self.template_id is not None:
            parts += ["template", self.template_id, canonical_data(self.template_data)]
        # Each part with its length before it, so that no two emails share a form.
        return sha256("".join([f"{len(part)}:{part}" for part in parts]).encode()).digest()

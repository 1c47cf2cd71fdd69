"""What an application can enqueue: an `Email`, an `Sms`, or a message of a channel that an installed package adds.

`Message` is the interface that `enqueue`, the store and routing use. `TextMessage` is the base class of messages that
consist of a text for one recipient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Protocol, Self

from dispatcher.domain import email_rules as rules
from dispatcher.domain.email_json import INSTANT_FIELDS, instant_of, instant_text
from dispatcher.domain.outgoing import EMAIL_CHANNEL, ERASE_TAG, Attachment, stored_tags
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.text import body_fault
from dispatcher.errors import InvalidEmail

__all__ = ["EMAIL_CHANNEL", "Message", "TextMessage"]

TEXT_FIELDS: Final = frozenset(
    {
        *("channel", "message_key", "to", "text", "from", "tenant_id", "correlation_id", "tags", "on_uncertain"),
        *("erase_after_sending", "ignore_suppression", "send_at", "expires_at", "lane"),
    }
)
"""The JSON fields of a text message."""


class Message(Protocol):
    """A valid message of any channel, as `enqueue` accepts it. `Email` describes the attributes."""

    @property
    def channel(self) -> str:
        """The kind of the message: `email`, `sms`, or the name that a package gave to its own channel."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences that the caller should read although the message is valid. They contain no private data."""

    @property
    def message_key(self) -> str: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def sender(self) -> str: ...
    @property
    def to(self) -> tuple[str, ...]: ...
    @property
    def cc(self) -> tuple[str, ...]: ...
    @property
    def bcc(self) -> tuple[str, ...]: ...
    @property
    def reply_to(self) -> tuple[str, ...]: ...
    @property
    def subject(self) -> str: ...
    @property
    def text(self) -> str | None: ...
    @property
    def html(self) -> str | None: ...
    @property
    def template_id(self) -> str | None: ...
    @property
    def template_data(self) -> Mapping[str, object]: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def attachments(self) -> tuple[Attachment, ...]: ...
    @property
    def stored_tags(self) -> tuple[str, ...]:
        """The tags as PostgreSQL stores them; see `outgoing.stored_tags`."""

    @property
    def correlation_id(self) -> str | None: ...
    @property
    def on_uncertain(self) -> OnUncertain | None: ...
    @property
    def ignore_suppression(self) -> bool: ...
    @property
    def send_at(self) -> datetime | None: ...
    @property
    def expires_at(self) -> datetime | None: ...
    @property
    def lane(self) -> str | None: ...
    def payload_hash(self) -> bytes:
        """A digest that shows whether a repeated message key has the same payload."""


@dataclass(frozen=True, slots=True, init=False)
class TextMessage:
    """A text for one recipient. Immutable, and validated when it is created.

    Subclasses set `channel`, and override `checked_recipient`, `checked_sender` and `checked_text`.

    Attributes:
        to: A tuple with one recipient. It is a tuple because `Email.to` is a tuple.
        sender: The sender that the recipient sees; empty: the provider's default sender.

    `Email` describes the other attributes.
    """

    channel: ClassVar[str]
    max_characters: ClassVar[int] = 1600

    cc: ClassVar[tuple[str, ...]] = ()
    bcc: ClassVar[tuple[str, ...]] = ()
    reply_to: ClassVar[tuple[str, ...]] = ()
    subject: ClassVar[str] = ""
    html: ClassVar[None] = None
    template_id: ClassVar[None] = None
    template_data: ClassVar[Mapping[str, object]] = MappingProxyType({})
    headers: ClassVar[Mapping[str, str]] = MappingProxyType({})
    attachments: ClassVar[tuple[Attachment, ...]] = ()

    message_key: str
    to: tuple[str, ...] = field(repr=False)
    text: str = field(repr=False)
    sender: str = field(repr=False)
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
        to: str,
        text: str,
        sender: str = "",
        tags: Sequence[str] = (),
        tenant_id: str = "default",
        correlation_id: str | None = None,
        on_uncertain: OnUncertain | Literal["hold", "resend"] | None = None,
        erase_after_sending: bool = False,
        ignore_suppression: bool = False,
        send_at: datetime | None = None,
        expires_at: datetime | None = None,
        lane: str | None = None,
    ) -> None:
        """Raises InvalidEmail with the name of the first invalid argument."""
        keep = partial(object.__setattr__, self)
        keep("message_key", rules.key("message_key", message_key))
        keep("tenant_id", rules.tenant(tenant_id))
        keep("to", (self.checked_recipient(rules.string("to", to)),))
        keep("sender", self.checked_sender(rules.string("sender", sender)) if sender else "")
        keep("text", self.checked_text(rules.string("text", text)))
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
    def checked_recipient(cls, value: str) -> str:
        """Checks a recipient, and returns the recipient to store. Raises InvalidEmail."""
        return rules.key("to", value)

    @classmethod
    def checked_sender(cls, value: str) -> str:
        """Checks a sender that is not empty, and returns the sender to store. Raises InvalidEmail."""
        return rules.key("sender", value)

    @classmethod
    def checked_text(cls, value: str) -> str:
        """Checks a text, and returns the text to store. Raises InvalidEmail."""
        if not value.strip():
            raise InvalidEmail("text", "is required, and must not be blank")
        if len(value) > cls.max_characters:
            raise InvalidEmail("text", f"is longer than {cls.max_characters:,} characters")
        if fault := body_fault(value):
            raise InvalidEmail("text", fault)
        return value

    @property
    def warnings(self) -> tuple[str, ...]:
        """See `Message`."""
        return ()

    @property
    def stored_tags(self) -> tuple[str, ...]:
        """See `Message`."""
        return stored_tags(self.tags, is_erased=self.erase_after_sending)

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Creates a message from a decoded JSON object. A null field counts as absent. Raises InvalidEmail with the
        JSON name of the first field that is unknown, missing or invalid."""
        if not isinstance(document, dict):
            raise InvalidEmail(cls.channel, "must be a JSON object")
        for name in document.keys() - TEXT_FIELDS:
            raise InvalidEmail(rules.shown(name), f"is not a field of an {cls.channel} message; check the spelling")
        given: dict[str, Any] = {name: value for name, value in document.items() if value is not None}
        for name in ("message_key", "to", "text"):
            if name not in given:
                raise InvalidEmail(name, "is required")
        if given.pop("channel", cls.channel) != cls.channel:
            raise InvalidEmail("channel", f"must be {cls.channel}")
        given["sender"] = given.pop("from", "")
        for name in INSTANT_FIELDS:
            if name in given:
                given[name] = instant_of(name, given[name])
        try:
            return cls(**given)
        except InvalidEmail as error:
            raise InvalidEmail("from" if error.field == "sender" else error.field, error.reason) from None

    def to_json(self) -> dict[str, object]:
        """The JSON object of this message, without empty fields. `from_json` creates an equal message from it."""
        document: dict[str, object] = {
            "channel": self.channel,
            "message_key": self.message_key,
            "tenant_id": self.tenant_id,
            "from": self.sender,
            "to": self.to[0],
            "text": self.text,
            "tags": list(self.tags),
            "correlation_id": self.correlation_id,
            "on_uncertain": self.on_uncertain and self.on_uncertain.value,
            "erase_after_sending": self.erase_after_sending,
            "ignore_suppression": self.ignore_suppression,
            "send_at": self.send_at and instant_text(self.send_at),
            "expires_at": self.expires_at and instant_text(self.expires_at),
            "lane": self.lane,
        }
        return {name: value for name, value in document.items() if value}

    def payload_hash(self) -> bytes:
        """A digest that shows whether a repeated message key has the same payload; see `Email.payload_hash`."""
        parts = [
            *(f"{self.channel} 1", self.sender, *self.to, self.text, self.on_uncertain or ""),
            *(str(len(self.stored_tags)), *self.stored_tags),
            *(str(self.ignore_suppression), self.lane or ""),
            *(instant_text(at) if at else "" for at in (self.send_at, self.expires_at)),
        ]
        return sha256("".join([f"{len(part)}:{part}" for part in parts]).encode()).digest()

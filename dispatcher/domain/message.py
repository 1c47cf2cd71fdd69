"""What an application can enqueue: an `Email`, an `Sms`, or a message of a channel that an installed package adds.

`Message` states each field once: its type, its kind (the rule, the JSON and the JSON Schema) and a sentence about it.
The constructor, the JSON and the schema of each class are derived from these fields. `TextMessage` is the base class of
messages that consist of a text for one recipient.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from hashlib import sha256
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, NamedTuple, Self

from dispatcher.domain import email_rules as rules
from dispatcher.domain.calendar import Calendar
from dispatcher.domain.email_json import (
    ATTACHMENT_SCHEMA,
    CALENDAR_SCHEMA,
    attachment_document,
    attachments_of,
    calendar_of,
    instant_of,
    instant_text,
    raw_of,
    raw_text,
)
from dispatcher.domain.json_data import NO_DATA, checked_data
from dispatcher.domain.lanes import LANE
from dispatcher.domain.outgoing import EMAIL_CHANNEL, ERASE_TAG, Attachment, stored_tags
from dispatcher.domain.status import OnUncertain
from dispatcher.domain.text import (
    DEFAULT_TENANT,
    MAX_KEY_CHARACTERS,
    MAX_METADATA_CHARACTERS,
    MAX_TENANT_CHARACTERS,
    METADATA_KEY_PATTERN,
    TENANT_PATTERN,
    body_fault,
    shown,
    unknown_fault,
)
from dispatcher.errors import InvalidEmail

__all__ = ["EMAIL_CHANNEL", "Message", "TextMessage"]

_REQUIRED: Final = object()


class Kind(NamedTuple):
    """A kind of field.

    `read` returns the value to keep, or raises InvalidEmail with the name of the field or of its invalid part, such as
    `to[1]`. `decode` converts the JSON value to the argument, and `encode` the kept value to JSON; None if they are the
    same. `metavar` names the value in `--help`.
    """

    read: Callable[[str, Any], Any]
    schema: Mapping[str, Any]
    decode: Callable[[str, Any], Any] | None = None
    encode: Callable[[Any], Any] | None = None
    metavar: str = "TEXT"


def text_schema(longest: int, shortest: int = 0, **more: str) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest, **({"minLength": shortest} if shortest else {}), **more}


def list_schema(item: Mapping[str, Any], most: int, **more: int) -> dict[str, Any]:
    """The schema of a list that may also be given as its only item."""
    return {"anyOf": [item, {"type": "array", "items": item, "maxItems": most, **more}]}


ADDRESS_SCHEMA: Final = {
    "type": "string",
    "minLength": 3,
    "maxLength": 774,
    "pattern": "@",
    "description": "`local@domain` or `Name <local@domain>`.",
}
_ADDRESS_REFERENCE: Final = {"$ref": "#/components/schemas/Address"}
_KEY: Final = Kind(rules.key, text_schema(MAX_KEY_CHARACTERS, 1))
_TENANT: Final = Kind(rules.tenant_id, text_schema(MAX_TENANT_CHARACTERS, 1, pattern=f"^{TENANT_PATTERN}$"))
_SENDER: Final = Kind(rules.sender, _ADDRESS_REFERENCE, metavar="ADDRESS")
_ADDRESSES: Final = Kind(
    rules.addresses, list_schema(_ADDRESS_REFERENCE, rules.MAX_RECIPIENTS), encode=list, metavar="ADDRESS"
)
_LINE: Final = Kind(rules.line, text_schema(rules.MAX_LINE_CHARACTERS))
_BODY: Final = Kind(rules.body, text_schema(rules.MAX_BODY_OCTETS))
_TEMPLATE: Final = Kind(rules.template, text_schema(100, 1, pattern="^[A-Za-z0-9_-]{1,100}$"), metavar="ID")
_TEMPLATE_DATA: Final = Kind(checked_data, {"type": "object"}, encode=dict, metavar="JSON")
_HEADER: Final = text_schema(rules.MAX_LINE_CHARACTERS)
_HEADERS: Final = Kind(
    lambda _, value: rules.headers(value, ()),  # `Email` reads them itself, because it knows which are allowed
    {"type": "object", "maxProperties": rules.MAX_HEADERS, "additionalProperties": _HEADER},
    encode=dict,
    metavar="NAME:VALUE",
)
_ATTACHMENTS: Final = Kind(
    rules.attachments,
    {"type": "array", "maxItems": rules.MAX_ATTACHMENTS, "items": {"$ref": "#/components/schemas/Attachment"}},
    attachments_of,
    lambda files: [attachment_document(file) for file in files],
    "PATH",
)
_CALENDAR: Final = Kind(
    rules.calendar,
    {"$ref": "#/components/schemas/Calendar"},
    calendar_of,
    lambda calendar: {"content": calendar.content, "method": calendar.method},
    "PATH",
)
_RAW: Final = Kind(rules.octets, {"type": "string", "contentEncoding": "base64"}, raw_of, raw_text, "PATH")
_TAGS: Final = Kind(
    rules.tags, list_schema(text_schema(rules.MAX_TAG_CHARACTERS, 1), rules.MAX_TAGS, uniqueItems=True), encode=list
)
_METADATA: Final = Kind(
    rules.metadata,
    {
        "type": "object",
        "maxProperties": rules.MAX_METADATA,
        "propertyNames": {"pattern": f"^{METADATA_KEY_PATTERN}$"},
        "additionalProperties": text_schema(MAX_METADATA_CHARACTERS, 1),
        "examples": [{"order": "4711"}],
    },
    encode=dict,
    metavar="KEY=VALUE",
)
_POLICY: Final = Kind(rules.policy, {"type": "string", "enum": list(map(str, OnUncertain))}, encode=str)
_FLAG: Final = Kind(rules.flag, {"type": "boolean"})
_INSTANT: Final = Kind(
    rules.instant,
    {"type": "string", "format": "date-time", "examples": ["2026-12-24T18:00:00+01:00"]},
    instant_of,
    instant_text,
    "TIME",
)
_LANE: Final = Kind(rules.lane, {"type": "string", "pattern": f"^{LANE.pattern}$", "examples": ["urgent"]})

SHARED_SCHEMAS: Final = {"Address": ADDRESS_SCHEMA, "Attachment": ATTACHMENT_SCHEMA, "Calendar": CALENDAR_SCHEMA}
"""The schemas to which the schemas of messages refer."""


class Stated(NamedTuple):
    """What a field of a message is stated as.

    `about` is for every face; `over_http` follows it in the HTTP API's documentation. A message that has no such field,
    or leaves it out, has the `default`. `put` sets the attribute of a message that is being created.
    """

    kind: Kind
    about: str
    default: Any
    json: str
    over_http: str
    name: str = ""
    put: Any = None


def stated_as(
    kind: Kind, about: str, default: Any = None, *, json: str = "", over_http: str = "", is_private: bool = False
) -> Any:
    """A field of `Message`. `repr` does not show a private field."""
    has_hash = False if isinstance(default, Mapping) else None
    return field(repr=not is_private, hash=has_hash, metadata={"": Stated(kind, about, default, json, over_http)})


@dataclass(frozen=True, slots=True, init=False)
class Message:
    """A valid message of any channel, as `enqueue` accepts it. Immutable, and validated when it is created.

    A class of messages accepts the fields that its constructor has as keyword arguments. Addresses are stored
    unchanged, and times in UTC.
    """

    channel: ClassVar[str]
    """The kind of the message: `email`, `sms`, or the name that a package gave to its own channel."""
    already_read: ClassVar[tuple[str, ...]] = ()
    """The arguments that the constructor itself reads, before it calls `_keep`."""
    by_json_name: ClassVar[Mapping[str, Stated]]
    """The fields that this class accepts, by their names in JSON."""
    required: ClassVar[Mapping[str, str]]
    """The arguments without defaults, and their names in JSON."""
    _accepted: ClassVar[tuple[tuple[str, Any, Any, Any], ...]]
    _absent: ClassVar[tuple[tuple[Any, Any], ...]]

    message_key: str = stated_as(
        _KEY,
        "Your unique name for the email. A repeated key never creates a second email.",
        _REQUIRED,
        over_http="If the request also has the header Idempotency-Key, both must be equal.",
    )
    sender: str = stated_as(
        _SENDER, "The sender, such as `Shop <shop@example.com>`.", _REQUIRED, json="from", is_private=True
    )
    to: tuple[str, ...] = stated_as(
        _ADDRESSES, "Recipients. Required unless `cc` or `bcc` has recipients.", (), is_private=True
    )
    subject: str = stated_as(_LINE, "The subject. Required unless `template_id` is set.", "", is_private=True)
    text: str | None = stated_as(
        _BODY, "Plain-text body. An email needs `text`, `html` or `template_id`.", is_private=True
    )
    html: str | None = stated_as(_BODY, "HTML body.", is_private=True)
    template_id: str | None = stated_as(
        _TEMPLATE, "The id of a template at the provider, which replaces `text` and `html`."
    )
    template_data: Mapping[str, object] = stated_as(
        _TEMPLATE_DATA, "The template's variables.", NO_DATA, is_private=True
    )
    cc: tuple[str, ...] = stated_as(_ADDRESSES, "Recipients of a copy.", (), is_private=True)
    bcc: tuple[str, ...] = stated_as(
        _ADDRESSES, "Recipients of a blind copy. No other recipient sees these addresses.", (), is_private=True
    )
    reply_to: tuple[str, ...] = stated_as(_ADDRESSES, "Addresses for replies.", (), is_private=True)
    headers: Mapping[str, str] = stated_as(
        _HEADERS,
        "Additional headers. The operator configures which names are allowed.",
        rules.NO_HEADERS,
        is_private=True,
    )
    attachments: tuple[Attachment, ...] = stated_as(_ATTACHMENTS, "Files to attach.", (), is_private=True)
    calendar: Calendar | None = stated_as(
        _CALENDAR,
        "An invitation or another calendar object, as iCalendar text with a METHOD. Mail programs show buttons for it.",
        is_private=True,
    )
    raw: bytes | None = stated_as(
        _RAW,
        "A whole MIME message, instead of the other fields of the content. Only the providers ses and smtp can send "
        "what these fields cannot say, such as a signature.",
        over_http="In base64. `recipients` is its envelope; default: the addresses in To, Cc and Bcc.",
        is_private=True,
    )
    tags: tuple[str, ...] = stated_as(
        _TAGS,
        "Categories for the provider's statistics. `one_time_code` is not sent to the provider: it sets "
        "`erase_after_sending`.",
        (),
    )
    metadata: Mapping[str, str] = stated_as(
        _METADATA,
        "Your own keys and values, such as `order=4711`, to find the email and to recognize its events. Lists, events "
        "and webhooks show them, so use no personal data.",
        rules.NO_METADATA,
    )
    tenant_id: str = stated_as(
        _TENANT,
        "The email's tenant. Keys are unique per tenant. Default: `default`.",
        DEFAULT_TENANT,
        over_http="Leave it out if you use an API key: the key has a tenant.",
    )
    correlation_id: str | None = stated_as(
        _KEY, "Your id for the request or event that caused the email. Logs and dead letters include it."
    )
    on_uncertain: OnUncertain | None = stated_as(
        _POLICY,
        "What to do if it is unknown whether the provider accepted the email: hold the email for an operator, or "
        "resend it (the recipient may get it twice). Default: the operator's setting.",
    )
    erase_after_sending: bool = stated_as(
        _FLAG, "Delete the content, including attachments, after the email is sent. For one-time codes.", False
    )
    ignore_suppression: bool = stated_as(
        _FLAG,
        "Send to suppressed recipients, too: for emails such as a legal notice.",
        False,
        over_http="The API key needs the scope `ignore_suppression`.",
    )
    send_at: datetime | None = stated_as(
        _INSTANT,
        "The email is not sent before this time, such as 2026-12-24T18:00:00+01:00. At most "
        f"{rules.MAX_DAYS_AHEAD} days ahead. The zone is required.",
    )
    expires_at: datetime | None = stated_as(
        _INSTANT,
        "If the email is not sent by this time, it is cancelled. Must be in the future, later than `send_at`, and at "
        f"most {rules.MAX_DAYS_AHEAD} days ahead. The zone is required.",
    )
    lane: str | None = stated_as(
        _LANE,
        "The lane of the email, such as `urgent`. Default: the lane that an operator set for the sender, or `normal`.",
        over_http="The API key must allow the lane. If the key has a default lane, the default is that lane.",
    )

    def __init_subclass__(cls) -> None:
        if Message not in cls.__bases__:
            return  # an application's class; its constructor calls that of its base class
        code, optional = cls.__init__.__code__, cls.__init__.__kwdefaults__ or {}
        arguments = code.co_varnames[1 : 1 + code.co_kwonlyargcount]
        accepted = [each for each in FIELDS if each.name in arguments]
        cls.by_json_name = {each.json: each for each in accepted}
        cls.required = {each.name: each.json for each in accepted if each.name not in optional}
        cls._accepted = tuple(
            (each.name, each.default, None if each.name in cls.already_read else each.kind.read, each.put)
            for each in accepted
        )
        cls._absent = tuple((each.put, each.default) for each in FIELDS if each not in accepted)

    def _keep(self, given: Mapping[str, Any]) -> None:
        """Sets all fields, as their kinds read the arguments of the constructor."""
        for name, default, reader, put in self._accepted:
            value = given[name]
            put(self, value if value is default or reader is None else reader(name, value))
        for put, default in self._absent:
            put(self, default)
        if ERASE_TAG in self.tags:
            object.__setattr__(self, "erase_after_sending", True)
        if self.send_at is not None and self.expires_at is not None and self.expires_at <= self.send_at:
            raise InvalidEmail("expires_at", "must be later than send_at")

    @classmethod
    def _from_json(cls, document: object, absent: Mapping[str, object] = MappingProxyType({}), **options: Any) -> Self:
        """See `from_json`. `absent` has the arguments for fields that JSON may leave out although they are required."""
        if not isinstance(document, dict):
            raise InvalidEmail(cls.channel, "must be a JSON object")
        given = dict(absent)
        for name, value in document.items():
            if name == "channel":
                if value not in (None, cls.channel):
                    raise InvalidEmail("channel", f"must be {cls.channel}")
                continue
            if (each := cls.by_json_name.get(name)) is None:
                fault = "is unknown; did you mean from?" if name == "sender" else unknown_fault(name, cls.by_json_name)
                raise InvalidEmail(shown(name), fault)
            if value is not None:
                given[each.name] = value if each.kind.decode is None else each.kind.decode(name, value)
        if missing := [name for argument, name in cls.required.items() if argument not in given]:
            raise InvalidEmail(missing[0], "is required")
        made: Any = cls
        try:
            return made(**given, **options)  # type: ignore[no-any-return]
        except InvalidEmail as error:
            if error.field != "sender":
                raise
            raise InvalidEmail("from", error.reason) from None

    def to_json(self) -> dict[str, object]:
        """The JSON object of this message, without empty fields. `from_json` creates an equal message from it."""
        document: dict[str, object] = {}
        for each in FIELDS:
            if value := getattr(self, each.name):
                document[each.json] = value if each.kind.encode is None else each.kind.encode(value)
        return document

    @classmethod
    def schema(cls, required: Collection[str], **instead: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON Schema of `from_json`. It never refuses what `from_json` accepts, but cannot express every rule.

        A required `message_key` may be null even so. `instead` has the schemas of fields that this class reads in its
        own way.
        """
        properties: dict[str, Any] = {}
        for name, each in cls.by_json_name.items():
            kinds = each.kind.schema.get("anyOf", [each.kind.schema])
            if name == "message_key" or name not in required:
                kinds = [*kinds, {"type": "null"}]
            schema = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
            properties[name] = {**schema, "description": f"{each.about} {each.over_http}".rstrip()}
        properties |= instead
        fixed = {"type": "object", "additionalProperties": False}
        return {**fixed, "required": list(required), "properties": properties}

    @property
    def senders(self) -> tuple[str, ...]:
        """Everyone whom a recipient may take for the sender."""
        return (self.sender,)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences that the caller should read although the message is valid. They contain no private data."""
        return ()

    @property
    def stored_tags(self) -> tuple[str, ...]:
        """The tags as PostgreSQL stores them; see `outgoing.stored_tags`."""
        return stored_tags(self.tags, is_erased=self.erase_after_sending)

    def metadata_parts(self) -> list[str]:
        """What `payload_hash` covers of the metadata; its order does not matter."""
        pairs = sorted(self.metadata.items())
        return ["metadata", str(len(pairs)), *(text for pair in pairs for text in pair)] if pairs else []

    def payload_hash(self) -> bytes:
        """A digest that shows whether a repeated message key has the same payload."""
        raise NotImplementedError


FIELDS: Final[tuple[Stated, ...]] = tuple(
    each.metadata[""]._replace(
        name=each.name, json=each.metadata[""].json or each.name, put=getattr(Message, each.name).__set__
    )
    for each in fields(Message)
)
"""All fields of messages."""


def _read_only(copied: dict[str, Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType(copied)


# Otherwise `pickle`, `deepcopy` and `asdict` fail for a message, because they cannot copy its read-only mappings.
copyreg.pickle(MappingProxyType, lambda mapping: (_read_only, (dict(mapping),)))


class TextMessage(Message):
    """A text for one recipient.

    Subclasses set `channel`, and override `checked_recipient`, `checked_sender` and `checked_text`. `to` is a tuple
    with one recipient. `sender` is the sender that the recipient sees; empty: the provider's default sender.
    """

    __slots__ = ()
    already_read: ClassVar[tuple[str, ...]] = ("to", "sender", "text")
    text: str
    max_characters: ClassVar[int] = 1600

    def __init__(
        self,
        *,
        message_key: str,
        to: str,
        text: str,
        sender: str = "",
        tags: Sequence[str] = (),
        metadata: Mapping[str, str] = rules.NO_METADATA,
        tenant_id: str = DEFAULT_TENANT,
        correlation_id: str | None = None,
        on_uncertain: OnUncertain | Literal["hold", "resend"] | None = None,
        erase_after_sending: bool = False,
        ignore_suppression: bool = False,
        send_at: datetime | None = None,
        expires_at: datetime | None = None,
        lane: str | None = None,
    ) -> None:
        """Raises InvalidEmail with the name of the first invalid argument."""
        given = locals()
        given["to"] = (self.checked_recipient(rules.string("to", to)),)
        given["sender"] = self.checked_sender(rules.string("sender", sender)) if sender else ""
        given["text"] = self.checked_text(rules.string("text", text))
        self._keep(given)

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

    @classmethod
    def from_json(cls, document: object) -> Self:
        """Creates a message from a decoded JSON object. A null field counts as absent. Raises InvalidEmail with the
        JSON name of the first field that is unknown, missing or invalid. `to` may also be a list of one recipient."""
        if isinstance(document, dict) and isinstance(to := document.get("to"), list):
            if len(to) != 1:
                raise InvalidEmail("to", "must be one recipient")
            document = {**document, "to": to[0]}
        return cls._from_json(document)

    def to_json(self) -> dict[str, object]:
        return {"channel": self.channel, **super().to_json(), "to": self.to[0]}

    def payload_hash(self) -> bytes:
        """See `Email.payload_hash`."""
        parts = [
            *(f"{self.channel} 1", self.sender, *self.to, self.text, self.on_uncertain or ""),
            *(str(len(self.stored_tags)), *self.stored_tags),
            *(str(self.ignore_suppression), self.lane or ""),
            *(instant_text(at) if at else "" for at in (self.send_at, self.expires_at)),
            *self.metadata_parts(),
        ]
        return sha256("".join([f"{len(part)}:{part}" for part in parts]).encode()).digest()

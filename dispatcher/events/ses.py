"""Converts the notices of Amazon SES to events, whether they arrive through SNS, EventBridge or SQS.

A configuration set publishes events (`eventType`) to SNS or EventBridge. An identity sends feedback notifications
(`notificationType`) to SNS, in the same form. The tag `email_id` names the email. Feedback notifications have no tags,
so they name no email; use a configuration set. A notice about several recipients becomes one event for each recipient.

    Send                accepted
    Delivery            delivered
    DeliveryDelay       deferred
    Bounce              bounced: hard if `bounceType` is Permanent, else soft
    Complaint           complained; if the notice lists several recipients, the event names none of them, because
                        perhaps only one of them has complained
    Reject              rejected; also Rendering Failure
    Subscription        unsubscribed, if the recipient has left all lists
    Open, Click         opened, clicked
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from dispatcher.domain.event import Bounce, EventKind, ProviderEvent
from dispatcher.events import fields
from dispatcher.events.contract import EventsUnreadable, ParsedEvents, Skipped

NAME: Final = "ses"
EMAIL_ID_TAG: Final = "email_id"

_NOT_SPAM: Final = "not-spam"
"""A complaint of this type means the opposite: a recipient has moved the email out of the spam folder."""


@dataclass(frozen=True, slots=True)
class _Notice:
    """What SES says about an email, and about one event of the email."""

    mail: Mapping[str, Any]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Recipient:
    """A recipient that a notice names, with the code and the text for this recipient."""

    address: str | None
    code: str | None = None
    detail: str | None = None


def events_of_message(text: str, topics: Collection[str] = ()) -> ParsedEvents:
    """The events of a message from an SQS queue: a notice of SES, in an envelope of SNS or EventBridge or without one.

    `topics`: the allowed topics of SNS; if there are any, all other messages are skipped.
    """
    try:
        document = fields.mapping(fields.load_json(text))
    except EventsUnreadable:
        return ParsedEvents.of([Skipped.MALFORMED])
    is_of_sns = document.get("Type") == "Notification" and isinstance(document.get("Message"), str)
    is_allowed = not topics or (is_of_sns and document.get("TopicArn") in topics)
    if is_of_sns and is_allowed:
        return parse_text(document["Message"])
    if not is_allowed or ("detail-type" in document and document.get("source") != "aws.ses"):
        return ParsedEvents.of([Skipped.FOREIGN])
    return parse(document.get("detail") if "detail-type" in document else document)


def parse_text(text: str) -> ParsedEvents:
    """The events of a notice. Ignores the plain text that SES sends once, after a topic is set up."""
    try:
        return parse(fields.load_json(text))
    except EventsUnreadable:
        return ParsedEvents.of([Skipped.MALFORMED if text.lstrip().startswith("{") else Skipped.IGNORED])


def parse(document: object) -> ParsedEvents:
    return ParsedEvents.of([_events(fields.mapping(document))])


def _events(document: Mapping[str, Any]) -> list[ProviderEvent] | Skipped:
    name = document.get("eventType", document.get("notificationType"))
    if not isinstance(name, str):
        return Skipped.MALFORMED
    if name == "AmazonSnsSubscriptionSucceeded":
        return Skipped.IGNORED
    if name not in _READERS:
        return Skipped.UNKNOWN_KIND
    field, read = _READERS[name]
    mail = fields.mapping(document.get("mail"))
    notice = _Notice(mail, fields.mapping(document.get(field)))
    ids = fields.mapping(mail.get("tags")).get(EMAIL_ID_TAG)
    email_id = fields.email_id(ids[0] if isinstance(ids, list) and len(ids) == 1 else ids)
    if email_id is None:
        return Skipped.FOREIGN
    # Notices of some kinds have no time of their own. SES sends them while it processes the email, so the email's time
    # is used.
    happened_at = fields.instant(notice.facts.get("timestamp")) or fields.instant(mail.get("timestamp"))
    if happened_at is None:
        return Skipped.MALFORMED
    return read(notice, partial(ProviderEvent, email_id=email_id, provider=NAME, happened_at=happened_at))


_Make = Callable[..., ProviderEvent]
_Read = Callable[[_Notice, _Make], "list[ProviderEvent] | Skipped"]


def _of_recipients(kind: EventKind, field: str, *texts: str) -> _Read:
    """Reads notices about some recipients, whom a field names: one event for each, with the fields `texts` as the
    detail."""

    def read(notice: _Notice, make: _Make) -> list[ProviderEvent]:
        said = [notice.facts.get(text) for text in texts]
        code, bounce = fields.code(notice.facts.get("smtpResponse")), None
        if kind is EventKind.BOUNCED:
            # `Transient` may be an out-of-office reply, and `Undetermined` may be anything. So neither type may
            # suppress an address.
            bounce = Bounce.HARD if notice.facts.get("bounceType") == "Permanent" else Bounce.SOFT
        return [
            make(kind, bounce, recipient=each.address, code=each.code or code, detail=fields.detail(*said, each.detail))
            for each in _recipients(notice, field)
        ]

    return read


def _complained(notice: _Notice, make: _Make) -> list[ProviderEvent] | Skipped:
    if notice.facts.get("complaintFeedbackType") == _NOT_SPAM:
        return Skipped.IGNORED
    recipients = _recipients(notice, "complainedRecipients")
    detail = fields.detail(notice.facts.get("complaintFeedbackType"), notice.facts.get("complaintSubType"))
    recipient = recipients[0].address if len(recipients) == 1 else None
    return [make(kind=EventKind.COMPLAINED, recipient=recipient, detail=detail)]


def _unsubscribed(notice: _Notice, make: _Make) -> list[ProviderEvent] | Skipped:
    if fields.mapping(notice.facts.get("newTopicPreferences")).get("unsubscribeAll") is not True:
        return Skipped.IGNORED
    return [make(kind=EventKind.UNSUBSCRIBED, recipient=_only_destination(notice))]


def _of_destinations(kind: EventKind, *texts: str) -> _Read:
    """Reads notices about the whole email: one event per recipient, with the fields `texts` as the detail."""

    def read(notice: _Notice, make: _Make) -> list[ProviderEvent]:
        detail = fields.detail(*(notice.facts.get(text) for text in texts))
        found = [fields.address(each) for each in fields.items(notice.mail.get("destination"))] or [None]
        return [make(kind=kind, recipient=address, detail=detail) for address in found]

    return read


def _of_reader(kind: EventKind) -> _Read:
    """A function that reads notices about an open or a click. Such notices do not name the recipient who did it."""

    def read(notice: _Notice, make: _Make) -> list[ProviderEvent]:
        link = fields.text(notice.facts.get("link")) or ""
        return [make(kind=kind, recipient=_only_destination(notice), distinction=link)]

    return read


_READERS: Final[Mapping[str, tuple[str, _Read]]] = {
    "Send": ("send", _of_destinations(EventKind.ACCEPTED)),
    "Delivery": ("delivery", _of_recipients(EventKind.DELIVERED, "recipients", "smtpResponse")),
    "DeliveryDelay": ("deliveryDelay", _of_recipients(EventKind.DEFERRED, "delayedRecipients", "delayType")),
    "Bounce": ("bounce", _of_recipients(EventKind.BOUNCED, "bouncedRecipients", "bounceType", "bounceSubType")),
    "Complaint": ("complaint", _complained),
    "Reject": ("reject", _of_destinations(EventKind.REJECTED, "reason")),
    "Rendering Failure": ("failure", _of_destinations(EventKind.REJECTED, "templateName", "errorMessage")),
    "Subscription": ("subscription", _unsubscribed),
    "Open": ("open", _of_reader(EventKind.OPENED)),
    "Click": ("click", _of_reader(EventKind.CLICKED)),
}
"""For each kind of notice: the field that contains the facts, and the function that converts the facts to events."""


def _recipients(notice: _Notice, field: str) -> list[_Recipient]:
    """The recipients in a field; if it names none, the email's only recipient, or one without an address."""
    found = []
    for each in fields.items(notice.facts.get(field)):
        known = each if isinstance(each, dict) else {"emailAddress": each}
        diagnosis = known.get("diagnosticCode")
        code = fields.code(known.get("status"), diagnosis)
        found.append(_Recipient(fields.address(known.get("emailAddress")), code, fields.text(diagnosis)))
    return found or [_Recipient(_only_destination(notice))]


def _only_destination(notice: _Notice) -> str | None:
    destinations = fields.items(notice.mail.get("destination"))
    return fields.address(destinations[0]) if len(destinations) == 1 else None

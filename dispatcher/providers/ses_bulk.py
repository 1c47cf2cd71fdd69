"""Several emails of one template in one SendBulkEmail: an entry each, and a status for each entry.

https://docs.aws.amazon.com/ses/latest/APIReference-V2/API_SendBulkEmail.html. At most 50 entries; we let them have 50
recipients together as well, which is what one destination may have and suits every reading of SES's quotas. Sender,
reply-to and template are common; data, headers and tags, `email_id` among them, are each entry's own.

An answer of 200 tells of each entry for itself. Another concerns all of them: nothing was taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dispatcher.domain.capabilities import recipients_of
from dispatcher.domain.outcome import Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.template_data import canonical_data
from dispatcher.errors import ProviderFault
from dispatcher.providers.capabilities import SES_MAX_RECIPIENTS
from dispatcher.providers.contract import CallLimits, Part, RefusedTogether
from dispatcher.providers.mime_headers import UnrenderableEmail
from dispatcher.providers.ses_errors import entry_outcome
from dispatcher.providers.ses_request import Parameters, bulk_entry, mailbox_of

LIMITS: Final = CallLimits(emails=50, recipients=SES_MAX_RECIPIENTS, octets=8 * 1024 * 1024)
"""SES's; the octets are ours."""
MAX_DATA_CHARACTERS: Final = 262_144
"""TemplateData in boto3's model."""

_OF_THE_CALL: Final = frozenset({"NotFoundException", "TemplateDoesNotExistException"})
"""What all of them have in common was not found."""


def part_of(email: OutgoingEmail) -> Part | None:
    """The email as part of a call; None where it has no template, has files, or cannot be rendered."""
    recipients = recipients_of(email)
    if email.template_id is None or email.attachments or recipients > SES_MAX_RECIPIENTS:
        return None
    try:
        data = canonical_data(email.template_data)
        entry = bulk_entry(email, data)
        for address in (email.sender, *email.reply_to):
            mailbox_of(address)
    except (UnrenderableEmail, ValueError):
        return None
    if len(data) > MAX_DATA_CHARACTERS:
        return None
    return Part(
        key=(email.sender, email.reply_to, email.template_id),
        recipients=recipients,
        octets=len(data),
        content=(email.sender, email.reply_to, email.template_id, entry),
    )


def request_of_call(parts: Sequence[Part], configuration_set: str | None) -> Parameters:
    """The parameters of `send_bulk_email`."""
    sender, reply_to, template_id, _ = parts[0].content
    request: Parameters = {
        "FromEmailAddress": mailbox_of(sender),
        "DefaultContent": {"Template": {"TemplateName": template_id, "TemplateData": "{}"}},
        "BulkEmailEntries": [part.content[-1] for part in parts],
    }
    if reply_to:
        request["ReplyToAddresses"] = [mailbox_of(address) for address in reply_to]
    if configuration_set:
        request["ConfigurationSetName"] = configuration_set
    return request


def outcomes_of_call(answer: Mapping[str, Any], count: int) -> list[Outcome | ProviderFault]:
    """The outcomes of an answer that boto3 takes for a good one; of emails that it does not speak of, uncertain."""
    results = answer.get("BulkEmailEntryResults")
    if not isinstance(results, list) or len(results) != count:
        status = str(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        unknown: Outcome = Uncertain("an answer that does not tell of each email", status)
        return [unknown] * count
    return [entry_outcome(result) for result in results]


def refusal_of_call(outcome: Outcome, count: int) -> list[Outcome | ProviderFault] | RefusedTogether:
    """What it means for each that SES refused the call, or that there was no answer."""
    is_common = not isinstance(outcome, Rejected) or outcome.reason is Reason.REJECTED_SENDER
    if is_common or (isinstance(outcome, Rejected) and outcome.code in _OF_THE_CALL):
        return [outcome] * count
    return RefusedTogether()


def email_id_of(part: Part) -> str:
    """Whose part it is."""
    value: str = part.content[-1]["ReplacementTags"][0]["Value"]
    return value

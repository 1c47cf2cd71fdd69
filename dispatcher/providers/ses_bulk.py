"""Several emails of one template in one SendBulkEmail: an entry each, and a status for each entry.

https://docs.aws.amazon.com/ses/latest/APIReference-V2/API_SendBulkEmail.html. At most 50 entries; we let them have 50
recipients together as well, which is what one destination may have and suits every reading of SES's quotas. Sender,
reply-to and template are common; data, headers and tags, `email_id` among them, are each entry's own.

An answer of 200 tells of each entry for itself. Another concerns all of them: nothing was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from dispatcher.domain.capabilities import recipients_of
from dispatcher.domain.outcome import Outcome, Reason, Rejected, Uncertain
from dispatcher.domain.outgoing import OutgoingEmail
from dispatcher.domain.template_data import canonical_data
from dispatcher.errors import ProviderFault
from dispatcher.providers.capabilities import SES_MAX_RECIPIENTS
from dispatcher.providers.contract import CallLimits, Part, RefusedTogether
from dispatcher.providers.ses_errors import document_of, entry_outcome, refusal_of
from dispatcher.providers.ses_request import Parameters, Request, bulk_entry, common_of
from dispatcher.transport.http import Answer
from dispatcher.transport.mime_headers import UnrenderableEmail

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
        entry = orjson.dumps(bulk_entry(email, data))
        common_of(email.sender, email.reply_to)
    except (UnrenderableEmail, orjson.JSONEncodeError, ValueError):
        return None
    if len(data) > MAX_DATA_CHARACTERS:
        return None
    return Part(
        key=(email.sender, email.reply_to, email.template_id),
        recipients=recipients,
        octets=len(entry),
        content=(email.sender, email.reply_to, email.template_id, entry),
    )


def request_of_call(parts: Sequence[Part], configuration_set: str | None) -> Request:
    """The parameters of SendBulkEmail."""
    sender, reply_to, template_id, _ = parts[0].content
    request: Parameters = {
        **common_of(sender, reply_to),
        "DefaultContent": {"Template": {"TemplateName": template_id, "TemplateData": "{}"}},
        "BulkEmailEntries": [orjson.Fragment(part.content[-1]) for part in parts],
    }
    if configuration_set:
        request["ConfigurationSetName"] = configuration_set
    return Request(request)


def outcomes_of_call(answer: Answer, count: int) -> list[Outcome | ProviderFault] | RefusedTogether:
    """What an answer to SendBulkEmail means for each of so many emails; of those that it does not speak of, uncertain.

    Raises:
        ProviderFault: it concerns the account or the set-up; SES took nothing.
    """
    if answer.status >= 300:
        return _refusal_of_call(refusal_of(answer, has_template=True), count)
    results = document_of(answer).get("BulkEmailEntryResults")
    if not isinstance(results, list) or len(results) != count or not all(isinstance(each, dict) for each in results):
        unknown: Outcome = Uncertain("an answer that does not tell of each email", str(answer.status))
        return [unknown] * count
    return [entry_outcome(result) for result in results]


def _refusal_of_call(outcome: Outcome, count: int) -> list[Outcome | ProviderFault] | RefusedTogether:
    """What it means for each that SES refused the call."""
    is_common = not isinstance(outcome, Rejected) or outcome.reason is Reason.REJECTED_SENDER
    if is_common or (isinstance(outcome, Rejected) and outcome.code in _OF_THE_CALL):
        return [outcome] * count
    return RefusedTogether()

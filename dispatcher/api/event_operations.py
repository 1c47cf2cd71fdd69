"""What the OpenAPI document says about the requests in which providers post events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from dispatcher.api.operation import BODY_PROBLEMS, Operation

_PROBLEMS: Final = ("signature-invalid", "signature-stale", *BODY_PROBLEMS)


def _signature_header(name: str, description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": True, "schema": {"type": "string"}, "description": description}


_TWILIO_SIGNATURE: Final = _signature_header(
    "X-Twilio-Signature", "HMAC over the URL and the form's fields, with the auth token."
)
RECEIVE_SENDGRID: Final = Operation(
    name="receive_sendgrid_events",
    summary="Receive SendGrid's events",
    description="For SendGrid's signed event webhook. The API responds after the events are committed, and never shows "
    "whether an email exists.",
    status=204,
    response_schema=None,
    request_schema="SendGridEvents",
    example=[{"event": "delivered", "email_id": "01938a7e-8f3c-7d42-9c51-2f6d1f0e9a77", "timestamp": 1764000000}],
    parameters=(
        _signature_header("X-Twilio-Email-Event-Webhook-Signature", "ECDSA over the timestamp and the raw body."),
        _signature_header("X-Twilio-Email-Event-Webhook-Timestamp", "When the request was signed, in Unix seconds."),
    ),
    problems=_PROBLEMS,
    needs_key=False,
)
RECEIVE_SES: Final = Operation(
    name="receive_ses_events",
    summary="Receive Amazon SES's events from Amazon SNS",
    description="For HTTPS subscriptions of the topics in DISPATCHER_SES_EVENTS_TOPICS. The API confirms the "
    "subscriptions itself. The body may have any media type.",
    status=204,
    response_schema=None,
    request_schema="SnsMessage",
    example={"Type": "Notification", "TopicArn": "arn:aws:sns:eu-west-1:123456789012:ses-events", "Message": "{…}"},
    problems=("topic-forbidden", *_PROBLEMS, "provider-unavailable"),
    needs_key=False,
)
RECEIVE_TWILIO: Final = Operation(
    name="receive_twilio_status",
    summary="Receive Twilio's status callbacks",
    description="Twilio posts a form for each change of an SMS's status. The signature covers the URL, so Twilio "
    "must post to DISPATCHER_TWILIO_CALLBACK_URL. The API responds after the event is committed, and never shows "
    "whether the SMS exists.",
    status=204,
    response_schema=None,
    request_schema="TwilioForm",
    example={"MessageSid": f"SM{'0' * 32}", "MessageStatus": "delivered", "To": "+4915112345678"},
    parameters=(_TWILIO_SIGNATURE,),
    problems=_PROBLEMS,
    needs_key=False,
)
RECEIVE_TWILIO_SMS: Final = replace(
    RECEIVE_TWILIO,
    name="receive_twilio_sms",
    summary="Receive SMS from recipients",
    description="Twilio posts a form for each SMS to one of your numbers. STOP suppresses the number for every tenant "
    "that has sent it an SMS, and START ends the suppression. The API does nothing else with the SMS.",
    example={"MessageSid": f"SM{'0' * 32}", "From": "+4915112345678", "Body": "STOP"},
)
SCHEMAS: Final[dict[str, Any]] = {
    "TwilioForm": {"type": "object", "required": ["MessageSid"], "additionalProperties": {"type": "string"}},
    "SendGridEvents": {"type": "array", "items": {"type": "object"}},
    "SnsMessage": {
        "type": "object",
        "required": ["Type", "TopicArn", "Message"],
        "properties": {
            "Type": {"enum": ["Notification", "SubscriptionConfirmation", "UnsubscribeConfirmation"]},
            "SignatureVersion": {"enum": ["1", "2"]},
        },
    },
}
